"""Tensors as JSON: the ``data`` of a tensor both ways, exact for every datatype, and JSON documents as a
whole.

Data is flat and row-major; what comes may be nested too. NaN and infinities travel as the words "NaN",
"Infinity" and "-Infinity". BYTES travel as strings, and as ``{"b64": …}`` where they are not UTF-8. FP16, BF16, the FP8
types and those of 4 bits travel as numbers.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import orjson

from ..errors import InvalidInputError, ProtocolError
from ..tensors import (
    Array,
    ShapeError,
    datatype_of,
    element_count,
    is_integer,
    limits,
    wire_dtype,
)

_WORDS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
# The one float32 (and its negative; all were tried) whose shortest decimal, 7.038531e-26, becomes another
# float32 when it is parsed as a double and then rounded, as JSON readers do; it is written with a double's
# digits instead.
_DOUBLE_ROUNDED = np.uint32(0x15AE43FD)
_NO_INFINITY = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz")
_MOST_ELEMENTS = 2**58  # × 16 bytes is what numpy can address; guards reshape against shapes like [0, 2**63]


def dumps(document: Any) -> bytes:
    """JSON of a document that may hold flat numpy arrays; ``InvalidInputError`` for what JSON can't say."""
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"can't be written as JSON: {error}; parameters are strings, booleans, 64-bit ints or floats"
        ) from error


