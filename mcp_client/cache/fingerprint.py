"""The fingerprint of a request: 20 bytes of BLAKE3 over model, version, inputs, outputs and parameters.

Two requests have one fingerprint exactly if every bit that can matter to the answer is equal: names,
datatypes, shapes and elements (−0.0, NaN payloads and BYTES included), parameters with their Python type. It
does not depend on the process, the machine, its byte order or the arrays' memory layout; golden values in the
tests hold it still.

The canonical form, all integers little-endian, ``text`` = u32 length + UTF-8:

    "mcp-fp/1", text model, text version,
    u32 number of inputs, then for each, by name: text name, text datatype, u32 axes, u64 sizes,
    u32 number of outputs, then text each, in the order asked for (it is the order of the result),
    u32 number of parameters, then for each, by name: text name, a letter, and
        b u8, i text (decimal), f f64, s text,
    the inputs' bytes in the same order, as ``tensors.to_raw`` has them.

Every part is counted or length-prefixed, so no two requests share a canonical form.
"""

from __future__ import annotations

import base64
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from ..errors import InvalidInputError
from ..inputs import as_tensor
from ..request import NO_PARAMETERS, Parameter
from ..tensors import Array, datatype_of, to_raw

SIZE = 20  # bytes: 160 bits, so that 2^60 different requests collide with a chance of about 2^-41

_MAGIC = b"mcp-fp/1"
_u32 = struct.Struct("<I").pack
_NO_PARAMETERS = _u32(0)

# Below this many bytes one joined buffer is quicker than a second call of the hasher (measured: 1.1 µs a
# call); above it a copy would cost more than the call.
_JOIN_BELOW = 4096

# What is known of a layout (names, dtypes, shapes): its encoding, and whether the arrays' bytes are canonical
# as they lie.
_Layout = tuple[bytes, bool]
_layouts: dict[Any, _Layout] = {}
_MOST_LAYOUTS = 4096  # a few hundred bytes each


def fingerprint(
    model: str,
    version: str,
    inputs: Mapping[str, Array],
    outputs: Sequence[str] = (),
    parameters: Mapping[str, Parameter] = NO_PARAMETERS,
) -> bytes:
    """20 bytes that stand for this request. No copy is made of a contiguous array.

    Raises ``InvalidInputError`` for an array whose dtype no protocol can carry, or a parameter of another
    type than str, int, float and bool.
    """
    if len(inputs) == 1:
        ((name, array),) = inputs.items()
        arrays: list[Array] = [array]
        key: Any = (model, version, name, array.dtype, array.shape, *outputs)
        size = array.nbytes
    else:
        names = sorted(inputs)
        arrays = [inputs[name] for name in names]
        shapes = [(name, array.dtype, array.shape) for name, array in zip(names, arrays, strict=True)]
        key = (model, version, tuple(shapes), *outputs)
        size = sum(array.nbytes for array in arrays)
    layout = _layouts.get(key)
    if layout is None:
        layout = _remember(key, _layout(model, version, inputs, outputs))
    header, canonical = layout
    head = header + (_encode_parameters(parameters) if parameters else _NO_PARAMETERS)
    if canonical and size < _JOIN_BELOW:
        if len(arrays) == 1:
            return blake3(head + arrays[0].tobytes()).digest(SIZE)
        return blake3(head + b"".join([array.tobytes() for array in arrays])).digest(SIZE)
    hasher = blake3(head)
    for array in arrays:
        # strings of any kind are BYTES: as_tensor gives them the one form that to_raw knows
        hasher.update(to_raw(array if array.dtype.kind not in "OSUT" else as_tensor(array)))
    return hasher.digest(SIZE)


def extended(fp: bytes, classes: Mapping[str, int], headers: Mapping[str, str]) -> bytes:
    """The fingerprint of a request that asks for classes, or has headers of its own: the answer may depend on both."""
    names = {name.lower(): value for name, value in headers.items()}
    return blake3(_MAGIC + b"+" + fp + _encode_parameters(classes) + _encode_parameters(names)).digest(SIZE)


def to_text(fp: bytes) -> str:
    """A fingerprint as 32 characters: base32 in lower case, fit for a URL, a file name and telemetry."""
    return base64.b32encode(fp).decode("ascii").lower()


def _remember(key: Any, layout: _Layout) -> _Layout:
    if len(_layouts) >= _MOST_LAYOUTS:  # shapes that never come again; starting over costs microseconds
        _layouts.clear()
    _layouts[key] = layout
    return layout


def _layout(model: str, version: str, inputs: Mapping[str, Array], outputs: Sequence[str]) -> _Layout:
    parts = [_MAGIC, _text(model), _text(version), _u32(len(inputs))]
    for name in sorted(inputs):
        array = inputs[name]
        sizes = struct.pack(f"<I{array.ndim}Q", array.ndim, *array.shape)
        parts += [_text(name), _text(datatype_of(array)), sizes]
    parts += [_u32(len(outputs)), *map(_text, outputs)]
    return b"".join(parts), all(_lies_canonically(array.dtype) for array in inputs.values())


def _lies_canonically(dtype: np.dtype[Any]) -> bool:
    """Whether ``tobytes`` of such an array is what goes on a wire: numbers, little-endian."""
    order = dtype.byteorder if dtype.byteorder != "=" else {"little": "<", "big": ">"}[sys.byteorder]
    return dtype.kind not in "OSUT" and order != ">" and dtype.name not in ("int4", "uint4")


def _encode_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    parts = [_u32(len(parameters))]
    for name in sorted(parameters):
        value = parameters[name]
        parts.append(_text(name))
        if isinstance(value, bool):  # before int, which bool is a subclass of
            parts.append(b"b\x01" if value else b"b\x00")
        elif isinstance(value, int):
            parts.append(b"i" + _text(str(int(value))))
        elif isinstance(value, float):
            parts.append(b"f" + struct.pack("<d", value))
        elif isinstance(value, str):
            parts.append(b"s" + _text(value))
        else:
            raise InvalidInputError(
                f"parameter {name!r} must be a str, int, float or bool; got {type(value).__name__}"
            )
    return b"".join(parts)


def _text(value: str) -> bytes:
    encoded = value.encode("utf-8", "surrogatepass")
    return _u32(len(encoded)) + encoded
