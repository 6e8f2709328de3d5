"""What a user passes to ``infer``, as tensors that fit the model exactly, or an error that says why it can't be.

Nothing here casts silently: a cast that could lose a value is an ``InvalidInputError`` that names the cast to make.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import InvalidInputError, listed
from .tensors import (
    PRECISION,
    Array,
    TensorSpec,
    cast_words,
    datatype_of,
    dtype_of,
    is_lossless,
    known_dtype,
    limits,
    little_endian,
)


def as_tensor(value: Any, spec: TensorSpec | None = None, *, what: str = "input") -> Array:
    """Turn what a user passed into an array that fits ``spec`` exactly, or say why it can't be.

    An array (or anything with ``__array__``, ``__array_interface__`` or DLPack) keeps its dtype and rank: only a cast
    that no value can be hurt by is made. Python numbers, strings and nested lists have no datatype of their own: they
    take the spec's (without a spec: FP32, INT64, BOOL or BYTES) and gain leading axes of length 1 where the model has them.
    """
    if spec is not None and _fits_as_it_is(value, spec):
        return value  # type: ignore[no-any-return]
    # numpy's float64 is a Python float too, and has a datatype nevertheless.
    typed = isinstance(value, np.generic) or not isinstance(
        value, (bool, int, float, str, bytes, list, tuple, range)
    )
    if typed:
        array = _from_typed(value, what)
        if array.dtype.kind in "SUOT":
            array = _to_bytes_objects(array, what)
    else:
        array = _from_untyped(value, spec, what)
    if spec is None:
        datatype_of(array)
        return little_endian(array)
    array = _fit_datatype(array, spec, what)
    array = _fit_shape(array, spec, what, may_add_axes=not typed)
    return little_endian(array)


def _fits_as_it_is(value: Any, spec: TensorSpec) -> bool:
    """The common case, found out quickly: an array with nothing to do. (BYTES elements have to be looked at.)"""
    if type(value) is not np.ndarray or spec.datatype == "BYTES":
        return False
    if value.dtype is not known_dtype(spec.datatype):
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
    offered = [name for name in ("__array__", "__array_interface__", "__dlpack__") if hasattr(value, name)]
    if offered:
        return _from_protocols(value, offered, what)
    if isinstance(value, (bytearray, memoryview)):
        raise InvalidInputError(
            f"{what} is a {type(value).__name__}; pass bytes for a BYTES tensor, or np.frombuffer(…)"
        )
    raise InvalidInputError(
        f"{what} must be an array, a number, a string or a nested list of them; got {type(value).__name__}"
    )


def _from_protocols(value: Any, offered: Sequence[str], what: str) -> Array:
    """An array over the object's own memory, where it has its elements as numpy has them; else a copy."""
    _check_arrow(value, what)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        if value.device.type == "cpu" and (name := _NOT_IN_NUMPY.get(str(value.dtype))) is not None:
            dtype = dtype_of(name)
            bits = value.view(torch.uint8 if dtype.itemsize == 1 else torch.uint16)
            array: Array = bits.numpy().view(dtype)
            return array
    try:
        if offered == ["__dlpack__"]:
            return np.from_dlpack(value)
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):
            if "__dlpack__" not in offered:
                raise
            return np.from_dlpack(value)
        _check_columns(value, array, what)
        return array
    except InvalidInputError:
        raise
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InvalidInputError(
            f"{what} of type {type(value).__name__} could not be read as an array: {error}; "
            "move it to CPU memory and pass a numpy array"
        ) from error


def _check_arrow(value: Any, what: str) -> None:
    """What pyarrow turns into something else on the way to numpy: nulls into NaN, columns into one type."""
    if not type(value).__module__.startswith("pyarrow"):
        return
    columns = getattr(value, "columns", [value])  # of a table or a record batch
    nulls = sum(getattr(column, "null_count", 0) for column in columns)
    if nulls:
        raise InvalidInputError(f"{what} has {nulls} nulls, which no protocol can carry; fill or drop them")
    if len({getattr(column, "type", None) for column in columns}) > 1:
        raise InvalidInputError(
            f"{what} has columns of several types; cast them to one, or pass each as an input of its own"
        )