def loads(body: bytes | memoryview, what: str) -> Any:
    """A JSON document; bare ``NaN`` and ``Infinity``, which Python servers emit, are read too."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        text = bytes(body)
        if b"NaN" in text or b"Infinity" in text:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                pass  # told below, in orjson's words
        raise ProtocolError(f"{what} is not JSON: {error}") from None


def loads_object(body: bytes | memoryview, what: str) -> dict[str, Any]:
    """A JSON document that must be an object."""
    document = loads(body, what)
    if not isinstance(document, dict):
        raise ProtocolError(f"{what} must be a JSON object; got {type(document).__name__}")
    return document


def tensor_to_json(array: Array, *, what: str, b64: bool) -> dict[str, Any]:
    """``{"data", "shape", "datatype"}`` for ``dumps``. ``b64=False`` refuses BYTES that are not UTF-8."""
    return {
        "data": data_of(array, what=what, b64=b64),
        "shape": list(array.shape),
        "datatype": datatype_of(array),
    }


def data_of(array: Array, *, what: str, b64: bool) -> Any:
    """The flat data: a numpy array that orjson writes as it is, or a list where words or strings are
    needed.
    """
    if array.dtype.kind == "O":
        return [_bytes_to_json(item, what, b64) for item in array.reshape(-1).tolist()]
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind in "biu":
        return flat
    if flat.dtype.name in ("int4", "uint4"):
        return flat.astype(np.int8)
    if flat.dtype.itemsize <= 2:
        # FP16, BF16, FP8: every value is a float32, whose shortest decimal leads back to it
        with np.errstate(invalid="ignore"):  # a signalling NaN
            flat = flat.astype(np.float32)
    finite = np.isfinite(flat)
    if not finite.all():
        words = {float("inf"): "Infinity", float("-inf"): "-Infinity"}
        values = zip(flat.tolist(), finite.tolist(), strict=True)
        return [value if is_finite else words.get(value, "NaN") for value, is_finite in values]
    if flat.dtype.itemsize == 4 and ((flat.view(np.uint32) & np.uint32(0x7FFFFFFF)) == _DOUBLE_ROUNDED).any():
        return flat.astype(np.float64)
    return flat


def shape_of(value: Any, what: str) -> tuple[int, ...]:
    """A shape from the wire, checked so that no size in it can trouble numpy."""
    if not isinstance(value, list):
        raise ProtocolError(f"{what}: the shape must be a list of sizes ≥ 0; got {_brief(value)}")
    count = element_count(value, what)
    if (count or math.prod(size for size in value if size)) > _MOST_ELEMENTS:
        raise ProtocolError(f"{what}: no tensor can have the shape {value}")
    return tuple(value)


def datatype_named(value: Any, what: str) -> str:
    """A datatype from the wire that we know."""
    if not isinstance(value, str):
        raise ProtocolError(f"{what}: the datatype must be a name such as FP32; got {_brief(value)}")
    wire_dtype(value, what)
    return value


def tensor_from_json(data: Any, datatype: str, shape: Sequence[int], *, what: str) -> Array:
    """A read-only array of JSON ``data``, flat or nested; ``ProtocolError`` unless every element fits
    exactly.
    """
    dtype = wire_dtype(datatype, what)
    flat = _flat(data, shape, what)
    if datatype == "BYTES":
        array = np.empty(len(flat), dtype=object)
        array[:] = [_bytes_from_json(item, what) for item in flat]
    elif datatype == "BOOL":
        _only(flat, set(map(type, flat)), {bool, int}, datatype, what)
        if not set(flat) <= {0, 1}:
            raise ProtocolError(f"{what}: BOOL data holds something else than true and false")
        array = np.array(flat, dtype=np.bool_)
    elif is_integer(datatype):
        array = _integers(flat, dtype, datatype, what)
    else:
        array = _floats(flat, dtype, datatype, what)
    array = array.reshape(tuple(shape))
    array.flags.writeable = False
    return array


def shape_by_nesting(data: Any) -> list[int]:
    """The shape that nested lists have, by their first elements (``tensor_from_json`` checks the rest)."""
    shape: list[int] = []
    while isinstance(data, list):
        shape.append(len(data))
        if not data:
            break
        data = data[0]
    return shape


def _flat(data: Any, shape: Sequence[int], what: str) -> list[Any]:
    count = element_count(shape, what)
    if not isinstance(data, list):
        if shape:
            raise ProtocolError(f"{what}: the data must be a list; got {_brief(data)}")
        return [data]
    flat = data
    if len(shape) > 1 and flat and isinstance(flat[0], list):
        # one level of lists an axis: each level has as many lists as the sizes so far say, all of equal
        # length
        if len(flat) != shape[0]:
            raise ShapeError(f"{what}: the shape is {list(shape)}, but the data's first axis has {len(flat)}")
        for axis, size in enumerate(shape[1:], start=1):
            if not all(type(row) is list and len(row) == size for row in flat):
                raise ShapeError(
                    f"{what}: the shape is {list(shape)}, but the data's axis {axis} is not lists of {size}"
                )
            flat = list(chain.from_iterable(flat))
    if len(flat) != count:
        raise ShapeError(f"{what}: the shape {list(shape)} has {count} elements; got {len(flat)}")
    return flat


def _integers(flat: list[Any], dtype: np.dtype[Any], datatype: str, what: str) -> Array:
    _only(flat, set(map(type, flat)), {int}, datatype, what)
    if flat:
        low, high = limits(datatype)
        smallest, largest = min(flat), max(flat)
        if smallest < low or largest > high:
            raise ProtocolError(f"{what}: {datatype} holds {low} to {high}; got {smallest} to {largest}")
    return np.array(flat, dtype=dtype)


def _floats(flat: list[Any], dtype: np.dtype[Any], datatype: str, what: str) -> Array:
    kinds = set(map(type, flat))
    if str in kinds:
        unknown = next((item for item in flat if type(item) is str and item not in _WORDS), None)
        if unknown is not None:
            raise ProtocolError(
                f'{what}: {datatype} holds numbers, "NaN", "Infinity" or "-Infinity"; got {_brief(unknown)}'
            )
        flat = [_WORDS[item] if type(item) is str else item for item in flat]
    _only(flat, kinds - {str}, {int, float}, datatype, what)
    try:
        wide = np.array(flat, dtype=np.float64)
    except OverflowError:
        raise ProtocolError(f"{what}: a number is beyond the range of {datatype}") from None
    if dtype.itemsize == 8:
        return wide
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = wide.astype(dtype)
    # Some of the small types have no infinity, and make NaN of what is beyond them.
    lost = ~np.isfinite(narrow)
    if lost.any():
        overflown = (
            wide[lost & ~np.isnan(wide)] if dtype.name in _NO_INFINITY else wide[lost & np.isfinite(wide)]
        )
        if overflown.size:
            raise ProtocolError(f"{what}: {overflown[0]} is beyond the range of {datatype}")
    return narrow


def _only(flat: list[Any], came: set[type], kinds: set[type], datatype: str, what: str) -> None:
    if came <= kinds:
        return
    wrong = next(item for item in flat if type(item) not in kinds)
    hint = "; the server wrote NaN or an infinity as null, ask it for binary data" if wrong is None else ""
    raise ProtocolError(f"{what}: {datatype} data holds {_brief(wrong)}{hint}")


def _bytes_to_json(item: bytes, what: str, b64: bool) -> Any:
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError:
        if b64:
            return {"b64": base64.b64encode(item).decode("ascii")}
        raise InvalidInputError(
            f"{what}: a BYTES element is not UTF-8, which has no JSON form in the Open Inference Protocol; "
            "use binary data"
        ) from None


def _bytes_from_json(item: Any, what: str) -> bytes:
    if isinstance(item, str):
        try:
            return item.encode("utf-8")
        except UnicodeEncodeError:
            raise ProtocolError(f"{what}: a string holds half a surrogate pair") from None
    if isinstance(item, Mapping) and set(item) == {"b64"} and isinstance(item["b64"], str):
        try:
            return base64.b64decode(item["b64"], validate=True)
        except (binascii.Error, ValueError):
            raise ProtocolError(f"{what}: {_brief(item['b64'])} is not base64") from None
    raise ProtocolError(f'{what}: BYTES data holds strings or {{"b64": "…"}}; got {_brief(item)}')


def _brief(value: Any) -> str:
    text = "null" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
