"""Whether a model that was just loaded does what it should, before anybody depends on it.

``smoke.npz`` beside ``model.onnx`` says what to try: ``inputs/NAME`` for each input, and, if you like, ``outputs/NAME`` for
outputs to be found, within ``rtol`` and ``atol`` (1e-3 and 1e-5 if they are not there). Plain arrays, nothing pickled::

    np.savez("smoke.npz", **{"inputs/x": x, "outputs/probs": probs, "rtol": 1e-2})

Text (BYTES) goes in as arrays of ``S`` or ``U``, BF16 and FP8 as their bytes: ``x.view("V2")``, ``x.view("V1")``. Without
such a file a model is tried on zeros, which may be no valid input for it: then it is held against a version only if the one
in use did better on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..errors import EdgeError, IntegrityError, InvalidInputError, MCPError, listed
from ..inputs import as_inputs
from ..tensors import Array, dtype_of
from .model import OnnxModel
from .repository import MODEL_FILE, SMOKE_FILE

_RTOL, _ATOL = 1e-3, 1e-5  # what other hardware and other versions of ONNX Runtime may differ by


def prove(model: OnnxModel, before: OnnxModel | None = None) -> None:
    """Run a model once, which also spares its first caller what ONNX Runtime does late. ``before``: the one in use.

    Raises ``EdgeError`` if it must not be used.
    """
    file = model.path.with_name(SMOKE_FILE)
    if model.path.name == MODEL_FILE and file.is_file():
        _try(model, file)
        return
    fault = _fault_on_zeros(model)
    comparable = before is not None and before.metadata.inputs == model.metadata.inputs
    if fault and before is not None and comparable and not _fault_on_zeros(before):
        raise EdgeError(
            f"{model.path} on zeros: {fault}; version {before.metadata.version!r} is not like that. If it is meant to be, "
            f"put a {SMOKE_FILE} beside it"
        )


def _try(model: OnnxModel, file: Path) -> None:
    found = _read(file)
    inputs = {name[7:]: array for name, array in found.items() if name.startswith("inputs/")}
    wanted = {name[8:]: array for name, array in found.items() if name.startswith("outputs/")}
    other = (
        found.keys()
        - {"rtol", "atol"}
        - {f"inputs/{name}" for name in inputs}
        - {f"outputs/{name}" for name in wanted}
    )
    if other or not inputs:
        raise IntegrityError(
            f"{file} must hold inputs/NAME for each input, outputs/NAME, rtol and atol; got {listed(sorted(found))}"
        )
    tolerance = {
        name: float(found.get(name, default)) for name, default in (("rtol", _RTOL), ("atol", _ATOL))
    }
    try:
        for spec in model.metadata.inputs:
            if spec.name in inputs:
                inputs[spec.name] = _named(inputs[spec.name], dtype_of(spec.datatype))
        outputs = model.run(as_inputs(inputs, model.metadata.inputs), tuple(wanted))
    except MCPError as error:
        raise EdgeError(f"{model.path} fails on its {SMOKE_FILE}: {error.message}") from error
    for name, array in outputs.items():
        fault = _difference(array, wanted[name], **tolerance) if wanted else _not_finite(array)
        if fault:
            raise EdgeError(f"{model.path} on its {SMOKE_FILE}: output {name!r} {fault}")


def _read(file: Path) -> dict[str, Array]:
    import zipfile  # late: few models have one, and it is a twentieth of a cold start
    import zlib

    try:
        with file.open("rb") as handle:  # numpy leaves it open where it is damaged
            found = np.load(handle, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise ValueError("it holds one array; its arrays need names")
            return dict(found)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise IntegrityError(f"{file} can't be read: {error}; write it with numpy.savez") from error


def _difference(found: Array, wanted: Array, *, rtol: float, atol: float) -> str:
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)}, not {list(wanted.shape)}"
    if found.dtype.kind == "O":
        theirs = [item.encode() if isinstance(item, str) else item for item in wanted.reshape(-1).tolist()]
        return "" if found.reshape(-1).tolist() == theirs else "is another text"
    wanted = _named(wanted, found.dtype)
    exact = found.dtype.kind in "biu"
    ours, theirs_ = (found, wanted) if exact else (found.astype(np.float64), wanted.astype(np.float64))
    if exact and np.array_equal(ours, theirs_):
        return ""
    if not exact and np.allclose(ours, theirs_, rtol=rtol, atol=atol, equal_nan=True):
        return ""
    with np.errstate(invalid="ignore"):
        apart = np.max(np.abs(found.astype(np.float64) - wanted.astype(np.float64)), initial=0.0)
    return f"is off by up to {apart:.3g}"


def _named(array: Array, dtype: np.dtype[Any]) -> Array:
    """numpy can save BF16 and FP8 only as plain bytes: here they get their names back."""
    unnamed = array.dtype.type is np.void and array.dtype.itemsize == dtype.itemsize
    return array.view(dtype) if unnamed else array


def _not_finite(array: Array) -> str:
    if array.dtype.kind in "OSUbiu":
        return ""
    bad = array.size - int(np.count_nonzero(np.isfinite(array.astype(np.float64))))
    return f"has {bad} of {array.size} numbers that are not finite" if bad else ""


def _fault_on_zeros(model: OnnxModel) -> str:
    """What is wrong with a model's answer to zeros; "" if nothing is."""
    try:
        outputs = model.run(model.zeros())
    except (EdgeError, InvalidInputError) as error:
        return error.message
    faults = (f"output {name!r} {fault}" for name, array in outputs.items() if (fault := _not_finite(array)))
    return next(faults, "")
