"""Tensors: Open Inference Protocol datatypes, their numpy dtypes, their bytes, and what a model says of its inputs.

The one place where a datatype maps to numpy. Nothing here casts silently: a cast that could lose a value is an
``InvalidInputError`` that names the cast to make.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInputError, ProtocolError, listed

Array = NDArray[Any]

# Open Inference Protocol v2, "Tensor Data Types"; BF16 is Triton's addition. Little-endian on every wire.
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
_FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
DATATYPES: tuple[str, ...] = (*_DTYPES, "BF16")


def _bfloat16() -> np.dtype[Any]:
    """numpy has no bfloat16; the package that brings it is imported when one turns up (it takes as long as the rest)."""
    dtype = _DTYPES.get("BF16")
    if dtype is None:
        import ml_dtypes

        dtype = _DTYPES["BF16"] = np.dtype(ml_dtypes.bfloat16)
        _DATATYPES[dtype] = "BF16"
    return dtype


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


def dtype_of(datatype: str) -> np.dtype[Any]:
    """The numpy dtype of an OIP datatype name (BYTES: ``object``, each element ``bytes``)."""
    dtype = _bfloat16() if datatype == "BF16" else _DTYPES.get(datatype)
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
    if array.dtype.name == "bfloat16" and array.dtype == _bfloat16():
        return "BF16"
    name = _DATATYPES.get(array.dtype.newbyteorder("<"))
    if name is None:
        raise InvalidInputError(
            f"numpy dtype {array.dtype} has no Open Inference Protocol datatype; cast to one of "
            f"{', '.join(DATATYPES)} (for example array.astype(np.float32))"
        )
    return name


def as_tensor(value: Any, spec: TensorSpec | None = None, *, what: str = "input") -> Array:
    """Turn what a user passed into an array that fits ``spec`` exactly, or say why it can't be.

    An array (or anything with ``__array__``, ``__array_interface__`` or DLPack) keeps its dtype and rank: only a cast
    that no value can be hurt by is made. Python numbers, strings and nested lists have no datatype of their own: they
    take the spec's (without a spec: FP32, INT64, BOOL or BYTES) and gain leading axes of length 1 where the model has them.
    """
    if spec is not None and _fits_as_it_is(value, spec):
        return value  # type: ignore[no-any-return]
    typed = not isinstance(value, (bool, int, float, str, bytes, list, tuple, range))
    if typed:
        array = _from_typed(value, what)
        if array.dtype.kind in "SUOT":
            array = _to_bytes_objects(array, what)
    else:
        array = _from_untyped(value, spec, what)
    if spec is None:
        datatype_of(array)
        return _little_endian(array)
    array = _fit_datatype(array, spec, what)
    array = _fit_shape(array, spec, what, may_add_axes=not typed)
    return _little_endian(array)


def _fits_as_it_is(value: Any, spec: TensorSpec) -> bool:
    """The common case, found out quickly: an array with nothing to do. (BYTES elements have to be looked at.)"""
    if type(value) is not np.ndarray or spec.datatype == "BYTES":
        return False
    if value.dtype is not _DTYPES.get(spec.datatype):
        return False
    return spec.shape is None or _fits(spec.shape, value.shape)


def _from_typed(value: Any, what: str) -> Array:
    if isinstance(value, np.ndarray):
        # np.asarray drops subclasses (masked arrays would lose their mask without a word)
        if isinstance(value, np.ma.MaskedArray):
            raise InvalidInputError(
                f"{what} is a masked array, which no protocol can carry; pass array.filled(value)"
            )
        return np.asarray(value)
    try:
        if (
            isinstance(value, np.generic)
            or hasattr(value, "__array__")
            or hasattr(value, "__array_interface__")
        ):
            return np.asarray(value)
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidInputError(
            f"{what} of type {type(value).__name__} could not be read as an array: {error}; "
            "move it to CPU memory and pass a numpy array"
        ) from error
    if isinstance(value, (bytearray, memoryview)):
        raise InvalidInputError(
            f"{what} is a {type(value).__name__}; pass bytes for a BYTES tensor, or np.frombuffer(…)"
        )
    raise InvalidInputError(
        f"{what} must be an array, a number, a string or a nested list of them; got {type(value).__name__}"
    )


def _from_untyped(value: Any, spec: TensorSpec | None, what: str) -> Array:
    wanted = spec.datatype if spec is not None else None
    if isinstance(value, range):
        value = list(value)
    first = _first_leaf(value)
    if isinstance(first, (str, bytes)) or wanted == "BYTES":
        if wanted is not None and wanted != "BYTES":
            raise InvalidInputError(f"{what} must be {wanted}; got {type(first).__name__} values")
        return _to_bytes_objects(_object_array(value, what), what)
    if _is_array_leaf(first):
        try:
            stacked = np.asarray(value)
        except ValueError as error:
            raise InvalidInputError(f"{what} is a list of arrays of unequal shapes: {error}") from None
        return stacked
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(f"{what} is not a rectangular nested list of numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(
            f"{what} must hold numbers, booleans or strings, each of one kind; got {type(first).__name__}"
        )
    if array.size == 0 and wanted is not None:
        return array.astype(dtype_of(wanted))
    if wanted is None:
        return array.astype({"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float32}[array.dtype.kind])
    return _round_numbers(array, wanted, what)


def _round_numbers(array: Array, wanted: str, what: str) -> Array:
    """Python numbers take the model's datatype: floats are rounded to it, anything else must fit exactly."""
    dtype = dtype_of(wanted)
    kind = array.dtype.kind
    if wanted == "BOOL":
        if kind != "b":
            raise InvalidInputError(f"{what} must be BOOL; got numbers: pass True and False")
        return array
    if wanted in _FLOATS:
        if kind == "b":
            raise InvalidInputError(f"{what} must be {wanted}; got booleans: pass 1.0 and 0.0")
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        if np.logical_or.reduce(np.isinf(cast), axis=None):
            overflown = np.isinf(cast) & np.isfinite(array)
            if overflown.any():
                raise InvalidInputError(
                    f"{what} holds {array[overflown].flat[0]!r}, which is beyond the range of {wanted}"
                )
        return cast
    if kind == "f":
        raise InvalidInputError(f"{what} must be {wanted}; got floats: round them yourself, or pass ints")
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    if kind in "iu" and array.size and (int(array.min()) < low or int(array.max()) > high):
        raise InvalidInputError(
            f"{what} must be {wanted} ({low} to {high}); got {array.min()} to {array.max()}"
        )
    return array.astype(dtype)


