"""The gRPC codec: its messages are the protocol's, every tensor survives both ways, and harm done to bytes is noticed."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.errors import InvalidInputError, NotOfferedError, OverloadedError, ProtocolError, ServerError
from mcp_client.protocols import Shared, WireResponse, grpc_status, oip_grpc
from mcp_client.protocols import oip_pb2 as pb
from mcp_client.protocols.oip_grpc import OipGrpcCodec
from mcp_client.request import Request
from mcp_client.result import Answer
from mcp_client.tensors import Array, ModelMetadata, TensorSpec, datatype_of, from_raw
from tests.protocols.arrays import OIP_DATATYPES, same_bits, tensors
from tests.protocols.mutations import mutated

CODEC = OipGrpcCodec()
HERE = Path(__file__).parent
NAMES = st.text(max_size=8)
PARAMETERS = st.dictionaries(
    NAMES.filter(lambda name: name not in ("priority", "timeout")),
    st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), NAMES, st.floats(allow_nan=False)),
    max_size=4,
)


def joined(parts: Any) -> bytes:
    return b"".join(parts)


def answered(answer: Answer, request: Request) -> Answer:
    return CODEC.decode_infer(WireResponse(200, {}, joined(oip_grpc.format_infer(answer))), request)


# --- the messages -------------------------------------------------------------------------------------------


PARTLY = (
    "ModelConfig",
    "ModelInput",
    "ModelOutput",
    "ModelInstanceGroup",
    "ModelDynamicBatching",
    "ModelSequenceBatching",
)

# Not Triton's: how MLServer's messages go on.
BESIDE = {
    "ModelMetadataResponse.TensorMetadata": {"parameters": [4, 11, True, ""]},
    "ModelMetadataResponse.TensorMetadata.ParametersEntry": {
        "key": [1, 9, False, ""],
        "value": [2, 11, False, ""],
    },
}


def test_names_numbers_and_types_are_those_of_the_protocol() -> None:
    """The table was taken from tritonclient 2.73's own descriptors."""
    table = json.loads((HERE / "oip_grpc_fields.json").read_text())

    def check(name: str, message: Any) -> None:
        ours = {
            field.name: [
                field.number,
                field.type,
                field.is_repeated,
                field.containing_oneof.name if field.containing_oneof else "",
            ]
            for field in message.fields
        }
        theirs = {**table.get(name, {}), **BESIDE.get(name, {})}
        # Of a model's configuration we know what a client asks for; of the rest, all of it.
        assert ours == ({field: theirs[field] for field in ours} if name in PARTLY else theirs), name
        for nested in message.nested_types:
            check(f"{name}.{nested.name}", nested)
        for enum in message.enum_types:
            assert {v.name: v.number for v in enum.values} == table[f"{name}.{enum.name}"]

    for name, message in pb.DESCRIPTOR.message_types_by_name.items():
        check(name, message)
    for name, enum in pb.DESCRIPTOR.enum_types_by_name.items():
        assert {value.name: value.number for value in enum.values} == table[name]


def test_the_generated_module_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development tool")
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    root = HERE.parents[1]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{root}", f"--descriptor_set_out={tmp_path}/set"]
    subprocess.run([*command, f"{root}/mcp_client/protocols/oip.proto"], check=True, timeout=60)
    (file,) = FileDescriptorSet.FromString((tmp_path / "set").read_bytes()).file
    checked_in = type(file).FromString(pb.DESCRIPTOR.serialized_pb)
    for one in (file, checked_in):
        one.ClearField("source_code_info")
    _without_json_names(file)
    _without_json_names(checked_in)
    assert file == checked_in


def _without_json_names(message: Any) -> None:
    """protoc writes them into a descriptor set, and not into generated code."""
    for field in getattr(message, "field", ()):
        field.ClearField("json_name")
    for nested in [*getattr(message, "message_type", ()), *getattr(message, "nested_type", ())]:
        _without_json_names(nested)


# --- tensors both ways --------------------------------------------------------------------------------------


