"""Tensors: datatypes, their numpy dtypes, their bytes, and what a model says of its inputs.

The one place where a datatype maps to numpy; what a user passes is made to fit in ``inputs.py``.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInputError, ProtocolError

Array = NDArray[Any]

# Open Inference Protocol v2, "Tensor Data Types". Little-endian on every wire.
_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
_DATATYPES: dict[np.dtype[Any], str] = {dtype: name for name, dtype in _DTYPES.items()}
# Those that numpy lacks, by their names in ml_dtypes. BF16 is Triton's addition to the protocol; the rest are ONNX's types under
# the names that the protocol would give them.
_IN_ML_DTYPES = {
    "BF16": "bfloat16",
    "FP8E4M3FN": "float8_e4m3fn",
    "FP8E4M3FNUZ": "float8_e4m3fnuz",
    "FP8E5M2": "float8_e5m2",
    "FP8E5M2FNUZ": "float8_e5m2fnuz",
    "INT4": "int4",
    "UINT4": "uint4",
}
_BY_ML_NAME = {name: datatype for datatype, name in _IN_ML_DTYPES.items()}
DATATYPES: tuple[str, ...] = (*_DTYPES, *_IN_ML_DTYPES)
# The floating-point datatypes, and the bits of their significands, the hidden one included.
PRECISION = {"FP16": 11, "FP32": 24, "FP64": 53, "BF16": 8}
PRECISION |= {"FP8E4M3FN": 4, "FP8E4M3FNUZ": 4, "FP8E5M2": 3, "FP8E5M2FNUZ": 3}
# Which of them hold every value of another one.
_WIDER: dict[str, tuple[str, ...]] = {"FP32": ("FP64",), "FP16": ("FP32", "FP64"), "BF16": ("FP32", "FP64")}
_WIDER |= dict.fromkeys(
    [name for name in PRECISION if name.startswith("FP8")], ("FP16", "BF16", "FP32", "FP64")
)
# 4 bits of a byte: ONNX packs two into one, numpy has one in each, and no standard says what a wire would have.
FOUR_BITS = frozenset({"INT4", "UINT4"})


def _extended(datatype: str) -> np.dtype[Any] | None:
    """A dtype of ml_dtypes, which is imported when one turns up (it takes as long as the rest)."""
    name = _IN_ML_DTYPES.get(datatype)
    if name is None:
        return None
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    _DTYPES[datatype] = dtype
    _DATATYPES[dtype] = datatype
    return dtype


def known_dtype(datatype: str) -> np.dtype[Any] | None:
    """The dtype of a datatype, if it was needed before; ``None`` says nothing."""
    return _DTYPES.get(datatype)


def is_integer(datatype: str) -> bool:
    return datatype.startswith(("INT", "UINT"))


def limits(datatype: str) -> tuple[int, int]:
    """The least and the greatest value of an integer datatype."""
    bits = int(datatype.removeprefix("U").removeprefix("INT"))
    return (0, (1 << bits) - 1) if datatype.startswith("U") else (-(1 << bits - 1), (1 << bits - 1) - 1)


def is_lossless(came: str, wanted: str) -> bool:
    """Whether every value of one datatype is one of another, so that a cast can hurt nobody."""
    if came == wanted:
        return True
    if not is_integer(came):
        return wanted in _WIDER.get(came, ())
    low, high = limits(came)
    if is_integer(wanted):
        least, greatest = limits(wanted)
        return least <= low and high <= greatest
    # All the floats above have the range of an integer that fits their precision.
    return wanted in PRECISION and high < 1 << PRECISION[wanted]


def cast_words(datatype: str) -> str:
    """The argument of ``array.astype`` that makes this datatype."""
    return (
        f"ml_dtypes.{_IN_ML_DTYPES[datatype]}"
        if datatype in _IN_ML_DTYPES
        else f"np.{dtype_of(datatype).name}"
    )


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a model says of one input or output. ``shape`` has -1 where any size fits; ``None`` if the rank is free."""

    name: str
    datatype: str
    shape: tuple[int, ...] | None
    optional: bool = False

    def __str__(self) -> str:
        shape = "any shape" if self.shape is None else str(list(self.shape))
        return f"{self.name!r} {self.datatype} {shape}"


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    """A model as its server (or its ONNX file) describes it. ``digest`` is ``sha256:…`` of the file, if announced."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    version: str = ""
    versions: tuple[str, ...] = ()
    platform: str = ""
    digest: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def described(self) -> bool:
        """Whether the tensors are known: some servers describe none, and no model has neither inputs nor outputs."""
        return bool(self.inputs or self.outputs)


def dtype_of(datatype: str) -> np.dtype[Any]:
    """The numpy dtype of an OIP datatype name (BYTES: ``object``, each element ``bytes``)."""
    dtype = _DTYPES.get(datatype) or _extended(datatype)
    if dtype is None:
        raise InvalidInputError(f"unknown datatype {datatype!r}; expected one of {', '.join(DATATYPES)}")
    return dtype


def datatype_of(array: Array) -> str:
    """The OIP datatype name of an array (``S``, ``U`` and object arrays are BYTES)."""
    name = _DATATYPES.get(array.dtype)
    if name is not None:
        return name
    if array.dtype.kind in "SUOT":
        return "BYTES"
    extended = _BY_ML_NAME.get(array.dtype.name)
    if extended is not None and array.dtype == _extended(extended):
        return extended
    name = _DATATYPES.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise InvalidInputError(
            f"numpy dtype {array.dtype} has no datatype that a protocol could carry; cast to one of "
            f"{', '.join(DATATYPES)} (for example array.astype(np.float32))"
        )
    return name


def little_endian(array: Array) -> Array:
    if array.dtype.byteorder == ">" and array.dtype.kind != "O":
        return array.astype(array.dtype.newbyteorder("<"))
    return array


class ShapeError(ProtocolError):
    """The data does not fit the shape that was declared for it."""


# --- bytes on the wire -------------------------------------------------------------------------------------------


def to_raw(array: Array) -> memoryview | bytes:
    """The tensor's bytes: little-endian, row-major; BYTES elements each behind a 4-byte little-endian length.

    No copy is made for a contiguous array (the result is a view of it), except for BYTES.
    """
    if array.dtype.kind == "O":
        return b"".join(
            part for item in array.reshape(-1).tolist() for part in (struct.pack("<I", len(item)), item)
        )
    if array.dtype.name in (
        "int4",
        "uint4",
    ):  # a byte each, its upper half the sign's: what lies there may be anything
        array = array.astype(np.int8)
    array = np.ascontiguousarray(little_endian(array)).reshape(-1)
    return array.view(np.uint8).data if array.size else b""


def from_raw(buffer: Any, datatype: str, shape: Sequence[int], *, what: str = "tensor") -> Array:
    """A read-only array over ``buffer``; ``ProtocolError`` if it does not fit the shape exactly.

    Copied are BYTES, and what begins at an address unfit for the datatype.
    """
    size = element_count(shape, what)
    view = memoryview(buffer).cast("B") if not isinstance(buffer, bytes) else buffer
    if datatype == "BYTES":
        return _read_only(_split_bytes(bytes(view), size, what).reshape(tuple(shape)))
    dtype = wire_dtype(datatype, what)
    if len(view) != size * dtype.itemsize:
        raise ShapeError(
            f"{what}: {datatype} {list(shape)} takes {size * dtype.itemsize} bytes; got {len(view)}"
        )
    if datatype == "BOOL" and size and np.frombuffer(view, np.uint8).max() > 1:
        raise ProtocolError(f"{what}: BOOL bytes must be 0 or 1")
    if datatype in FOUR_BITS and size:
        low, high = limits(datatype)
        values = np.frombuffer(view, np.int8)
        if values.min() < low or values.max() > high:
            raise ProtocolError(f"{what}: {datatype} holds {low} to {high}")
    array = np.frombuffer(view, dtype)
    if not array.flags.aligned:
        array = array.copy()
    return _read_only(array.reshape(tuple(shape)))


def wire_dtype(datatype: str, what: str) -> np.dtype[Any]:
    """Like ``dtype_of``, for a datatype that a server named."""
    dtype = _DTYPES.get(datatype) or _extended(datatype)
    if dtype is None:
        raise ProtocolError(f"{what}: unknown datatype {datatype!r}; known are {', '.join(DATATYPES)}")
    return dtype


def element_count(shape: Sequence[int], what: str = "tensor") -> int:
    """How many elements a shape from the wire holds; ``ProtocolError`` unless every size is an int ≥ 0."""
    for size in shape:
        if type(size) is not int or size < 0:
            raise ProtocolError(f"{what}: a shape is a list of sizes ≥ 0; got {shape!r}")
    if len(shape) > 64:  # numpy's own limit
        raise ProtocolError(f"{what}: {len(shape)} axes; at most 64 can be read")
    return math.prod(shape)


def _split_bytes(raw: bytes, size: int, what: str) -> Array:
    if size * 4 > len(raw):
        raise ProtocolError(f"{what}: {size} BYTES elements take at least {size * 4} bytes; got {len(raw)}")
    result = np.empty(size, dtype=object)
    at = 0
    for index in range(size):
        end = at + 4
        length = int.from_bytes(raw[at:end], "little")
        if end + length > len(raw) or len(raw) < end:
            raise ProtocolError(f"{what}: BYTES element {index} ends after the data does")
        result[index] = raw[end : end + length]
        at = end + length
    if at != len(raw):
        raise ProtocolError(f"{what}: {len(raw) - at} bytes are left over after {size} BYTES elements")
    return result


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def read_only(array: Array) -> Array:
    """The array itself if nobody can write to it, else a private read-only copy."""
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return _read_only(array.copy())
        base = base.base
    return array


def nbytes_of(arrays: Mapping[str, Array]) -> int:
    """Bytes that arrays truly hold: the elements of a BYTES array are counted, not just its pointers."""
    total = 0
    for array in arrays.values():
        total += array.nbytes
        if array.dtype.kind == "O":
            total += sum(
                len(item) + 33 for item in array.reshape(-1).tolist()
            )  # 33: a bytes object's own header
    return total
