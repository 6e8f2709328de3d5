"""The demo's parts: real text in pages, pages in strips, strips read by the real model, readers that repeat themselves."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from examples.demo import library, ocr, readers
from mcp_client.edge.model import OnnxModel

needs_models = pytest.mark.skipif(
    find_spec("rapidocr_onnxruntime") is None, reason="pip install --no-deps rapidocr-onnxruntime==1.4.4"
)


@pytest.fixture(scope="module")
def shelf() -> dict[str, library.Document]:
    return library.open_library(3, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    ocr.copy_models(folder)
    return folder


def test_a_library_has_the_documents_and_full_pages_that_were_asked_for(
    shelf: dict[str, library.Document],
) -> None:
    assert len(shelf) == 3
    for document in shelf.values():
        assert [len(page) for page in document.pages] == [library.LINES] * 4
        assert all(picture.shape[1] == library.PAGE_WIDTH for picture in document.pictures)


def test_no_two_pages_look_alike(shelf: dict[str, library.Document]) -> None:
    pictures = [picture.tobytes() for document in shelf.values() for picture in document.pictures]
    assert len(set(pictures)) == len(pictures)


def test_a_library_larger_than_the_text_is_refused() -> None:
    with pytest.raises(ValueError, match="not 500"):
        library.open_library(500, 4)


def test_a_page_becomes_one_strip_per_line_from_minus_one_to_one(shelf: dict[str, library.Document]) -> None:
    page = next(iter(shelf.values())).pictures[0]
    x = library.strips(page)["x"]
    assert x.shape == (library.LINES, 3, library.STRIP_HEIGHT, library.PAGE_WIDTH)
    assert x.dtype == np.float32
    assert (x.min(), x.max()) == (-1, 1)


def test_ink_bands_are_the_runs_of_rows_with_ink_with_small_gaps_closed() -> None:
    ink = np.zeros((20, 4), bool)
    ink[[2, 3, 5, 6, 12], 1] = True  # one empty row within a letter, several between lines
    assert library.ink_bands(ink) == [(2, 7), (12, 13)]
    assert library.ink_bands(np.zeros((5, 5), bool)) == []


def test_ctc_drops_repeats_and_blanks_but_keeps_doubled_letters() -> None:
    classes = [1, 1, 0, 2, 0, 2, 3, 3]
    probabilities = np.eye(4, dtype=np.float32)[classes][np.newaxis]
    assert ocr.read_lines(probabilities, ["", "a", "b", " "]) == ["abb"]


@pytest.mark.parametrize(
    ("read", "true", "errors"),
    [
        (["same"], ["same"], 0),
        (["sitting"], ["kitten"], 3),
        (["one"], ["one", "two"], 3),
        ([], ["ab"], 2),
    ],
)
def test_character_errors_are_the_edits_that_would_mend_the_text(
    read: list[str], true: list[str], errors: int
) -> None:
    assert ocr.character_errors(read, true) == errors


@needs_models
def test_the_model_reads_what_is_printed(shelf: dict[str, library.Document], models: Path) -> None:
    model = OnnxModel(models / f"{ocr.REC}.onnx")
    characters = ocr.alphabet(models / f"{ocr.REC}.onnx")
    errors = printed = 0
    for document in shelf.values():
        output = next(iter(model.run(library.strips(document.pictures[1])).values()))
        assert output.shape[2] == len(characters)
        errors += ocr.character_errors(ocr.read_lines(output, characters), document.pages[1])
        printed += sum(map(len, document.pages[1]))
    assert errors / printed < 0.15


@needs_models
def test_the_detector_finds_every_row_of_a_cover(shelf: dict[str, library.Document], models: Path) -> None:
    model = OnnxModel(models / f"{ocr.DET}.onnx")
    for document in shelf.values():
        output = next(iter(model.run(library.layout_input(document.cover)).values()))
        assert ocr.rows_found(output) == len(document.cover_lines)


def test_the_same_seed_gives_the_same_sessions_and_another_seed_others() -> None:
    shapes = {"a": 9, "b": 9, "c": 9}
    once = readers.readings(shapes, turns=120, seed=1)
    assert once == readers.readings(shapes, turns=120, seed=1)
    assert once != readers.readings(shapes, turns=120, seed=2)


def test_sessions_have_exactly_the_turns_asked_for_and_stay_within_the_documents() -> None:
    shapes = {"a": 5, "b": 9, "c": 2}
    turns = [turn for reading in readers.readings(shapes, turns=500, seed=3) for turn in reading.turns]
    assert len(turns) == 500
    assert all(0 <= turn.page <= shapes[turn.document] for turn in turns)


def test_readers_mostly_go_on_to_the_next_page_and_open_a_document_at_its_cover() -> None:
    shapes = dict.fromkeys("abcdef", 20)
    steps: Counter[str] = Counter()
    for reading in readers.readings(shapes, turns=3000, seed=4):
        assert reading.turns[0].page == 0
        for before, after in zip(reading.turns, reading.turns[1:], strict=False):
            if before.document == after.document and after.page == before.page + 1:
                steps["on"] += 1
            elif after.page == 0:
                steps["away"] += 1
            else:
                steps["other"] += 1
    assert steps["on"] / steps.total() > 0.7
    assert steps["away"] > 0
    assert steps["other"] > 0


def test_documents_are_popular_by_zipfs_law() -> None:
    shapes = dict.fromkeys("abcdefgh", 6)
    opened = Counter(
        turn.document
        for reading in readers.readings(shapes, turns=6000, seed=5)
        for turn in reading.turns
        if turn.page == 0
    )
    assert opened["a"] > opened["b"] > opened["h"]
    assert opened["a"] / opened["d"] == pytest.approx(4, rel=0.35)


def test_paths_name_the_page_or_the_layout() -> None:
    assert readers.Turn("x", 3).path == "/doc/x/page/3"
    assert readers.Turn("x", 0).path == "/doc/x/layout"
