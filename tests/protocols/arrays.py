"""Hypothesis strategies for tensors of every datatype, and exact comparison of arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from mcp_client.tensors import DATATYPES, FOUR_BITS, PRECISION, Array, dtype_of, from_raw, limits, to_raw

OIP_DATATYPES = tuple(name for name in DATATYPES if name not in FOUR_BITS)
# Of those with a form in the protocol's JSON; BYTES have one where they are UTF-8.
OIP_JSON_DATATYPES = tuple(
    name for name in OIP_DATATYPES if name in {"FP32", "FP64"} or (name not in PRECISION and name != "BYTES")
)

SHAPES = st.one_of(
    st.sampled_from([(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1)]),
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
)


@st.composite
def tensors(draw: st.DrawFn, datatypes: tuple[str, ...] = DATATYPES) -> Array:
    """Any array of any datatype: every bit pattern is as likely, so NaN payloads, -0.0 and subnormals
    occur."""
    datatype = draw(st.sampled_from(datatypes))
    shape = draw(SHAPES)
    size = int(np.prod(shape, dtype=np.int64))
    if datatype == "BYTES":
        items = draw(st.lists(st.one_of(st.binary(max_size=8), TEXTS), min_size=size, max_size=size))
        array = np.empty(size, dtype=object)
        array[:] = items
        return array.reshape(shape)
    if datatype in FOUR_BITS:
        low, high = limits(datatype)
        values = draw(st.lists(st.integers(low, high), min_size=size, max_size=size))
        return np.array(values, np.int8).astype(dtype_of(datatype)).reshape(shape)
    width = dtype_of(datatype).itemsize * size
    raw = draw(st.binary(min_size=width, max_size=width))
    if datatype == "BOOL":
        raw = bytes(byte & 1 for byte in raw)
    return from_raw(raw, datatype, shape)


TEXTS = st.sampled_from(["", "NaN", "a\0b", "trailing\0", "Grüße", "\U0001f600"]).map(str.encode)


def same_bits(one: Array, other: Array) -> bool:
    """Equal in dtype, shape and every bit."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and bytes(to_raw(one)) == bytes(to_raw(other))
    )


def same_numbers(one: Array, other: Array) -> bool:
    """Equal in dtype, shape and every value with its sign; one NaN is as good as another."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.kind in "biuO":
        return same_bits(one, other)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide, other_wide = one.astype(np.float64), other.astype(np.float64)
    nan = np.isnan(wide)
    return bool(
        np.array_equal(nan, np.isnan(other_wide))
        and np.array_equal(wide[~nan], other_wide[~nan])
        and np.array_equal(np.signbit(wide[~nan]), np.signbit(other_wide[~nan]))
    )