@given(
    st.dictionaries(NAMES, tensors(OIP_DATATYPES), min_size=1, max_size=3),
    PARAMETERS,
    st.lists(NAMES, max_size=2, unique=True),
    st.one_of(st.none(), st.integers(0, 2**63)),
)
def test_a_request_arrives_as_it_was_sent(
    inputs: dict[str, Array], parameters: dict[str, Any], outputs: list[str], priority: int | None
) -> None:
    request = Request(
        "m", inputs, "3", tuple(outputs), parameters, id="r", session="s ü", path="/a%b", priority=priority
    )
    wire = CODEC.infer(request, None)
    came = oip_grpc.parse_infer(joined(wire.body), wire.headers).request
    assert wire.path == "/inference.GRPCInferenceService/ModelInfer"
    assert all(name == name.lower() for name in wire.headers)
    assert came.inputs.keys() == inputs.keys()
    assert all(same_bits(came.inputs[name], inputs[name]) for name in inputs)
    assert (came.model, came.version, came.id, came.outputs) == ("m", "3", "r", tuple(outputs))
    assert (came.session, came.path, came.priority) == ("s ü", "/a%b", priority)
    assert came.parameters == parameters
    assert {name: type(value) for name, value in came.parameters.items()} == {
        name: type(value) for name, value in parameters.items()
    }


@given(st.dictionaries(NAMES, tensors(OIP_DATATYPES), max_size=3))
def test_an_answer_arrives_as_it_was_given(outputs: dict[str, Array]) -> None:
    came = answered(Answer.of(outputs, model="m", version="2", id="r"), Request("m", {}, id="r"))
    assert (came.model, came.version) == ("m", "2")
    assert list(came.outputs) == list(outputs)
    for name, array in outputs.items():
        assert same_bits(came.outputs[name], array)
        assert not came.outputs[name].flags.writeable
        assert came.outputs[name].flags.aligned


@given(st.dictionaries(NAMES, tensors(OIP_DATATYPES), min_size=1, max_size=3))
def test_protobuf_reads_what_is_written_without_it(inputs: dict[str, Array]) -> None:
    message = pb.ModelInferRequest.FromString(joined(CODEC.infer(Request("m", inputs), None).body))
    assert len(message.raw_input_contents) == len(inputs)
    for tensor, raw, array in zip(message.inputs, message.raw_input_contents, inputs.values(), strict=True):
        assert same_bits(from_raw(raw, tensor.datatype, tuple(tensor.shape)), array)


TYPED = tuple(oip_grpc._CONTENTS)


@given(tensors(TYPED))
def test_typed_contents_are_read(array: Array) -> None:
    datatype = datatype_of(array)
    contents = {oip_grpc._CONTENTS[datatype]: array.reshape(-1).tolist()}
    message = pb.ModelInferResponse(model_name="m")
    with np.errstate(all="ignore"):
        message.outputs.add(
            name="y", datatype=datatype, shape=array.shape, contents=pb.InferTensorContents(**contents)
        )
    came = CODEC.decode_infer(WireResponse(200, {}, message.SerializeToString()), Request("m", {})).outputs[
        "y"
    ]
    assert came.dtype == array.dtype
    assert came.shape == array.shape
    assert not came.flags.writeable
    if array.dtype.kind == "f":  # Python floats do not keep a NaN's payload
        assert np.array_equal(came, array, equal_nan=True)
        assert np.array_equal(np.signbit(came[~np.isnan(array)]), np.signbit(array[~np.isnan(array)]))
    else:
        assert same_bits(came, array)


def test_the_timeout_is_in_microseconds() -> None:
    message = pb.ModelInferRequest.FromString(
        joined(CODEC.infer(Request("m", {}, timeout_ms=12.5), None).body)
    )
    assert message.parameters["timeout"].int64_param == 12_500


# --- what does not fit --------------------------------------------------------------------------------------


def output(**fields: Any) -> Any:
    return pb.ModelInferResponse.InferOutputTensor(
        **{"name": "y", "datatype": "FP32", "shape": [2], **fields}
    )


