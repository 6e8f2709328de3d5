"""What users pass becomes a tensor that fits exactly, without a copy where that is possible, or an error that says why not."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client import InvalidInputError, TensorSpec
from mcp_client.inputs import as_inputs, as_tensor
from mcp_client.tensors import (
    DATATYPES,
    PRECISION,
    Array,
    datatype_of,
    dtype_of,
    from_raw,
    is_integer,
    is_lossless,
    limits,
    to_raw,
)
from tests.protocols.arrays import same_bits, tensors


def spec(datatype: str, shape: tuple[int, ...] | None = None) -> TensorSpec:
    return TensorSpec("x", datatype, shape)


# --- casts --------------------------------------------------------------------------------------------------


def _every_value(datatype: str) -> Array:
    """All values of a type of up to 16 bits; of a larger one those at which rounding begins, the limits and a few thousand."""
    dtype = dtype_of(datatype)
    if is_integer(datatype):
        low, high = limits(datatype)
        if dtype.itemsize <= 2:
            return np.arange(low, high + 1).astype(dtype)
        near = {sign * ((1 << bits) + more) for bits in range(64) for more in (-1, 0, 1) for sign in (1, -1)}
        return np.array(sorted(value for value in {low, high, *near} if low <= value <= high), dtype)
    bits = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[dtype.itemsize]
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize).astype(bits).view(dtype)
    return np.random.default_rng(1).integers(0, 1 << 8 * dtype.itemsize, 5000, dtype=bits).view(dtype)


NUMBERS = [name for name in DATATYPES if name not in ("BOOL", "BYTES")]


@pytest.mark.parametrize(("came", "wanted"), list(itertools.permutations(NUMBERS, 2)))
def test_a_cast_is_made_only_where_no_value_can_be_hurt(came: str, wanted: str) -> None:
    values = _every_value(came)
    if not is_lossless(came, wanted):
        with pytest.raises(InvalidInputError, match=rf"must be {wanted}; got {came}.*astype\("):
            as_tensor(values, spec(wanted))
        return
    with np.errstate(invalid="ignore"):  # signalling NaNs
        cast = as_tensor(values, spec(wanted))
        assert datatype_of(cast) == wanted
        back = cast.astype(values.dtype)
    if is_integer(came):
        assert [int(one) for one in cast.tolist()] == [int(one) for one in values.tolist()]
        return
    with np.errstate(invalid="ignore"):
        nan = np.isnan(values.astype(np.float64))
        assert np.isnan(back.astype(np.float64)[nan]).all()
    assert same_bits(back[~nan], values[~nan])


@pytest.mark.parametrize("datatype", NUMBERS)
def test_limits_are_those_of_the_dtype(datatype: str) -> None:
    if is_integer(datatype):
        info: Any = (ml_dtypes.iinfo if datatype.endswith("INT4") else np.iinfo)(dtype_of(datatype))
        assert limits(datatype) == (info.min, info.max)
    else:
        assert ml_dtypes.finfo(dtype_of(datatype)).nmant + 1 == PRECISION[datatype]


@pytest.mark.parametrize("wanted", list(PRECISION))
def test_whole_numbers_are_taken_exactly_or_not_at_all(wanted: str) -> None:
    first_lost = (1 << PRECISION[wanted]) + 1
    assert as_tensor([first_lost - 1, -1], spec(wanted)).tolist() == [first_lost - 1, -1]
    with pytest.raises(InvalidInputError, match=rf"{first_lost}, which {wanted} would round.*astype\("):
        as_tensor([1, first_lost], spec(wanted))
    if wanted == "FP64":  # of ints beside floats numpy has made floats before we see them
        with pytest.raises(InvalidInputError, match="beside floats"):
            as_tensor([first_lost, 0.5], spec(wanted))
    assert as_tensor([0.1, first_lost + 0.5], spec(wanted)).dtype == dtype_of(wanted)  # floats may be rounded


@pytest.mark.parametrize("wanted", list(PRECISION))
@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_beyond_a_types_range(wanted: str, sign: int) -> None:
    largest = float(ml_dtypes.finfo(dtype_of(wanted)).max)
    assert float(as_tensor([sign * largest], spec(wanted))[0]) == sign * largest
    if wanted != "FP64":
        for beyond in (largest * 2.5, int(largest * 4)):
            with pytest.raises(InvalidInputError, match=f"beyond (the range of {wanted}|64 bits)"):
                as_tensor([sign * beyond], spec(wanted))
    infinite = as_tensor([float("nan")], spec(wanted))
    assert np.isnan(infinite.astype(np.float64)).all()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (2**70, "beyond 64 bits"),
        ([1, 2**64], "beyond 64 bits"),
        (1e300, "beyond the range of FP32"),
        ([2**53 + 1, 0.5], "beside floats"),
        ([np.int64(2**53 + 1), np.float64(0.5)], "one dtype"),
        ("\ud800", "surrogate"),
        (["a", 1], "str or bytes"),
        ([1, "a"], "each of one kind"),
        ([[1], [1, 2]], "rectangular"),
        ([["a"], ["b", "c"]], "rectangular"),
        (None, "NoneType"),
        (1j, "complex"),
        ({1}, "set"),
        (object(), "object"),
        (bytearray(b"x"), "np.frombuffer"),
        (np.array([1j]), "no datatype"),
        (np.array(["2020"], "datetime64[D]"), "no datatype"),
        (np.array([(1, 2.0)], "i4,f4"), "no datatype"),
        (np.array([1, 2], object), "str or bytes"),
        (np.array(["a", None], object), "NoneType at 1"),
        (np.ma.masked_array([1.0], [True]), "masked"),
        (np.longdouble(1), "no datatype"),
    ],
    ids=repr,
)
def test_what_can_not_be_a_tensor(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        as_tensor(value)


def test_a_numpy_scalar_has_its_datatype() -> None:
    """``float64`` is a Python float too; it was rounded to FP32 without a word."""
    assert as_tensor(np.float64(0.1)).dtype == np.float64
    with pytest.raises(InvalidInputError, match="FP64"):
        as_tensor(np.float64(0.1), spec("FP32"))


# --- shapes and layouts -------------------------------------------------------------------------------------


@given(tensors(), st.sampled_from(["strided", "reversed", "fortran", "big-endian", "read-only", "unaligned"]))
def test_any_layout_is_the_same_tensor(array: Array, layout: str) -> None:
    same = array
    if layout == "strided" and array.ndim:
        same = np.repeat(array, 2, axis=-1)[..., ::2]
    elif layout == "reversed" and array.ndim:
        same = np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    elif layout == "fortran":
        same = np.asfortranarray(array) if array.ndim else array
    elif layout == "big-endian" and array.dtype.kind in "iuf" and array.dtype.isbuiltin == 1:
        same = array.astype(array.dtype.newbyteorder(">"))
    elif layout == "unaligned" and array.dtype.kind != "O":
        raw = b"\0" + bytes(to_raw(array))
        same = np.frombuffer(raw, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    same.flags.writeable = False
    for given_spec in (None, spec(datatype_of(array)), spec(datatype_of(array), array.shape)):
        tensor = as_tensor(same, given_spec)
        assert same_bits(tensor, array)
        assert same_bits(from_raw(to_raw(tensor), datatype_of(array), array.shape), array)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2)])
@pytest.mark.parametrize("datatype", DATATYPES)
def test_empty_and_scalar_tensors(datatype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype_of(datatype))
    if datatype == "BYTES":
        array[...] = b""
    tensor = as_tensor(array, spec(datatype, shape))
    assert (tensor.shape, tensor.dtype) == (shape, dtype_of(datatype))
    assert same_bits(from_raw(to_raw(tensor), datatype, shape), array)
    if shape == (0,):
        assert as_tensor([], spec(datatype)).dtype == dtype_of(datatype)


def test_nan_payloads_and_negative_zero_keep_their_bits() -> None:
    bits = np.array([0x7FF8000000000BAD, 0xFFF0000000000001, 0x8000000000000000], np.uint64)
    assert bytes(to_raw(as_tensor(bits.view(np.float64), spec("FP64")))) == bits.tobytes()


# --- strings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        (["a", "", "\u00fc\0x\0"], [b"a", b"", b"\xc3\xbc\0x\0"]),
        ([b"\xff\0", b"\0"], [b"\xff\0", b"\0"]),
        (np.array(["a\0b", "\u00fc"]), [b"a\0b", b"\xc3\xbc"]),
        (np.array([b"\xff", b"a\0b"]), [b"\xff", b"a\0b"]),
        (np.array(["a\0", b"b\0", np.str_("c"), np.bytes_(b"d")], object), [b"a\0", b"b\0", b"c", b"d"]),
        (np.array(["long" * 9, ""], np.dtypes.StringDType()), [b"long" * 9, b""]),
        (["a", b"\xfe"], [b"a", b"\xfe"]),
    ],
    ids=repr,
)
def test_strings_of_every_kind_are_bytes(value: Any, elements: list[bytes]) -> None:
    for given_spec in (None, spec("BYTES", (-1,))):
        tensor = as_tensor(value, given_spec)
        assert tensor.tolist() == elements
        assert all(type(item) is bytes for item in tensor.tolist())
        assert from_raw(to_raw(tensor), "BYTES", tensor.shape).tolist() == elements


# --- other libraries' arrays --------------------------------------------------------------------------------

FLOATS = np.arange(6, dtype=np.float32).reshape(2, 3)


class DLPack:
    """What has DLPack and nothing else, as a tensor of some frameworks. ``device``: where it says that it is."""

    def __init__(self, array: Array, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **options: Any) -> Any:
        if self._device != (1, 0):
            raise BufferError("it lies on a GPU")  # as the protocol wants it, to whoever asks for CPU memory
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Interface:
    """What has numpy's array interface."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


