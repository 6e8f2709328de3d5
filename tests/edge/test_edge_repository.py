"""Models on disk: found, ordered, verified, and never looked for outside of their folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client.edge import repository as module
from mcp_client.edge.model import file_digest
from mcp_client.edge.repository import ModelFile, ModelRepository, inside, name_fault, version_order
from mcp_client.errors import EdgeError, IntegrityError
from tests import models

HOSTILE = [
    "", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", ".hidden", "a.", " a", "a ", "x" * 129, "ü" * 65,
    "c:", "a*", "\ud800",
]  # fmt: skip


def seal(path: Path) -> None:
    """Write ``.sha256`` files as ``sha256sum`` does, for everything in the model's folder."""
    lines = [
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
        for file in sorted(path.parent.iterdir())
        if file.suffix != ".sha256"
    ]
    path.with_name(path.name + ".sha256").write_text("".join(lines))


def test_layouts_are_all_found(tmp_path: Path) -> None:
    models.repository(tmp_path, big={"1": 1.0, "2": 2.0})
    models.affine(tmp_path / "small.onnx")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "empty" / "1").mkdir(parents=True)
    repository = ModelRepository.open(tmp_path)
    assert repository.models() == ["big", "small"]
    assert repository.versions("big") == ["1", "2"]
    assert repository.versions("small") == ["1"]
    assert repository.resolve("small").path == tmp_path / "small.onnx"
    assert repository.resolve("big") == ModelFile(
        tmp_path / "big" / "2" / "model.onnx", "big", "2", file_digest(tmp_path / "big" / "2" / "model.onnx")
    )


def test_a_single_file_is_a_repository_of_one(tmp_path: Path) -> None:
    path = models.affine(tmp_path / "my model.onnx")
    models.affine(tmp_path / "other.onnx")
    repository = ModelRepository.open(path)
    assert repository.models() == ["my model"]
    assert repository.resolve() == ModelFile(path, "my model", "1", file_digest(path))


def test_opening_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match="there is no model file or folder"):
        ModelRepository.open(tmp_path / "missing")
    (tmp_path / "model.txt").write_text("")
    with pytest.raises(EdgeError, match=r"is no \.onnx file"):
        ModelRepository.open(tmp_path / "model.txt")


def test_no_name_means_the_only_model(tmp_path: Path) -> None:
    repository = ModelRepository(tmp_path)
    with pytest.raises(EdgeError, match="has no models"):
        repository.resolve()
    models.repository(tmp_path, a={"1": 1.0})
    assert repository.resolve().model == "a"
    models.repository(tmp_path, b={"1": 1.0})
    with pytest.raises(EdgeError, match="has 2 models; name one of 'a', 'b'"):
        repository.resolve()


def test_what_is_missing_is_told_with_what_is_there(tmp_path: Path) -> None:
    models.repository(tmp_path, a={"1": 1.0})
    repository = ModelRepository(tmp_path)
    with pytest.raises(EdgeError, match=r"no model 'b' .*it has 'a'"):
        repository.resolve("b")
    with pytest.raises(EdgeError, match=r"'a' has no version '3' .*it has '1'"):
        repository.resolve("a", "3")


def test_versions_are_ordered_as_people_count() -> None:
    for lower, higher in [
        ("9", "10"),
        ("1.9", "1.10"),
        ("v2", "v10"),
        ("2025-12-31", "2026-01-01"),
        ("1", "1.1"),
    ]:
        assert version_order(lower) < version_order(higher)


@given(st.lists(st.text(max_size=12)))
def test_any_versions_can_be_ordered(versions: list[str]) -> None:
    sorted(versions, key=version_order)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_never_paths(tmp_path: Path, name: str) -> None:
    models.repository(tmp_path / "root", m={"1": 1.0})
    models.affine(tmp_path / "x" / "1" / "model.onnx")
    repository = ModelRepository(tmp_path / "root")
    for model, version in ((name, "1"), ("m", name)):
        with pytest.raises(EdgeError):
            repository.folder(model, version)
        if name:
            with pytest.raises(EdgeError):
                repository.resolve(model, version)
            with pytest.raises(EdgeError):
                repository.pin(model, version)
    if name != "a/b":  # a file beside a model may lie in a folder below it
        with pytest.raises(IntegrityError):
            inside(tmp_path, f"weights/{name}")


@given(st.text(max_size=140))
def test_a_name_is_a_single_folder_or_refused(name: str) -> None:
    if name_fault(name) is None:
        assert Path("root", name).parts == ("root", name)
        assert os.path.normpath(f"root/{name}") == f"root/{name}"


