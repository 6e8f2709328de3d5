"""A model bound to buffers that are used again: for a loop that runs it on the same shapes and must not allocate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidInputError, listed
from ..tensors import Array, datatype_of, dtype_of
from .limits import Halt

if TYPE_CHECKING:
    from .model import OnnxModel

ALIGNMENT = 64  # bytes: a cache line, and the widest vector register (AVX-512)
# TensorProto.DataType of what numpy has no type of its own for.
_ONNX_TYPES = {"BF16": 16, "FP8E4M3FN": 17, "FP8E4M3FNUZ": 18, "FP8E5M2": 19, "FP8E5M2FNUZ": 20}


class Binding:
    """``OnnxModel.bind(shapes)``. Write into ``inputs[name][...]``, ``run()``, read ``outputs[name]``.

    Every run overwrites ``outputs``: copy what must stay. Nothing is allocated for inputs and outputs after it was made. For one
    thread; usable in a forked child. It keeps the model that it was made of, also when a newer version is there: bind again then.
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]

    def __init__(self, model: OnnxModel, shapes: Mapping[str, Sequence[int]]) -> None:
        self._model = model
        metadata = model.metadata
        specs = {spec.name: spec for spec in metadata.inputs}
        if shapes.keys() != specs.keys():
            raise InvalidInputError(
                f"model {metadata.name!r}: bind takes a shape for each input, {listed(list(specs))}; "
                f"got {listed(list(shapes))}"
            )
        if strings := [s.name for s in (*metadata.inputs, *metadata.outputs) if s.datatype == "BYTES"]:
            raise InvalidInputError(
                f"model {metadata.name!r}: {listed(strings)} of BYTES can't be bound; use run"
            )
        self.inputs = {
            name: aligned(tuple(shapes[name]), dtype_of(spec.datatype)) for name, spec in specs.items()
        }
        # One plain run says which shapes the outputs have, and refuses shapes that don't fit.
        found = model.run(self.inputs)
        self.outputs = {name: aligned(array.shape, array.dtype) for name, array in found.items()}
        self._session: Any = None
        self._bound: Any = None

    def run(self, *, deadline: float = math.inf, halt: Halt | None = None) -> Mapping[str, Array]:
        """``outputs``, computed from ``inputs``. Limits and errors as ``OnnxModel.run``; ``EdgeError`` too where an output has
        another shape than it had for zeros.
        """
        return self._model.run_bound(self, deadline=deadline, halt=halt)

    def of(self, session: Any) -> Any:
        """ONNX Runtime's binding for a session: made anew only for another session than the last time."""
        if session is not self._session:
            bound = session.io_binding()
            for bind, arrays in ((bound.bind_input, self.inputs), (bound.bind_output, self.outputs)):
                for name, array in arrays.items():
                    kind = _ONNX_TYPES.get(datatype_of(array), array.dtype)
                    bind(name, "cpu", 0, kind, array.shape, array.ctypes.data)
            self._session, self._bound = session, bound
        return self._bound


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros whose first byte lies on a multiple of ``ALIGNMENT``."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
