"""Triton's model repository for the cases: what each model takes and gives, and which script of ``triton_models/`` runs it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.models import IDENTITY_TYPES

_SCRIPTS = Path(__file__).parent / "triton_models"
DATATYPES = tuple(name for name in IDENTITY_TYPES if not name.startswith("FP8"))  # which Triton lacks

# name: (script, inputs, outputs, further configuration). A tensor is (name, datatype, dims).
Tensor = tuple[str, str, list[int]]
MODELS: dict[str, tuple[str, list[Tensor], list[Tensor], str]] = {
    # Triton has no tensors of rank 0, and a model's inputs have one rank: identity_fp32_1, identity_fp32_2, …
    f"identity_{datatype.lower()}_{rank}": (
        "identity",
        [("x", datatype, [-1] * rank)],
        [("y", datatype, [-1] * rank)],
        "",
    )
    for datatype in DATATYPES
    for rank in (1, 2)
}
MODELS |= {
    "add": (
        "add",
        [("a", "FP32", [-1]), ("b", "FP32", [-1])],
        [("sum", "FP32", [-1]), ("difference", "FP32", [-1])],
        "",
    ),
    "fail": ("fail", [("x", "FP32", [-1])], [("y", "FP32", [-1])], ""),
    "slow": ("slow", [("x", "FP32", [-1])], [("y", "FP32", [-1])], ""),
    "spare": ("identity", [("x", "FP32", [-1])], [("y", "FP32", [-1])], ""),
    "echo": ("echo", [("x", "FP32", [-1])], [("told", "BYTES", [1])], ""),
    "repeat": (
        "repeat",
        [("x", "INT32", [-1])],
        [("y", "INT32", [1])],
        "model_transaction_policy { decoupled: true }",
    ),
    # The batch axis is in front: a sequence batcher has one.
    "sequence": (
        "sequence",
        [("x", "INT32", [1])],
        [("total", "INT32", [1])],
        "max_batch_size: 4 sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 } "
        'control_input [{ name: "START" control [{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }] }] }',
    ),
}


def write(folder: Path, models: Iterable[str]) -> Path:
    """Lay down the named models; returns ``folder``."""
    for name in models:
        script, inputs, outputs, further = MODELS[name]
        version = folder / name / "1"
        version.mkdir(parents=True)
        shutil.copy(_SCRIPTS / f"{script}.py", version / "model.py")
        config = [
            'backend: "python"',
            "instance_group [{kind: KIND_CPU count: 1}]",
            *(_tensor("input", *tensor) for tensor in inputs),
            *(_tensor("output", *tensor) for tensor in outputs),
            further,
        ]
        (folder / name / "config.pbtxt").write_text("\n".join(config))
    return folder


def backends(folder: Path, home: Path) -> Path:
    """Triton's backends with the stub for this version of Python put in its place, which the wheel leaves to its user."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "python"
    python.mkdir(parents=True)
    for part in (home / "backends" / "python").iterdir():
        (python / part.name).symlink_to(part)
    stub = python / "triton_python_backend_stub"
    stub.unlink(missing_ok=True)
    stub.symlink_to(home / "python_backend_stubs" / version / "triton_python_backend_stub")
    return folder


def _tensor(kind: str, name: str, datatype: str, dims: list[int]) -> str:
    triton = "STRING" if datatype == "BYTES" else datatype
    return f'{kind} [{{name: "{name}" data_type: TYPE_{triton} dims: {dims}}}]'