def contents(**fields: Any) -> Any:
    return pb.InferTensorContents(**fields)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (pb.ModelInferResponse(outputs=[output()], raw_output_contents=[b"1234567"]), "takes 8 bytes; got 7"),
        (pb.ModelInferResponse(outputs=[output()], raw_output_contents=[b"", b""]), "raw contents of 2"),
        (pb.ModelInferResponse(outputs=[output()]), "2 elements; got 0"),
        (pb.ModelInferResponse(outputs=[output(shape=[-1])], raw_output_contents=[b""]), "sizes ≥ 0"),
        (pb.ModelInferResponse(outputs=[output(shape=[2**62, 4])]), "elements; got 0"),
        (pb.ModelInferResponse(outputs=[output(datatype="FP12")]), "FP12"),
        (pb.ModelInferResponse(outputs=[output(datatype="BF16")]), "only in raw contents"),
        (
            pb.ModelInferResponse(
                outputs=[output(datatype="INT8", contents=contents(int_contents=[1, 200]))]
            ),
            "beyond the range of INT8",
        ),
        (
            pb.ModelInferResponse(
                outputs=[output(contents=contents(fp32_contents=[1, 2]))], raw_output_contents=[bytes(8)]
            ),
            "both raw and typed",
        ),
        (
            pb.ModelInferResponse(
                outputs=[output(shape=[0]), output(shape=[0])], raw_output_contents=[b"", b""]
            ),
            "comes twice",
        ),
        (pb.ModelInferResponse(id="another"), "belongs to request 'another'"),
    ],
)
def test_an_answer_that_contradicts_itself_is_refused(message: Any, words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        CODEC.decode_infer(WireResponse(200, {}, message.SerializeToString()), Request("m", {}, id="r"))


def test_an_output_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(ProtocolError, match="lacks output 'z'"):
        answered(Answer.of({}), Request("m", {}, outputs=("z",)))


def test_numbers_beyond_64_bits_are_no_parameters() -> None:
    with pytest.raises(InvalidInputError, match="64 bits"):
        CODEC.infer(Request("m", {}, parameters={"n": 2**64}), None)


@pytest.mark.parametrize(
    ("code", "status", "kind"), [("UNAVAILABLE", 503, OverloadedError), ("INTERNAL", 500, ServerError)]
)
def test_an_error_tells_status_code_and_pause(code: str, status: int, kind: type[ServerError]) -> None:
    headers = {"grpc-status": code, "grpc-retry-pushback-ms": "1500"}
    with pytest.raises(kind, match="too much") as caught:
        CODEC.decode_infer(WireResponse(grpc_status.STATUS_OF[code], headers, b"too much"), Request("m", {}))
    assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (status, code, 1.5)


def test_a_server_without_a_repository_index_is_told_apart() -> None:
    with pytest.raises(ServerError, match="name the one you want with model="):
        CODEC.decode_models(WireResponse(501, {"grpc-status": "UNIMPLEMENTED"}, b""))


def test_every_status_goes_to_grpc_and_comes_back_as_the_same_kind() -> None:
    for status in (400, 401, 403, 404, 409, 429, 500, 501, 503, 504):
        assert grpc_status.STATUS_OF[grpc_status.status_code(status)] == status


# --- streams ------------------------------------------------------------------------------------------------


def streamed(body: bytes) -> Answer | None:
    return CODEC.decode_stream(WireResponse(200, {}, body), Request("m", {}))


def test_a_streams_message_holds_an_answer_an_error_or_its_end() -> None:
    answer = Answer.of({"y": np.arange(3, dtype=np.int32)}, model="m")
    came = streamed(oip_grpc.in_stream(joined(oip_grpc.format_infer(answer))))
    assert came is not None
    assert came.outputs["y"].tolist() == [0, 1, 2]
    with pytest.raises(ServerError, match="no such") as caught:
        streamed(
            pb.ModelStreamInferResponse(error_message="[StatusCode.NOT_FOUND] no such").SerializeToString()
        )
    assert caught.value.status == 404
    end = pb.ModelInferResponse(model_name="m")
    end.parameters["triton_final_response"].bool_param = True
    assert streamed(oip_grpc.in_stream(end.SerializeToString())) is None


# --- what servers do that the protocol does not say -----------------------------------------------------------


def test_states_of_mlservers_index_are_the_standards() -> None:
    index = pb.RepositoryIndexResponse()
    index.models.add(name="m", version="1", state="State.READY")
    index.models.add(name="n", state="State.UNAVAILABLE")
    response = WireResponse(200, {}, index.SerializeToString())
    assert [entry.state for entry in CODEC.decode_index(response)] == ["READY", "UNAVAILABLE"]
    assert CODEC.decode_models(response) == ["m"]


def test_raw_contents_may_stand_beside_typed_ones_that_are_empty() -> None:
    """MLServer sets them for every output."""
    message = pb.ModelInferResponse(outputs=[output(contents=contents())], raw_output_contents=[bytes(8)])
    assert message.outputs[0].HasField("contents")
    answer = CODEC.decode_infer(WireResponse(200, {}, message.SerializeToString()), Request("m", {}))
    assert answer.outputs["y"].tolist() == [0, 0]


def test_a_stream_of_bare_answers_is_read_too() -> None:
    """MLServer's ModelStreamInfer has no message around its answers: its model's name was taken for an error."""
    answer = Answer.of({"y": np.arange(3, dtype=np.int32)}, model="m", version="1")
    came = streamed(joined(oip_grpc.format_infer(answer)))
    assert came is not None
    assert (came.model, came.version, came.outputs["y"].tolist()) == ("m", "1", [0, 1, 2])
    contents = pb.ModelInferResponse(
        model_name="m", outputs=[output(contents=pb.InferTensorContents(fp32_contents=[1, 2]))]
    )
    came = streamed(contents.SerializeToString())
    assert came is not None
    assert came.outputs["y"].tolist() == [1, 2]


def test_a_server_that_can_not_stream_does_not_offer_it() -> None:
    with pytest.raises(NotOfferedError, match="streamed inference"):
        CODEC.decode_stream(
            WireResponse(501, {"grpc-status": "UNIMPLEMENTED"}, b"Method not found!"), Request("m", {})
        )


def test_free_ranks_and_optional_inputs_of_our_own_server_are_known() -> None:
    inputs = (
        TensorSpec("x", "FP32", None),
        TensorSpec("z", "FP32", (-1,), optional=True),
        TensorSpec("s", "FP32", ()),
    )
    metadata = ModelMetadata("m", inputs, (TensorSpec("y", "FP32", None),))
    body = oip_grpc.format_metadata(metadata)
    assert CODEC.decode_metadata(WireResponse(200, {}, body)).inputs == inputs
    told = pb.ModelMetadataResponse.FromString(body)
    assert list(told.inputs[0].shape) == [-1]  # for clients that know nothing of it


# --- harm ---------------------------------------------------------------------------------------------------

OUTPUTS = {
    "floats": np.array([[1.5, np.nan, -0.0]], np.float32),
    "text": np.array([b"a\0", b"", b"\xff"], object),
    "empty": np.zeros((0, 3), np.float64),
    "scalar": np.array(True),
}
REQUEST = Request("m", OUTPUTS, id="r1", parameters={"a": 1, "b": "x"})
ANSWER = joined(oip_grpc.format_infer(Answer.of(OUTPUTS, model="m", version="1", id="r1")))
METADATA = oip_grpc.format_metadata(
    ModelMetadata("m", (TensorSpec("x", "FP32", (-1, 3)),), (TensorSpec("y", "FP32", None),), "1", ("1",))
)
INDEX = pb.RepositoryIndexResponse(
    models=[pb.RepositoryIndexResponse.ModelIndex(name="m", version="1", state="READY")]
).SerializeToString()
REGION = bytes(range(64))
SHARED = Shared(
    "r", {}, {"floats": (8, 12), "text": None}, lambda offset, size: REGION[offset : offset + size]
)
IN_REGION = joined(
    oip_grpc.format_infer(
        Answer.of(OUTPUTS, model="m", id="r1"), {"floats": ("r", 8, 12)}, lambda *place: None
    )
)
READERS: dict[str, tuple[bytes, Any]] = {
    "answer in shared memory": (
        IN_REGION,
        lambda body: CODEC.decode_shared(WireResponse(200, {}, body), REQUEST, SHARED),
    ),
    "answer": (ANSWER, lambda body: CODEC.decode_infer(WireResponse(200, {}, body), REQUEST)),
    "stream": (
        oip_grpc.in_stream(ANSWER),
        lambda body: CODEC.decode_stream(WireResponse(200, {}, body), REQUEST),
    ),
    "request": (
        joined(CODEC.infer(REQUEST, None).body),
        lambda body: oip_grpc.parse_infer(body, {}),
    ),
    "metadata": (METADATA, lambda body: CODEC.decode_metadata(WireResponse(200, {}, body))),
    "index": (INDEX, lambda body: CODEC.decode_models(WireResponse(200, {}, body))),
    "ready": (
        pb.ServerReadyResponse(ready=True).SerializeToString(),
        lambda body: CODEC.decode_ready(WireResponse(200, {}, body)),
    ),
}


@pytest.mark.parametrize("what", READERS)
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_harm_is_one_of_our_errors(what: str, data: st.DataObject) -> None:
    body, read = READERS[what]
    read(body)
    with contextlib.suppress(ProtocolError, ServerError):
        read(data.draw(mutated(body)))


@pytest.mark.parametrize("size", range(len(ANSWER)))
def test_an_answer_cut_anywhere_is_noticed_or_lacks_outputs(size: int) -> None:
    request = Request("m", {}, id="r1", outputs=tuple(OUTPUTS))
    with pytest.raises(ProtocolError):
        CODEC.decode_infer(WireResponse(200, {}, ANSWER[:size]), request)