def _check_columns(value: Any, array: Array, what: str) -> None:
    """The same for pandas, whose series and frames say which dtypes their elements had."""
    declared: Any = getattr(value, "dtypes", None)
    for dtype in declared if hasattr(declared, "__iter__") else (declared,):  # a frame: one each column
        own = getattr(dtype, "numpy_dtype", dtype)  # that of a nullable type
        if (
            not isinstance(own, np.dtype)
            or own.kind not in "iuf"
            or own == array.dtype
            or array.dtype.kind not in "iuf"
        ):
            continue
        came, became = datatype_of(np.empty(0, own)), datatype_of(array)
        if not is_lossless(came, became):
            raise InvalidInputError(
                f"{what} has {came} that would become {became} (nulls, or columns of several types), which could lose "
                "values; fill them in, cast the columns to one type, or pass each as an input of its own"
            )


# torch's types that numpy lacks: neither its __array__ nor DLPack can hand them over.
_NOT_IN_NUMPY = {
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "FP8E4M3FN",
    "torch.float8_e4m3fnuz": "FP8E4M3FNUZ",
    "torch.float8_e5m2": "FP8E5M2",
    "torch.float8_e5m2fnuz": "FP8E5M2FNUZ",
}


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
        except (ValueError, TypeError, RuntimeError) as error:
            raise InvalidInputError(f"{what} is a list of arrays that don't make one: {error}") from None
        _same_datatypes(value, stacked, what)
        return stacked
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise InvalidInputError(f"{what} is not a rectangular nested list of numbers: {error}") from None
    if array.dtype.kind not in "biuf":
        if array.dtype.kind == "O" and all(isinstance(leaf, int) for leaf in _leaves(value)):
            raise InvalidInputError(f"{what} holds whole numbers beyond 64 bits, which no datatype can carry")
        raise InvalidInputError(
            f"{what} must hold numbers, booleans or strings, each of one kind; got {type(first).__name__}"
        )
    if array.dtype.kind == "f":
        _check_ints_among_floats(value, array, what)
    if array.size == 0 and wanted is not None:
        return array.astype(dtype_of(wanted))
    if wanted is None:
        wanted = {"b": "BOOL", "i": "INT64", "u": "UINT64", "f": "FP32"}[array.dtype.kind]
    return _round_numbers(array, wanted, what)


def _round_numbers(array: Array, wanted: str, what: str) -> Array:
    """Python numbers take the model's datatype: floats are rounded to it, anything else must fit exactly."""
    dtype = dtype_of(wanted)
    kind = array.dtype.kind
    if wanted == "BOOL":
        if kind != "b":
            raise InvalidInputError(f"{what} must be BOOL; got numbers: pass True and False")
        return array
    if wanted in PRECISION:
        if kind == "b":
            raise InvalidInputError(f"{what} must be {wanted}; got booleans: pass 1.0 and 0.0")
        with np.errstate(over="ignore", invalid="ignore"):
            cast = array.astype(dtype)
        # As float64: some of the small types have no infinity, and make NaN of what is beyond them.
        wide = cast.astype(np.float64)
        overflown = ~np.isfinite(wide) & np.isfinite(array)
        if np.logical_or.reduce(overflown, axis=None):
            raise InvalidInputError(
                f"{what} holds {array[overflown].flat[0].item()!r}, which is beyond the range of {wanted}"
            )
        if kind in "iu":
            _check_rounded_ints(array, wide, wanted, what)
        return cast
    if kind == "f":
        raise InvalidInputError(f"{what} must be {wanted}; got floats: round them yourself, or pass ints")
    low, high = limits(wanted)
    if kind in "iu" and array.size and (int(array.min()) < low or int(array.max()) > high):
        raise InvalidInputError(
            f"{what} must be {wanted} ({low} to {high}); got {array.min()} to {array.max()}"
        )
    return array.astype(dtype)