@pytest.mark.parametrize(
    "text", ["{hex}", "sha256:{hex}\n", "{hex}  model.onnx\n", "{HEX} *model.onnx\r\n\n"]
)
def test_a_digest_beside_the_model_confirms_it(tmp_path: Path, text: str) -> None:
    path = models.affine(tmp_path / "m" / "1" / "model.onnx")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name("model.onnx.sha256").write_text(text.format(hex=digest, HEX=digest.upper()))
    assert ModelRepository(tmp_path).resolve("m").digest == f"sha256:{digest}"


@pytest.mark.parametrize(
    "text", ["0" * 64, "", "junk", "a" * 63 + "  model.onnx", "{hex}  other.onnx", "{hex}\nrubbish"]
)
def test_a_model_that_its_digest_does_not_confirm_is_not_used(tmp_path: Path, text: str) -> None:
    path = models.affine(tmp_path / "m" / "1" / "model.onnx")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name("model.onnx.sha256").write_text(text.format(hex=digest))
    with pytest.raises(IntegrityError):
        ModelRepository(tmp_path).resolve("m")


def test_a_truncated_or_changed_file_is_noticed_after_it_was_verified(tmp_path: Path) -> None:
    path = models.affine(tmp_path / "m" / "1" / "model.onnx")
    seal(path)
    repository = ModelRepository(tmp_path)
    repository.resolve("m")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:-1] + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(IntegrityError, match="it was not used"):
            repository.resolve("m")
    path.write_bytes(whole)
    repository.resolve("m")


def test_external_data_is_verified_where_it_has_a_digest(tmp_path: Path) -> None:
    path = models.external(tmp_path / "m" / "1" / "model.onnx")
    seal(path)
    repository = ModelRepository(tmp_path)
    repository.resolve("m")
    weights = path.with_name("weights.bin")
    weights.write_bytes(b"\0" * weights.stat().st_size)
    with pytest.raises(IntegrityError, match=r"weights\.bin"):
        repository.resolve("m")
    weights.unlink()
    with pytest.raises(EdgeError, match=r"weights\.bin"):
        repository.resolve("m")


def test_a_digest_file_can_not_point_outside(tmp_path: Path) -> None:
    path = models.affine(tmp_path / "m" / "1" / "model.onnx")
    seal(path)
    sums = path.with_name("model.onnx.sha256")
    sums.write_text(sums.read_text() + f"{'0' * 64}  ../../../etc/passwd\n")
    with pytest.raises(IntegrityError, match="not allowed"):
        ModelRepository(tmp_path).resolve("m")


def test_a_file_is_hashed_once_for_as_long_as_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = models.affine(tmp_path / "m" / "1" / "model.onnx")
    hashed: list[Path] = []
    monkeypatch.setattr(module, "file_digest", lambda file: hashed.append(file) or file_digest(file))
    repository = ModelRepository(tmp_path)
    assert repository.resolve("m") == repository.resolve("m")
    assert hashed == [path]
    models.affine(tmp_path / "new.onnx", scale=3.0).replace(path)
    repository.resolve("m")
    assert hashed == [path, path]


def test_sight_changes_with_every_change_that_matters(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    repository = ModelRepository(tmp_path)
    seen = [repository.sight("m")]

    def changed() -> bool:
        seen.append(repository.sight("m"))
        return seen[-1] not in seen[:-1]

    assert not changed()
    models.repository(tmp_path, m={"2": 2.0})
    assert changed()
    repository.pin("m", "1")
    assert changed()
    seal(tmp_path / "m" / "1" / "model.onnx")
    assert changed()
    models.affine(tmp_path / "new.onnx", scale=3.0).replace(tmp_path / "m" / "2" / "model.onnx")
    assert changed()


def test_the_version_that_counts_is_the_pinned_the_followed_or_the_newest(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0, "10": 3.0})
    repository = ModelRepository(tmp_path)
    assert repository.resolve("m").version == "10"
    repository.follow("m", "2")
    assert repository.candidates("m") == ["2", "10", "1"]
    repository.pin("m", "1")
    assert repository.resolve("m").version == "1"
    assert repository.pinned("m") == "1"
    repository.unpin("m")
    assert repository.resolve("m").version == "2"


def test_rolling_back_goes_to_the_version_before(tmp_path: Path) -> None:
    models.repository(tmp_path, m={"1": 1.0, "9": 2.0, "10": 3.0})
    repository = ModelRepository(tmp_path)
    assert repository.rollback("m") == "9"
    assert repository.resolve("m").version == "9"
    assert repository.rollback("m") == "1"
    with pytest.raises(EdgeError, match="no version of 'm' before '1'"):
        repository.rollback("m")


@pytest.mark.parametrize("note", [b"", b"77\n", b"\xff\xfe", b"../../x"])
def test_a_damaged_note_is_as_good_as_none(tmp_path: Path, note: bytes) -> None:
    models.repository(tmp_path, m={"1": 1.0, "2": 2.0})
    (tmp_path / "m" / ".pinned").write_bytes(note)
    assert ModelRepository(tmp_path).resolve("m").version == "2"
