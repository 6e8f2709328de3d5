"""Both HTTP codecs, client and server side against each other: what one writes the other reads, exactly."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_client.errors import (
    InvalidInputError,
    NotFoundError,
    NotOfferedError,
    ProtocolError,
    RequestRejectedError,
)
from mcp_client.management import IndexEntry
from mcp_client.protocols import WireRequest, WireResponse, management_http, mcp_v1, oip_grpc, oip_http
from mcp_client.protocols.mcp_v1 import McpV1Codec
from mcp_client.protocols.oip_grpc import OipGrpcCodec
from mcp_client.protocols.oip_http import OipHttpCodec
from mcp_client.request import Request
from mcp_client.result import Answer
from mcp_client.tensors import Array, ModelMetadata, TensorSpec
from tests.protocols.arrays import OIP_DATATYPES, OIP_JSON_DATATYPES, same_bits, same_numbers, tensors

NAMES = st.text(min_size=1, max_size=8).filter(lambda text: text.isprintable())
INPUTS = st.dictionaries(NAMES, tensors(), min_size=1, max_size=3)
OIP_INPUTS = st.dictionaries(NAMES, tensors(OIP_DATATYPES), min_size=1, max_size=3)


def lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def body_of(wire: WireRequest) -> bytes:
    return b"".join(wire.body)


def mcp_arrives(wire: WireRequest) -> Request:
    return mcp_v1.parse_infer(body_of(wire), lower(wire.headers)).request


def oip_arrives(wire: WireRequest, model: str = "m", version: str = "") -> oip_http.Incoming:
    return oip_http.parse_infer(body_of(wire), lower(wire.headers), model=model, version=version)


def ok(body: bytes, **headers: str) -> WireResponse:
    return WireResponse(200, {name.replace("_", "-"): value for name, value in headers.items()}, body)


REQUEST = Request("m", {"x": np.array([1.5], np.float32)})


# --- round trips
# -------------------------------------------------------------------------------------------------


@given(INPUTS)
def test_mcp_inputs_arrive_exactly(inputs: dict[str, Array]) -> None:
    arrived = mcp_arrives(McpV1Codec().infer(Request("m", inputs), None))
    assert arrived.inputs.keys() == inputs.keys()
    assert all(same_numbers(arrived.inputs[name], array) for name, array in inputs.items())


@given(OIP_INPUTS)
def test_oip_inputs_arrive_with_every_bit(inputs: dict[str, Array]) -> None:
    arrived = oip_arrives(OipHttpCodec().infer(Request("m", inputs), None))
    assert arrived.request.inputs.keys() == inputs.keys()
    assert all(same_bits(arrived.request.inputs[name], array) for name, array in inputs.items())


@given(st.dictionaries(NAMES, tensors(OIP_JSON_DATATYPES), min_size=1, max_size=3))
def test_oip_inputs_arrive_exactly_as_json(inputs: dict[str, Array]) -> None:
    wire = OipHttpCodec(binary=False).infer(Request("m", inputs), None)
    assert "Inference-Header-Content-Length" not in wire.headers
    arrived = oip_arrives(wire).request
    assert all(same_numbers(arrived.inputs[name], array) for name, array in inputs.items())


@given(INPUTS)
def test_mcp_outputs_come_back_exactly(outputs: dict[str, Array]) -> None:
    body = mcp_v1.format_infer(Answer.of(outputs, model="m", version="3", id="r1"), short=False)
    answer = McpV1Codec().decode_infer(ok(body), Request("m", {}, id="r1"))
    assert (answer.model, answer.version) == ("m", "3")
    assert all(same_numbers(answer.outputs[name], array) for name, array in outputs.items())


@given(OIP_INPUTS, st.data())
def test_oip_outputs_come_back_with_every_bit_in_any_order_asked_for(
    outputs: dict[str, Array], data: st.DataObject
) -> None:
    order = tuple(data.draw(st.permutations(list(outputs))))
    incoming = oip_arrives(OipHttpCodec().infer(Request("m", REQUEST.inputs, outputs=order), None))
    assert incoming.request.outputs == order
    headers, parts = oip_http.format_infer(Answer.of(outputs, model="m", version="3"), incoming)
    answer = OipHttpCodec().decode_infer(
        ok(b"".join(parts), **lower(headers)), Request("m", {}, outputs=order)
    )
    assert all(same_bits(answer.outputs[name], array) for name, array in outputs.items())
    assert not any(array.flags.writeable for array in answer.outputs.values())


def test_oip_reads_json_and_binary_outputs_in_one_answer() -> None:
    outputs = {"a": np.arange(3, dtype=np.int64), "b": np.array([b"x"], object), "c": np.float32([1.5])}
    incoming = oip_http.Incoming(REQUEST, binary=True, binary_of={"b": False})
    headers, parts = oip_http.format_infer(Answer.of(outputs), incoming)
    answer = OipHttpCodec().decode_infer(ok(b"".join(parts), **lower(headers)), REQUEST)
    assert b'"x"' in parts[0]
    assert all(same_bits(answer.outputs[name], array) for name, array in outputs.items())


def test_oip_reads_json_though_binary_was_asked_for() -> None:
    body = b'{"model_name":"m","outputs":[{"name":"y","shape":[2],"datatype":"FP32","data":[1.5,NaN]}]}'
    answer = OipHttpCodec().decode_infer(ok(body), REQUEST)
    assert answer.outputs["y"].tolist()[0] == 1.5
    assert np.isnan(answer.outputs["y"][1])


def test_the_first_binary_tensor_of_an_answer_is_used_where_it_lies() -> None:
    outputs = {"y": np.arange(1000, dtype=np.float64)}
    headers, parts = oip_http.format_infer(Answer.of(outputs), oip_http.Incoming(REQUEST, True, {}))
    body = b"".join(parts)
    answer = OipHttpCodec().decode_infer(ok(body, **lower(headers)), REQUEST)
    assert np.shares_memory(answer.outputs["y"], np.frombuffer(body, np.uint8))


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4])
def test_four_bits_have_no_oip_form(dtype: Any) -> None:
    array = np.array([1, 7], dtype)
    request = Request("m", {"x": array})
    for codec in (OipHttpCodec(), OipHttpCodec(binary=False), OipGrpcCodec()):
        with pytest.raises(InvalidInputError, match=r"array\.astype\(np\.u?int8\).*protocol='mcp'"):
            codec.infer(request, None)
    header = b'{"inputs":[{"name":"x","shape":[2],"datatype":"INT4","data":[1,7]}]}'
    with pytest.raises(RequestRejectedError, match="no form for INT4"):
        oip_http.parse_infer(header, {}, model="m", version="")
    assert same_bits(mcp_arrives(McpV1Codec().infer(request, None)).inputs["x"], array)


@pytest.mark.parametrize("value", ["8", "-9", "1.5", "true", '"1"', "null"])
def test_values_that_are_no_int4(value: str) -> None:
    body = f'{{"inputs":{{"x":{{"shape":[1],"datatype":"INT4","data":[{value}]}}}}}}'.encode()
    with pytest.raises(RequestRejectedError, match="INT4"):
        mcp_v1.parse_infer(body, {})


@pytest.mark.parametrize("datatype", ["FP8E4M3FN", "FP8E4M3FNUZ", "FP8E5M2", "FP8E5M2FNUZ"])
def test_numbers_beyond_fp8_are_an_error_though_it_has_no_infinity(datatype: str) -> None:
    def read(value: str) -> Array:
        body = f'{{"inputs":{{"x":{{"shape":[1],"datatype":"{datatype}","data":[{value}]}}}}}}'.encode()
        return mcp_v1.parse_infer(body, {}).request.inputs["x"]

    with pytest.raises(RequestRejectedError, match=f"beyond the range of {datatype}"):
        read("1e9")
    assert np.isnan(read('"NaN"').astype(np.float32))[0]
    if datatype == "FP8E5M2":
        assert np.isinf(read('"Infinity"').astype(np.float32))[0]
    else:
        with pytest.raises(RequestRejectedError, match="beyond the range"):
            read('"Infinity"')


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3fn]
)
def test_small_floats_have_no_oip_json_form(dtype: Any) -> None:
    request = Request("m", {"x": np.array([1.0], dtype)})
    with pytest.raises(InvalidInputError, match="no JSON form in the Open Inference Protocol; use binary"):
        OipHttpCodec(binary=False).infer(request, None)
    answer = Answer.of({"y": np.array([1.0], dtype)})
    with pytest.raises(RequestRejectedError, match="use binary") as caught:
        oip_http.format_infer(answer, oip_http.Incoming(REQUEST, False, {}))
    assert caught.value.code == "binary_only"


# --- what a request carries besides tensors
# ----------------------------------------------------------------------

FULL = Request(
    "m/ö",
    REQUEST.inputs,
    version="3",
    outputs=("y", "z"),
    parameters={
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": False,
        "temperature": 0.5,
        "w": "ü",
    },
    id="id-1",
    session="Jürgen 42",
    path="/user/Grüße?q=100%25",
    priority=5,
    timeout_ms=200,
    purpose="prefetch",
)


def test_mcp_carries_all_of_a_request() -> None:
    arrived = mcp_arrives(McpV1Codec().infer(FULL, None))
    assert {name: getattr(arrived, name) for name in FULL.__slots__ if name != "inputs"} == {
        name: getattr(FULL, name) for name in FULL.__slots__ if name != "inputs"
    }


def test_oip_carries_all_of_a_request() -> None:
    wire = OipHttpCodec().infer(FULL, None)
    assert wire.path == "/v2/models/m%2F%C3%B6/versions/3/infer"
    arrived = oip_arrives(wire, "m/ö", "3").request
    assert {name: getattr(arrived, name) for name in FULL.__slots__ if name != "inputs"} == {
        name: getattr(FULL, name) for name in FULL.__slots__ if name != "inputs"
    }


def test_the_headers_of_a_request_are_plain_ascii() -> None:
    for codec in (McpV1Codec(), OipHttpCodec()):
        headers = codec.infer(FULL, None).headers
        assert all(value.isascii() and value.isprintable() for value in headers.values())
        assert headers["X-Request-Id"] == "id-1"
        assert headers["X-MCP-Purpose"] == "prefetch"
        assert headers["X-MCP-Deadline-Ms"] == "200"


def test_a_request_without_extras_sends_none() -> None:
    body = body_of(McpV1Codec().infer(REQUEST, None))
    assert body == b'{"model":"m","inputs":{"x":{"data":[1.5],"shape":[1],"datatype":"FP32"}}}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2**64])
def test_parameters_that_json_can_not_carry_are_refused(value: float) -> None:
    for codec in (McpV1Codec(), OipHttpCodec()):
        with pytest.raises(InvalidInputError):
            codec.infer(Request("m", REQUEST.inputs, parameters={"p": value}), None)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_names_that_can_not_stand_in_a_url_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        OipHttpCodec().infer(Request(name, REQUEST.inputs), None)


# --- the short form
# ----------------------------------------------------------------------------------------------


def test_the_seeds_short_form_is_read() -> None:
    incoming = mcp_v1.parse_infer(b'{"input": [0.1, 0.9, 0.4], "shape": [1, 3]}', {})
    assert incoming.short
    assert same_bits(incoming.request.inputs[""], np.array([[0.1, 0.9, 0.4]], np.float32))


def test_the_short_forms_shape_may_come_from_nesting() -> None:
    incoming = mcp_v1.parse_infer(b'{"input": [[1, 2], [3, 4]], "datatype": "INT64"}', {})
    assert same_bits(incoming.request.inputs[""], np.array([[1, 2], [3, 4]], np.int64))


def test_the_short_forms_answer() -> None:
    answer = Answer.of({"probs": np.array([[0.5, 2.0]], np.float32)}, model="m", version="1")
    assert mcp_v1.format_infer(answer, short=True) == (
        b'{"output":[0.5,2.0],"shape":[1,2],"datatype":"FP32","model":"m","version":"1"}'
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "malformed_request"),
        (b"[]", "malformed_request"),
        (b"{}", "malformed_request"),
        (b'{"input": [1], "inputs": {}}', "malformed_request"),
        (b'{"inputs": [1]}', "malformed_request"),
        (b'{"inputs": {"x": [1]}}', "malformed_request"),
        (b'{"input": [1], "shape": [2]}', "shape_mismatch"),
        (b'{"input": [1], "shape": "x"}', "malformed_request"),
        (b'{"input": [1], "datatype": "FLOAT"}', "malformed_request"),
        (b'{"input": [1], "datatype": 3}', "malformed_request"),
        (b'{"input": [1], "outputs": "y"}', "malformed_request"),
        (b'{"input": [1], "parameters": [1]}', "malformed_request"),
        (b'{"input": [1], "parameters": {"a": null}}', "malformed_request"),
        (b'{"input": [1], "model": {}}', "malformed_request"),
        (b'{"input": [1], "timeout_ms": -1}', "malformed_request"),
        (b'{"input": [1], "priority": "high"}', "malformed_request"),
        (b'{"input": [1], "priority": true}', "malformed_request"),
    ],
)
def test_mcp_requests_that_are_none(body: bytes, code: str) -> None:
    with pytest.raises(RequestRejectedError) as caught:
        mcp_v1.parse_infer(body, {})
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize(
    "headers", [{"x-mcp-purpose": "fun"}, {"x-mcp-deadline-ms": "soon"}, {"x-mcp-deadline-ms": "nan"}]
)
def test_headers_that_say_nothing_sensible(headers: dict[str, str]) -> None:
    with pytest.raises(RequestRejectedError):
        mcp_v1.parse_infer(b'{"input": [1]}', headers)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32"}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "data": [1]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": 4}}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": {"binary_data_size": -4}}]}',
        b'{"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "parameters": 3, "data": [1]}]}',
    ],
)
def test_oip_requests_that_are_none(body: bytes) -> None:
    with pytest.raises(RequestRejectedError):
        oip_http.parse_infer(body, {}, model="m", version="")


@pytest.mark.parametrize("length", ["", "-1", "x", "²", "99999999999999999999999", "1000"])
def test_a_header_length_beyond_the_body_is_refused(length: str) -> None:
    headers = {"inference-header-content-length": length}
    with pytest.raises(RequestRejectedError, match="Inference-Header-Content-Length"):
        oip_http.parse_infer(b"{}", headers, model="m", version="")


# --- answers that are none
# -----------------------------------------------------------------------------------------


def oip_output(**change: Any) -> bytes:
    output: dict[str, Any] = {"name": "y", "shape": [2], "datatype": "FP32", "data": [1, 2]} | change
    return oip_http.dumps({"outputs": [{key: value for key, value in output.items() if value is not None}]})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"{}",
        b'{"outputs": {}}',
        b'{"outputs": [1]}',
        oip_output(datatype=None),
        oip_output(shape=None),
        oip_output(name=None),
        oip_output(data=None),
        oip_output(shape=[3]),
        oip_output(datatype="FP8"),
        oip_output(parameters={"binary_data_size": 8}),
        b'{"outputs": ' + b"[" * 5000,
        b'{"model_name": ["m"], ' + oip_output()[1:],
    ],
)
def test_oip_answers_that_are_none(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        OipHttpCodec().decode_infer(ok(body), REQUEST)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"{}",
        b'{"outputs": []}',
        b'{"outputs": {"y": 1}}',
        b'{"outputs": {"y": {"data": [1], "shape": [2]}}}',
    ],
)
def test_mcp_answers_that_are_none(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        McpV1Codec().decode_infer(ok(body), REQUEST)


def test_an_answer_must_hold_what_was_asked_for() -> None:
    request = Request("m", {}, outputs=("y", "z"))
    with pytest.raises(ProtocolError, match="lacks output 'z'; it has 'y'"):
        OipHttpCodec().decode_infer(ok(oip_output()), request)


def test_an_answer_to_another_request_is_refused() -> None:
    body = b'{"id": "other", ' + oip_output()[1:]
    with pytest.raises(ProtocolError, match="belongs to request 'other'"):
        OipHttpCodec().decode_infer(ok(body), Request("m", {}, id="mine"))


def test_an_output_that_comes_twice_is_refused() -> None:
    one = oip_output()[len(b'{"outputs":[') : -2]
    with pytest.raises(ProtocolError, match="comes twice"):
        OipHttpCodec().decode_infer(ok(b'{"outputs":[' + one + b"," + one + b"]}"), REQUEST)


def test_an_error_status_is_the_fitting_error() -> None:
    response = WireResponse(404, {}, b'{"error": {"code": "model_not_found", "message": "no model"}}')
    for codec in (McpV1Codec(), OipHttpCodec()):
        for decode in (
            lambda codec=codec: codec.decode_infer(response, REQUEST),
            lambda codec=codec: codec.decode_metadata(response),
            lambda codec=codec: codec.decode_models(response),
        ):
            with pytest.raises(NotFoundError, match="no model") as caught:
                decode()
            assert caught.value.code == "model_not_found"


def test_what_the_response_headers_say_is_kept() -> None:
    body = mcp_v1.format_infer(Answer.of({"y": np.float32([1])}, model="m", version="1"), short=False)
    response = ok(body, x_model_digest="sha256:00", cache_control="max-age=60", age="10")
    answer = McpV1Codec().decode_infer(response, REQUEST)
    assert (answer.digest, answer.max_age_s, answer.no_store) == ("sha256:00", 50.0, False)


# --- what a server says of itself and its models
# ---------------------------------------------------------------------

METADATA = ModelMetadata(
    name="m",
    inputs=(
        TensorSpec("x", "FP32", (-1, 3)),
        TensorSpec("n", "INT64", (), optional=True),
        TensorSpec("f", "BYTES", None),
    ),
    outputs=(TensorSpec("y", "BOOL", (0, 3)),),
    version="2",
    versions=("1", "2"),
    platform="onnxruntime_onnx",
    digest="sha256:00",
    extra={"files": [{"name": "model.onnx"}]},
)


def test_mcp_metadata_round_trip() -> None:
    assert McpV1Codec().decode_metadata(ok(mcp_v1.format_metadata(METADATA))) == METADATA


def test_oip_metadata_round_trip() -> None:
    decoded = OipHttpCodec().decode_metadata(
        ok(oip_http.format_metadata(METADATA), x_model_digest="sha256:00")
    )
    assert (decoded.inputs, decoded.outputs, decoded.versions) == (
        METADATA.inputs,
        METADATA.outputs,
        METADATA.versions,
    )
    assert (decoded.name, decoded.platform, decoded.digest) == ("m", "onnxruntime_onnx", "sha256:00")


def test_oip_metadata_as_sparse_as_mlservers() -> None:
    decoded = OipHttpCodec().decode_metadata(
        ok(b'{"name":"m","versions":[],"platform":"","inputs":[],"outputs":[]}')
    )
    assert (decoded.inputs, decoded.version) == ((), "")


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"{}",
        b'{"name": "m", "inputs": 3}',
        b'{"name": "m", "inputs": [{"name": "x"}]}',
        b'{"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": ["a"]}]}',
        b'{"name": "m", "versions": [{}]}',
        b'{"name": {}}',
    ],
)
def test_metadata_that_is_none(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        OipHttpCodec().decode_metadata(ok(body))
    with pytest.raises(ProtocolError):
        McpV1Codec().decode_metadata(ok(body.replace(b'"name": "m"', b'"id": "m"')))


def test_models_are_listed_once_each() -> None:
    assert McpV1Codec().decode_models(ok(mcp_v1.format_models([METADATA]))) == ["m"]
    index = [
        IndexEntry("m", "1", "READY"),
        IndexEntry("m", "2", "READY"),
        IndexEntry("gone", "1", "UNAVAILABLE", "unloaded"),
    ]
    assert OipHttpCodec().decode_models(ok(management_http.format_index(index))) == ["m"]
    assert OipHttpCodec().decode_models(ok(b'[{"name": "n"}]')) == ["n"]  # state and version are optional


def test_another_apis_list_of_models_is_not_taken_for_ours() -> None:
    with pytest.raises(ProtocolError):
        McpV1Codec().decode_models(ok(b'{"object": "list", "data": [{"id": "gpt"}]}'))
    with pytest.raises(ProtocolError):
        OipHttpCodec().decode_models(ok(b'{"models": []}'))


@pytest.mark.parametrize(
    "codec", [OipHttpCodec(), OipGrpcCodec(), McpV1Codec()], ids=lambda codec: codec.name
)
def test_a_tensor_in_place_of_the_classes_asked_for_is_no_answer(codec: Any) -> None:
    """MLServer and KServe pass over the parameter."""
    answer = Answer.of({"y": np.array([0.1, 0.9], np.float32)}, model="m")
    request = Request("m", {}, outputs=("y",), classes={"y": 1})
    if codec.name == "oip" and isinstance(codec, OipHttpCodec):
        body = oip_http.format_infer(answer, oip_http.Incoming(request, False, {}))[1]
    elif isinstance(codec, McpV1Codec):
        body = (b'{"outputs": {"y": {"data": [0.1, 0.9], "shape": [2], "datatype": "FP32"}}}',)
    else:
        body = oip_grpc.format_infer(answer)
    with pytest.raises(NotOfferedError, match="does not offer classification"):
        codec.decode_infer(ok(b"".join(body)), request)


def test_models_of_a_server_without_an_index_are_listed_by_kserves_route() -> None:
    codec = OipHttpCodec()
    other = codec.models_otherwise(WireResponse(404, {}, b'{"detail": "Not Found"}'))
    assert other is not None
    assert (other.method, other.path) == ("GET", "/v2/models")
    assert codec.decode_models_otherwise(ok(b'{"models": ["a", "b"]}')) == ["a", "b"]
    with pytest.raises(NotOfferedError):
        codec.decode_models_otherwise(WireResponse(404, {}, b'{"detail": "Not Found"}'))
    for body in (b"[]", b'{"models": [1]}', b'{"models": "a"}'):
        with pytest.raises(ProtocolError):
            codec.decode_models_otherwise(ok(body))
    assert codec.models_otherwise(ok(b"[]")) is None
    assert codec.models_otherwise(WireResponse(503, {}, b"")) is None


@pytest.mark.parametrize(
    ("response", "offers"),
    [
        (ok(oip_http.format_server("mcp-server", "1")), True),
        (ok(b'{"name": "mlserver", "version": "1.6.0", "extensions": []}'), False),
        (ok(b'{"name": "x"}'), False),
        (ok(b'{"name": "kserve", "version": "0.21.0", "extensions": ["model_repository_extension"]}'), True),
        (ok(b'{"name": "kserve", "version": "0.14.0rc1", "extensions": []}'), True),
        (ok(b'{"name": "kserve", "version": "0.13.1", "extensions": []}'), False),
        (ok(b'{"name": "kserve", "version": null}'), False),
        (ok(b'{"name": "kserve", "version": 1}'), False),
        (ok(b"not json"), False),
        (ok(b"[]"), False),
        (WireResponse(404, {}, b'{"extensions": ["binary_tensor_data"]}'), False),
    ],
)
def test_binary_data_is_offered_where_the_server_says_so_and_by_kserve(
    response: WireResponse, offers: bool
) -> None:
    assert OipHttpCodec.offers_binary(response) is offers


def test_errors_of_both_protocols_come_back() -> None:
    for module in (mcp_v1, oip_http):
        error = RequestRejectedError("expected [1, 3]; got [1, 4]", status=400, code="shape_mismatch")
        response = WireResponse(400, {}, module.format_error(error, "r1"))
        with pytest.raises(RequestRejectedError, match=r"expected \[1, 3\]; got \[1, 4\]") as caught:
            McpV1Codec().decode_infer(response, REQUEST)
        assert caught.value.code == "shape_mismatch"
