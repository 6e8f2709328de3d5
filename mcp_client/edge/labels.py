"""The names of a model's classes: in the ONNX file's own metadata, or in ``labels.txt`` beside it.

In the metadata (``metadata_props``) the key ``labels.OUTPUT`` is for one output, ``labels`` for all; the file is for all. Either
way there is one label a line, in the order of the classes.
"""

from __future__ import annotations

from pathlib import Path

from .onnx_file import metadata_props
from .repository import MODEL_FILE

LABELS_FILE = "labels.txt"
_LONGEST_FILE = 16 * 2**20


def has_labels_file(model_file: Path) -> bool:
    """Whether there is one beside a model in a folder of its own (in a folder of many models it would be anyone's)."""
    return model_file.name == MODEL_FILE and (model_file.parent / LABELS_FILE).is_file()


class Labels:
    """Read once, when a model is loaded: they belong to the file that was loaded."""

    def __init__(self, model_file: Path) -> None:
        props = metadata_props(model_file)
        self._of = {
            key: tuple(text.splitlines()) for key, text in props.items() if key.split(".")[0] == "labels"
        }
        if "labels" not in self._of and has_labels_file(model_file):
            with (model_file.parent / LABELS_FILE).open("rb") as lines:
                self._of["labels"] = tuple(lines.read(_LONGEST_FILE).decode("utf-8", "replace").splitlines())

    def __call__(self, output: str) -> tuple[str, ...]:
        """The labels of one output; () if there are none."""
        return self._of.get(f"labels.{output}", self._of.get("labels", ()))
