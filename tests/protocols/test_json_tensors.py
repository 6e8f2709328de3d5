"""Tensors as JSON: exact both ways, and nothing that comes can do more harm than a ProtocolError."""

from __future__ import annotations

import json
from typing import Any

import ml_dtypes
import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client.errors import InvalidInputError, ProtocolError
from mcp_client.protocols.json_tensors import (
    dumps,
    loads,
    shape_by_nesting,
    shape_of,
    tensor_from_json,
    tensor_to_json,
)
from mcp_client.tensors import DATATYPES, Array, ShapeError, datatype_of, dtype_of, from_raw
from tests.protocols.arrays import same_numbers, tensors


def through_json(array: Array) -> Array:
    text = dumps(tensor_to_json(array, what="t", b64=True))
    assert b"null" not in text
    document = json.loads(text)  # strictly standard JSON, read by another library
    return tensor_from_json(
        document["data"], document["datatype"], shape_of(document["shape"], "t"), what="t"
    )


def decode(data: Any, datatype: str, shape: list[int]) -> Array:
    return tensor_from_json(data, datatype, shape_of(shape, "t"), what="t")


@given(tensors())
def test_every_tensor_comes_back_exactly(array: Array) -> None:
    assert same_numbers(through_json(array), array)


@given(tensors())
def test_what_comes_back_is_read_only(array: Array) -> None:
    assert not through_json(array).flags.writeable


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_float_whose_shortest_decimal_is_rounded_twice(sign: float) -> None:
    array = np.array([0x15AE43FD], dtype=np.uint32).view(np.float32) * np.float32(sign)
    naive = np.array(json.loads("7.038531e-26"), dtype=np.float64).astype(np.float32)
    assert abs(array[0]) != naive  # the trap is real
    assert same_numbers(through_json(array), array)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200))
def test_finite_floats_travel_as_numbers_only(values: list[float]) -> None:
    data = json.loads(dumps(tensor_to_json(np.array(values, np.float32), what="t", b64=True)))["data"]
    assert all(type(item) is float for item in data)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_nan_and_infinities_travel_as_words(dtype: Any) -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0, 1.5], dtype)
    data = json.loads(dumps(tensor_to_json(array, what="t", b64=True)))["data"]
    assert data[:3] == ["NaN", "Infinity", "-Infinity"]
    assert same_numbers(through_json(array), array)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [("INT64", 2**53 + 1), ("INT64", -(2**63)), ("UINT64", 2**64 - 1), ("INT8", -128), ("UINT16", 65535)],
)
def test_integers_beyond_a_doubles_precision_are_exact(datatype: str, value: int) -> None:
    array = np.array([value], dtype=dtype_of(datatype))
    assert through_json(array)[0] == value


def test_bytes_travel_as_text_or_base64() -> None:
    array = np.array([b"text", b"", b"a\0", b"\xff\xfe"], dtype=object)
    data = json.loads(dumps(tensor_to_json(array, what="t", b64=True)))["data"]
    assert data == ["text", "", "a\0", {"b64": "//4="}]
    assert through_json(array).tolist() == array.tolist()


def test_bytes_without_a_json_form_are_refused_where_base64_is_not_offered() -> None:
    with pytest.raises(InvalidInputError, match="use binary data"):
        tensor_to_json(np.array([b"\xff"], dtype=object), what="t", b64=False)


def test_non_contiguous_arrays_are_written_in_row_major_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert same_numbers(through_json(array), np.ascontiguousarray(array))


def test_nested_data_is_read_like_flat_data() -> None:
    assert decode([[1, 2, 3], [4, 5, 6]], "INT32", [2, 3]).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert decode([[[1], [2]]], "FP32", [1, 2, 1]).shape == (1, 2, 1)
    assert decode([[], []], "FP32", [2, 0]).shape == (2, 0)
    assert decode(7, "INT8", []).tolist() == 7


@given(st.recursive(st.integers(0, 3), lambda inner: st.lists(inner, max_size=3), max_leaves=12))
def test_nested_data_of_any_form_is_read_or_refused(data: Any) -> None:
    shape = shape_by_nesting(data)
    try:
        array = decode(data, "INT32", shape)
    except ProtocolError:
        return
    assert array.tolist() == data or array.size == 0


@pytest.mark.parametrize(
    ("data", "datatype", "shape"),
    [
        ([1, 2], "FP32", [3]),
        ([1, 2], "FP32", [1, 3]),
        ([[1, 2], [3]], "FP32", [2, 2]),
        ([[1], [2, 3]], "FP32", [2, 1]),
        ([[1, 2]], "FP32", [2, 1]),
        ([], "FP32", []),
        ([1], "FP32", [0]),
        ([], "FP32", [2**31, 2**26]),
    ],
)
def test_data_that_does_not_fit_its_shape(data: Any, datatype: str, shape: list[int]) -> None:
    with pytest.raises(ShapeError):
        decode(data, datatype, shape)


