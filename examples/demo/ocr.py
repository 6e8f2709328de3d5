"""PP-OCRv4: where its ONNX files are, and how its outputs become text and boxes."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mcp_client.tensors import Array

from .library import ink_bands

REC = "ppocr_rec"  # recognition: a strip with one line of text → characters
DET = "ppocr_det"  # detection: a page → where there is text
_FILES = {REC: "ch_PP-OCRv4_rec_infer.onnx", DET: "ch_PP-OCRv4_det_infer.onnx"}
_INK = 0.3  # PP-OCR's own threshold on the detection map (DBPostProcess, ``thresh``)


def copy_models(folder: Path) -> None:
    """Put the model files of the wheel ``rapidocr-onnxruntime`` into ``folder``, as they are.

    The package itself is not imported: it needs OpenCV, its files do not. ``FileNotFoundError`` says how to get them.
    """
    found = importlib.util.find_spec("rapidocr_onnxruntime")
    if found is None or found.origin is None:
        raise FileNotFoundError(
            "the demo's OCR models ship in the wheel rapidocr-onnxruntime, which is not installed: "
            "pip install --no-deps rapidocr-onnxruntime==1.4.4"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in _FILES.items():
        shutil.copyfile(Path(found.origin).parent / "models" / file, folder / f"{name}.onnx")


def alphabet(model: Path) -> list[str]:
    """The character of each class: none (CTC's blank), those in the model's own metadata, the space."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # only its metadata is read
    metadata = ort.InferenceSession(str(model), options).get_modelmeta().custom_metadata_map
    return ["", *metadata["character"].splitlines(), " "]


def read_lines(probabilities: Array, characters: Sequence[str]) -> list[str]:
    """CTC, best path: FP32 ``[lines, steps, classes]`` → text: the likeliest class of each step, repeats and blanks dropped."""
    best = probabilities.argmax(axis=2)
    fresh = np.ones_like(best, dtype=bool)
    fresh[:, 1:] = best[:, 1:] != best[:, :-1]
    kept = fresh & (best != 0)
    return [
        "".join(characters[index] for index in row[keep]).strip()
        for row, keep in zip(best, kept, strict=True)
    ]


def rows_found(probabilities: Array) -> int:
    """How many rows of text the detection map ``[1, 1, h, w]`` shows."""
    return len(ink_bands(probabilities[0, 0] > _INK))


def character_errors(read: Sequence[str], true: Sequence[str]) -> int:
    """Edit distance (insertions, deletions, substitutions) over all lines."""
    lines = max(len(read), len(true))
    padded = (list(side) + [""] * (lines - len(side)) for side in (read, true))
    return sum(_distance(a, b) for a, b in zip(*padded, strict=True))


def _distance(a: str, b: str) -> int:
    """Levenshtein's."""
    above = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
        above = row
    return above[-1]