def _check_rounded_ints(array: Array, wide: Array, wanted: str, what: str) -> None:
    """Whole numbers are meant exactly; a float is taken as an approximation."""
    if not array.size or max(-int(array.min()), int(array.max())) <= 1 << PRECISION[wanted]:
        return
    for number, rounded in zip(array.reshape(-1).tolist(), wide.reshape(-1).tolist(), strict=True):
        if number != int(rounded):
            raise InvalidInputError(
                f"{what} holds {number}, which {wanted} would round to {int(rounded)}; "
                f"if that is meant, pass np.asarray(value).astype({cast_words(wanted)})"
            )


def _check_ints_among_floats(value: Any, array: Array, what: str) -> None:
    """numpy makes float64 of whole numbers beside floats (and of those that no one integer type holds)."""
    if not array.size or not np.abs(array).max() >= 2**53:
        return
    for leaf in _leaves(value):
        if isinstance(leaf, int) and float(leaf) != leaf:
            raise InvalidInputError(
                f"{what} holds {leaf} beside floats (or integers of another sign), where it would be rounded to "
                f"{int(float(leaf))}; pass an array with the dtype that you mean"
            )


def _same_datatypes(value: Any, stacked: Array, what: str) -> None:
    """numpy finds a common type for arrays in a list, which may be one that rounds."""
    for leaf in _leaves(value):
        came = np.asarray(leaf)
        if came.dtype != stacked.dtype and not is_lossless(datatype_of(came), datatype_of(stacked)):
            raise InvalidInputError(
                f"{what} is a list of {datatype_of(came)} and other arrays; as {datatype_of(stacked)} values could be lost: "
                "give them one dtype"
            )


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _fit_datatype(array: Array, spec: TensorSpec, what: str) -> Array:
    came = datatype_of(array)
    if came == spec.datatype:
        return array
    wanted = dtype_of(spec.datatype)  # or an error, where no such datatype is known
    if "BYTES" in (came, spec.datatype):
        raise InvalidInputError(f"{what} must be {spec.datatype}; got {came}")
    if is_lossless(came, spec.datatype):
        return array.astype(wanted)
    raise InvalidInputError(
        f"{what} must be {spec.datatype}; got {came}, and the cast could lose values: "
        f"if that is meant, pass array.astype({cast_words(spec.datatype)})"
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
            result[index] = bytes(item)  # not numpy's own kind of them
        elif isinstance(item, str):
            try:
                result[index] = item.encode("utf-8")
            except UnicodeEncodeError:
                raise InvalidInputError(
                    f"{what}: the string at {index} holds half a surrogate pair, which UTF-8 can't; pass bytes"
                ) from None
        else:
            raise InvalidInputError(
                f"{what}: a BYTES tensor holds str or bytes; got {type(item).__name__} at {index}"
            )
    return result.reshape(array.shape)


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
            what = "; ".join(map(str, needed))
            raise InvalidInputError(
                f"the model has {len(needed)} inputs; pass a dict with {what}"
                if needed
                else "the model takes no inputs; pass {}"
            )
        named = {needed[0].name: value}
    known = {spec.name: spec for spec in specs}
    wrong = [str(name) for name in named if name not in known]
    missing = [name for name, spec in known.items() if name not in named and not spec.optional]
    if wrong or missing:
        parts = [f"unknown input {listed(wrong)}"] if wrong else []
        parts += [f"missing input {listed(missing)}"] if missing else []
        raise InvalidInputError(
            f"{', '.join(parts)}; the model takes {'; '.join(map(str, specs)) or 'no inputs'}"
        )
    return {name: as_tensor(item, known[name], what=f"input {name!r}") for name, item in named.items()}