def _fit_datatype(array: Array, spec: TensorSpec, what: str) -> Array:
    came = datatype_of(array)
    if came == spec.datatype:
        return array
    wanted = dtype_of(spec.datatype)
    if "BYTES" in (came, spec.datatype):
        raise InvalidInputError(f"{what} must be {spec.datatype}; got {came}")
    if np.can_cast(array.dtype, wanted, "safe") and came != "BOOL":
        return array.astype(wanted)
    raise InvalidInputError(
        f"{what} must be {spec.datatype}; got {came}, and the cast could lose values: "
        f"if that is meant, pass array.astype({_dtype_words(spec.datatype)})"
    )


def _fit_shape(array: Array, spec: TensorSpec, what: str, *, may_add_axes: bool) -> Array:
    if spec.shape is None:
        return array
    missing = len(spec.shape) - array.ndim
    if may_add_axes and missing > 0 and all(size in (-1, 1) for size in spec.shape[:missing]):
        array = array.reshape((1,) * missing + array.shape)
    if not _fits(spec.shape, array.shape):
        hint = ""
        if missing == 1 and _fits(spec.shape, (1, *array.shape)):
            hint = "; add the batch axis: array[np.newaxis]"
        raise InvalidInputError(
            f"{what} must have shape {_shape_words(spec.shape)}; got {list(array.shape)}{hint}"
        )
    return array


def _fits(wanted: tuple[int, ...], came: tuple[int, ...]) -> bool:
    if len(wanted) != len(came):
        return False
    for want, size in zip(wanted, came):  # noqa: B905, SIM110 - quicker so, and this is the hot path
        if want not in (size, -1):
            return False
    return True


def _shape_words(shape: Sequence[int]) -> str:
    return "[" + ", ".join("any" if size < 0 else str(size) for size in shape) + "]"


def _dtype_words(datatype: str) -> str:
    return "ml_dtypes.bfloat16" if datatype == "BF16" else f"np.{dtype_of(datatype).name}"


