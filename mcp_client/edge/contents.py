"""Which files a version of a model consists of: its ONNX file, the files that hold its tensors, and those beside it that say
something of it.
"""

from __future__ import annotations

from pathlib import Path

from .labels import LABELS_FILE
from .onnx_file import external_files
from .repository import MODEL_FILE, SMOKE_FILE, ModelFile, ModelRepository, inside

SIDE_FILES = (LABELS_FILE, SMOKE_FILE)  # part of a version where they are there


def files_of(model_file: Path) -> dict[str, Path]:
    """Name → path of every file; the model's own is named ``model.onnx``, whatever it is called here.

    Side files belong to a model in a folder of its own; in a folder of many models they would be anyone's.
    """
    found = {MODEL_FILE: model_file}
    found |= {name: inside(model_file.parent, name) for name in external_files(model_file)}
    if model_file.name == MODEL_FILE:
        beside = {name: model_file.with_name(name) for name in SIDE_FILES}
        found |= {name: path for name, path in beside.items() if path.is_file()}
    return found


def digests_of(repository: ModelRepository, file: ModelFile) -> dict[str, str]:
    """Name → ``sha256:…`` of every file of a version, as they are now."""
    return {name: repository.digest(path) for name, path in files_of(file.path).items()}