class Convertible:
    """What has ``__array__``, as a jax array or a torch tensor."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._array


class Awkward(DLPack):
    """What can't be converted, and has DLPack."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        raise TypeError("not so")


@pytest.mark.parametrize("kind", [DLPack, Interface, Convertible, Awkward])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.uint8, np.bool_, np.float16])
def test_other_arrays_are_taken_where_they_lie(kind: Any, dtype: Any) -> None:
    array = FLOATS.astype(dtype)
    for given_spec in (None, spec(datatype_of(array), (-1, 3))):
        tensor = as_tensor(kind(array), given_spec)
        assert np.shares_memory(tensor, array)
        assert same_bits(tensor, array)
    (named,) = as_inputs(kind(array), [spec(datatype_of(array), (2, 3))]).values()
    assert np.shares_memory(named, array)
    with pytest.raises(InvalidInputError, match="shape"):
        as_tensor(kind(array), spec(datatype_of(array), (3, 2)))


def test_what_lies_on_another_device_is_named() -> None:
    with pytest.raises(InvalidInputError, match="CPU memory"):
        as_tensor(DLPack(FLOATS, device=(2, 0)))


def test_a_list_of_other_arrays() -> None:
    assert as_tensor([Convertible(FLOATS), FLOATS]).shape == (2, 2, 3)