def _little_endian(array: Array) -> Array:
    if array.dtype.byteorder == ">" and array.dtype.kind != "O":
        return array.astype(array.dtype.newbyteorder("<"))
    return array


def _first_leaf(value: Any) -> Any:
    while isinstance(value, (list, tuple)):
        if not value:
            return 0.0
        value = next((item for item in value if not (isinstance(item, (list, tuple)) and not item)), 0.0)
    return value


def _is_array_leaf(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic)) or hasattr(leaf, "__array__")


def _object_array(value: Any, what: str) -> Array:
    """A nested list of str and bytes as an object array; numpy would fold them into ``S`` and drop trailing NULs."""
    shape: list[int] = []
    level = value
    while isinstance(level, (list, tuple)):
        shape.append(len(level))
        if not level:
            break
        level = level[0]
    flat: list[Any] = []

    def walk(node: Any, depth: int) -> None:
        if depth == len(shape):
            if isinstance(node, (list, tuple)):
                raise InvalidInputError(f"{what} is not a rectangular nested list")
            flat.append(node)
            return
        if not isinstance(node, (list, tuple)) or len(node) != shape[depth]:
            raise InvalidInputError(f"{what} is not a rectangular nested list")
        for item in node:
            walk(item, depth + 1)

    walk(value, 0)
    array = np.empty(len(flat), dtype=object)
    array[:] = flat
    return array.reshape(shape)


def _to_bytes_objects(array: Array, what: str) -> Array:
    """Any array of strings as an object array of ``bytes`` (str as UTF-8); this is how BYTES look everywhere inside."""
    flat = array.reshape(-1)
    if array.dtype.kind == "O" and all(type(item) is bytes for item in flat):
        return array
    result = np.empty(array.size, dtype=object)
    for index, item in enumerate(flat.tolist()):
        if isinstance(item, bytes):
            result[index] = item
        elif isinstance(item, str):
            result[index] = item.encode("utf-8")
        else:
            raise InvalidInputError(
                f"{what}: a BYTES tensor holds str or bytes; got {type(item).__name__} at {index}"
            )
    return result.reshape(array.shape)


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
    array = np.ascontiguousarray(_little_endian(array)).reshape(-1)
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
    array = np.frombuffer(view, dtype)
    if not array.flags.aligned:
        array = array.copy()
    return _read_only(array.reshape(tuple(shape)))


def wire_dtype(datatype: str, what: str) -> np.dtype[Any]:
    """Like ``dtype_of``, for a datatype that a server named."""
    dtype = _bfloat16() if datatype == "BF16" else _DTYPES.get(datatype)
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


def as_inputs(value: Any, specs: Sequence[TensorSpec] | None) -> dict[str, Array]:
    """What a user passed to ``infer`` as a dict of tensors, checked against the model's inputs (``None``: unknown)."""
    if specs is not None and len(specs) == 1 and _fits_as_it_is(value, specs[0]):
        return {specs[0].name: value}
    if isinstance(value, Mapping):
        named: dict[str, Any] = dict(value)
        if specs is None:
            if not named:
                raise InvalidInputError("inputs is an empty dict; name at least one tensor")
            return {str(name): as_tensor(item, what=f"input {name!r}") for name, item in named.items()}
    elif specs is None:
        raise InvalidInputError("the model's input names are not known; pass a dict: {'name': array}")
    else:
        needed = [spec for spec in specs if not spec.optional] or list(specs)
        if len(needed) != 1:
            raise InvalidInputError(
                f"the model has {len(needed)} inputs; pass a dict with {'; '.join(map(str, needed))}"
            )
        named = {needed[0].name: value}
    known = {spec.name: spec for spec in specs}
    wrong = [str(name) for name in named if name not in known]
    missing = [name for name, spec in known.items() if name not in named and not spec.optional]
    if wrong or missing:
        parts = [f"unknown input {listed(wrong)}"] if wrong else []
        parts += [f"missing input {listed(missing)}"] if missing else []
        raise InvalidInputError(f"{', '.join(parts)}; the model takes {'; '.join(map(str, specs))}")
    return {name: as_tensor(item, known[name], what=f"input {name!r}") for name, item in named.items()}