@pytest.mark.parametrize(
    ("data", "datatype"),
    [
        ([1.5], "INT32"),
        ([1.0], "INT64"),
        ([True], "INT32"),
        (["1"], "INT32"),
        ([128], "INT8"),
        ([-1], "UINT64"),
        ([2**63], "INT64"),
        ([2], "BOOL"),
        ([0.0], "BOOL"),
        (["true"], "BOOL"),
        ([True], "FP32"),
        (["nan"], "FP32"),
        ([None], "FP32"),
        ([[1]], "FP32"),
        ([{}], "FP64"),
        ([1e39], "FP32"),
        ([70000], "FP16"),
        ([10**400], "FP64"),
        ([1], "BYTES"),
        ([{"b64": "§"}], "BYTES"),
        ([{"b64": "AA=="}, {"b64": 1}], "BYTES"),
        ([{"b64": "AA==", "x": 1}], "BYTES"),
        (["\ud800"], "BYTES"),
        ("text", "BYTES"),
        (None, "FP32"),
    ],
)
def test_data_that_its_datatype_can_not_hold(data: Any, datatype: str) -> None:
    with pytest.raises(ProtocolError):
        decode(data, datatype, [len(data)] if isinstance(data, list) else [1])


def test_null_is_explained() -> None:
    with pytest.raises(ProtocolError, match="wrote NaN or an infinity as null"):
        decode([1.0, None], "FP32", [2])


def test_bool_is_read_from_true_false_and_from_0_and_1() -> None:
    assert decode([True, False, 1, 0], "BOOL", [4]).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "shape",
    [
        "3",
        None,
        [-1],
        [1.0],
        [True],
        ["3"],
        [None],
        [1] * 65,
        [0, 2**63],
        [0, 2**40, 2**40],
        [2**62],
        {"0": 1},
        [[1]],
    ],
)
def test_shapes_that_are_no_shapes(shape: Any) -> None:
    with pytest.raises(ProtocolError):
        shape_of(shape, "t")


@given(st.lists(st.integers(0, 2**64), max_size=70), st.sampled_from(DATATYPES))
def test_no_shape_from_the_wire_can_exhaust_memory(shape: list[int], datatype: str) -> None:
    try:
        sizes = shape_of(shape, "t")
    except ProtocolError:
        return
    for read in (
        lambda: tensor_from_json([], datatype, sizes, what="t"),
        lambda: from_raw(b"", datatype, sizes, what="t"),
    ):
        try:
            assert read().size == 0
        except ProtocolError:
            continue


@pytest.mark.parametrize("text", [b"[NaN, Infinity, -Infinity]", b'{"a": NaN}'])
def test_bare_nan_and_infinity_are_read(text: bytes) -> None:
    assert loads(text, "t") is not None


@pytest.mark.parametrize(
    "text", [b"", b"{", b"NaN{", b"\xff\xfeNaN", b"[NaN" + b"[" * 100_000, b"[NaN," + b"1" * 5000 + b"]"]
)
def test_what_is_no_json_is_a_protocol_error(text: bytes) -> None:
    with pytest.raises(ProtocolError, match="is not JSON"):
        loads(text, "t")


@pytest.mark.parametrize("value", [2**64, {1, 2}, "\ud800"])
def test_what_json_can_not_say_is_told_before_it_is_sent(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="written as JSON"):
        dumps({"parameters": {"p": value}})


def test_raw_data_is_not_copied_where_it_is_aligned() -> None:
    body = bytes(64) + np.arange(4, dtype=np.float64).tobytes()
    array = from_raw(memoryview(body)[64:], "FP64", (4,), what="t")
    assert array.tolist() == [0, 1, 2, 3]
    assert np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_raw_data_at_an_odd_address_becomes_an_aligned_array() -> None:
    body = bytes(1) + np.arange(4, dtype=np.float64).tobytes()
    array = from_raw(memoryview(body)[1:], "FP64", (4,), what="t")
    assert array.tolist() == [0, 1, 2, 3]
    assert array.flags.aligned
    assert not array.flags.writeable


def test_orjson_still_writes_floats_shortest() -> None:
    """The exactness above rests on it: the shortest decimal of a float32 is not that of the same double."""
    assert orjson.dumps(np.array([0.1], np.float32), option=orjson.OPT_SERIALIZE_NUMPY) == b"[0.1]"


@given(tensors())
def test_the_datatype_is_named(array: Array) -> None:
    assert tensor_to_json(array, what="t", b64=True)["datatype"] == datatype_of(array)