def test_pandas_is_taken_where_it_lies() -> None:
    series = pd.Series([1.0, 2.0], dtype="float32")
    assert np.shares_memory(as_tensor(series, spec("FP32", (-1,))), series.to_numpy())
    frame = pd.DataFrame(FLOATS, columns=["a", "b", "c"])
    assert np.shares_memory(as_tensor(frame, spec("FP32", (-1, 3))), frame.to_numpy())
    assert as_tensor(pd.Series(["a", "\u00fc"])).tolist() == [b"a", b"\xc3\xbc"]
    assert as_tensor(pd.Series([1, 2], dtype="Int64")).dtype == np.int64
    assert as_tensor(pd.DataFrame({"a": np.int8([1]), "b": np.float64([0.5])})).tolist() == [[1.0, 0.5]]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pd.Series([2**53 + 1, None], dtype="Int64"), "INT64 that would become FP64"),
        (pd.DataFrame({"a": [2**53 + 1], "b": [0.5]}), "INT64 that would become FP64"),
        (pd.Series(["a", None]), "str or bytes"),
        (pd.Series([True, None], dtype="boolean"), "str or bytes"),
        (pd.DataFrame({"a": [1], "b": ["x"]}), "str or bytes"),
        (pd.Series(pd.date_range("2020", periods=1)), "no datatype"),
    ],
    ids=["nullable", "several dtypes", "strings", "booleans", "mixed", "dates"],
)
def test_pandas_that_would_lose_something(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        as_tensor(value)


def test_arrow_is_taken_where_it_lies() -> None:
    array = pa.array([1, 2, 3], pa.int32())
    assert np.shares_memory(
        as_tensor(array, spec("INT32", (3,))), np.frombuffer(array.buffers()[1], np.uint8)
    )
    assert as_tensor(pa.array(["a", "\u00fc"])).tolist() == [b"a", b"\xc3\xbc"]
    assert as_tensor(pa.array([b"a\0", b"\xff"])).tolist() == [b"a\0", b"\xff"]
    assert as_tensor(pa.array([True, False])).tolist() == [True, False]
    assert as_tensor(pa.chunked_array([[1], [2]])).tolist() == [1, 2]
    assert as_tensor(pa.table({"a": [1, 2], "b": [3, 4]})).tolist() == [[1, 3], [2, 4]]
    assert np.shares_memory(as_tensor(pa.Tensor.from_numpy(FLOATS)), FLOATS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (pa.array([2**53 + 1, None]), "1 nulls"),
        (pa.chunked_array([[1], [None]]), "1 nulls"),
        (pa.table({"a": [1, None]}), "1 nulls"),
        (pa.table({"a": [2**53 + 1], "b": [0.5]}), "columns of several types"),
        (pa.array(["a", None]), "1 nulls"),
        (pa.array([[1], [2, 3]]), "str or bytes"),
    ],
    ids=["ints", "chunks", "table", "several types", "strings", "lists"],
)
def test_arrow_that_would_lose_something(value: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        as_tensor(value)
