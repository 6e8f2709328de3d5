"""The management calls' codecs: both protocols say the same, and damaged answers are one of our errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.errors import InvalidInputError, NotFoundError, ProtocolError, ServerError
from mcp_client.management import STAGES, Duration, IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from mcp_client.protocols import WireResponse, management_grpc, management_http
from mcp_client.protocols import oip_pb2 as pb
from mcp_client.protocols.json_tensors import dumps, loads_object
from mcp_client.protocols.oip_grpc import OipGrpcCodec
from mcp_client.protocols.oip_http import OipHttpCodec
from mcp_client.tensors import DATATYPES, TensorSpec
from tests.protocols.mutations import mutated

HTTP, GRPC = OipHttpCodec(), OipGrpcCodec()
NAMES = st.text(st.characters(codec="utf-8"), max_size=6)
COUNTS = st.integers(0, 2**64 - 1)
SPECS = st.builds(
    TensorSpec,
    NAMES,
    st.sampled_from([name for name in DATATYPES if f"TYPE_{name}" in dict(pb.DataType.items())] + ["BYTES"]),
    st.lists(st.integers(-1, 9), max_size=3).map(tuple),
    st.booleans(),
)


def ok(body: bytes) -> WireResponse:
    return WireResponse(200, {}, body)


@given(st.lists(st.builds(IndexEntry, NAMES, NAMES, st.sampled_from(["READY", "UNAVAILABLE", ""]), NAMES)))
def test_an_index_goes_there_and_back(entries: list[IndexEntry]) -> None:
    assert HTTP.decode_index(ok(management_http.format_index(entries))) == entries
    assert GRPC.decode_index(ok(management_grpc.format_index(entries))) == entries


@given(
    st.builds(
        ModelConfig,
        name=NAMES,
        platform=NAMES,
        backend=NAMES,
        max_batch_size=st.integers(0, 64),
        inputs=st.lists(SPECS, max_size=3).map(tuple),
        outputs=st.lists(SPECS, max_size=2).map(
            lambda s: tuple(TensorSpec(o.name, o.datatype, o.shape) for o in s)
        ),
        decoupled=st.booleans(),
    )
)
def test_a_configuration_goes_there_and_back(config: ModelConfig) -> None:
    def without_extra(told: ModelConfig) -> dict[str, Any]:
        return {each.name: getattr(told, each.name) for each in fields(told) if each.name != "extra"}

    assert without_extra(HTTP.decode_config(ok(management_http.format_config(config)))) == without_extra(
        config
    )
    assert without_extra(GRPC.decode_config(ok(management_grpc.format_config(config)))) == without_extra(
        config
    )


def test_the_rest_of_a_configuration_has_tritons_names_and_numbers() -> None:
    message = pb.ModelConfig(name="m", max_batch_size=8)
    message.dynamic_batching.preferred_batch_size.extend([4, 8])
    message.dynamic_batching.max_queue_delay_microseconds = 2**40
    message.instance_group.add(count=2, kind=pb.ModelInstanceGroup.KIND_GPU, gpus=[0])
    message.parameters["key"].string_value = "value"
    message.output.add(name="y", data_type=pb.TYPE_FP32, dims=[3], label_filename="labels.txt")
    extra = GRPC.decode_config(ok(pb.ModelConfigResponse(config=message).SerializeToString())).extra
    assert extra["dynamic_batching"]["preferred_batch_size"] == [4, 8]
    assert extra["dynamic_batching"]["max_queue_delay_microseconds"] == 2**40
    assert extra["instance_group"] == [{"name": "", "count": 2, "gpus": [0], "kind": "KIND_GPU"}]
    assert extra["parameters"] == {"key": {"string_value": "value"}}
    assert "sequence_batching" not in extra


@given(COUNTS, COUNTS, st.dictionaries(st.sampled_from(STAGES), st.tuples(COUNTS, COUNTS)))
def test_statistics_are_the_same_over_both(last: int, count: int, stages: dict[str, tuple[int, int]]) -> None:
    document = {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "last_inference": last,
                "inference_count": count,
                "execution_count": count // 2,
                "inference_stats": {stage: {"count": n, "ns": ns} for stage, (n, ns) in stages.items()},
            }
        ]
    }
    (told,) = HTTP.decode_statistics(ok(dumps(document)))
    message = ParseDict(document, pb.ModelStatisticsResponse()).SerializeToString()
    assert GRPC.decode_statistics(ok(message)) == [told]
    assert told.last_inference == (last / 1000 if last else None)
    assert (told.inferences, told.executions) == (count, count // 2)
    for stage in STAGES:
        n, ns = stages.get(stage, (0, 0))
        assert getattr(told, stage) == Duration(n, ns / 1e9)


def test_a_server_that_says_little_is_understood() -> None:
    assert HTTP.decode_server(ok(b'{"name": "x"}')) == ServerInfo("x")
    assert HTTP.decode_statistics(ok(b'{"model_stats": [{"name": "m", "version": "1"}]}')) == [
        ModelStatistics("m", "1")
    ]
    assert HTTP.decode_index(ok(b'[{"name": "m"}]')) == [IndexEntry("m")]
    assert HTTP.decode_model_ready(ok(b"")) is True
    assert HTTP.decode_model_ready(ok(b'{"name": "m", "ready": false}')) is False  # KServe says no so
    assert HTTP.decode_config(ok(b'{"name": "m"}')) == ModelConfig("m")


def test_a_model_that_triton_has_no_statistics_of_is_not_there() -> None:
    """It answers 400 (seen with 2.51), where it answers 404 to any other question about such a model."""
    message = "requested model 'nope' is not available"
    answers = (
        (HTTP, WireResponse(400, {}, dumps({"error": message}))),
        (GRPC, WireResponse(400, {"grpc-status": "INVALID_ARGUMENT"}, message.encode())),
    )
    for codec, answer in answers:
        with pytest.raises(NotFoundError, match="'nope'"):
            codec.decode_statistics(answer)


def test_load_parameters_travel_as_triton_reads_them() -> None:
    files = {"1/model.onnx": b"\0\xff"}
    http = HTTP.load("m", {"backend": "onnxruntime"}, files)
    assert http.path == "/v2/repository/models/m/load"
    assert not http.repeatable
    parameters = loads_object(http.body[0], "the body")["parameters"]
    assert parameters == {"config": '{"backend": "onnxruntime"}', "file:1/model.onnx": "AP8="}
    grpc = pb.RepositoryModelLoadRequest.FromString(b"".join(GRPC.load("m", "{}", files).body))
    assert grpc.model_name == "m"
    assert grpc.parameters["config"].string_param == "{}"
    assert grpc.parameters["file:1/model.onnx"].bytes_param == b"\0\xff"
    unload = pb.RepositoryModelUnloadRequest.FromString(b"".join(GRPC.unload("m", True).body))
    assert unload.parameters["unload_dependents"].bool_param
    assert b"".join(HTTP.unload("m", True).body) == b'{"parameters":{"unload_dependents":true}}'
    with pytest.raises(InvalidInputError, match="JSON"):
        HTTP.load("m", {"x": object()}, {})


SPEC = TensorSpec("x", "FP32", (-1, 3))
CONFIG = ModelConfig(
    "m", "p", "b", 8, (SPEC,), (SPEC,), True, {"version_policy": {"latest": {"num_versions": 1}}}
)
INDEX = [IndexEntry("m", "1", "READY"), IndexEntry("m", "2", "UNAVAILABLE", "why")]
STATS = {"model_stats": [{"name": "m", "version": "1", "last_inference": 12, "inference_count": 3,
                          "inference_stats": {"success": {"count": 3, "ns": 1000}}}]}  # fmt: skip
SERVER = pb.ServerMetadataResponse(name="s", version="1", extensions=["a", "b"])
ANSWERS: dict[str, tuple[bytes, Callable[[WireResponse], object]]] = {
    "http server": (b'{"name":"s","version":"1","extensions":["a"]}', HTTP.decode_server),
    "http index": (management_http.format_index(INDEX), HTTP.decode_index),
    "http models": (management_http.format_index(INDEX), HTTP.decode_models),
    "http config": (management_http.format_config(CONFIG), HTTP.decode_config),
    "http statistics": (dumps(STATS), HTTP.decode_statistics),
    "http model ready": (b'{"name":"m","ready":true}', HTTP.decode_model_ready),
    "grpc server": (SERVER.SerializeToString(), GRPC.decode_server),
    "grpc index": (management_grpc.format_index(INDEX), GRPC.decode_index),
    "grpc models": (management_grpc.format_index(INDEX), GRPC.decode_models),
    "grpc config": (management_grpc.format_config(CONFIG), GRPC.decode_config),
    "grpc statistics": (
        ParseDict(STATS, pb.ModelStatisticsResponse()).SerializeToString(),
        GRPC.decode_statistics,
    ),
    "grpc live": (pb.ServerLiveResponse(live=True).SerializeToString(), GRPC.decode_live),
    "grpc ready": (pb.ServerReadyResponse(ready=True).SerializeToString(), GRPC.decode_ready),
    "grpc model ready": (pb.ModelReadyResponse(ready=True).SerializeToString(), GRPC.decode_model_ready),
}


@pytest.mark.parametrize("what", ANSWERS)
@settings(max_examples=300)
@given(data=st.data())
def test_a_harmed_answer_is_read_or_is_one_of_our_errors(what: str, data: st.DataObject) -> None:
    body, read = ANSWERS[what]
    read(ok(body))
    with contextlib.suppress(ProtocolError, ServerError):
        read(ok(data.draw(mutated(body))))
    status = data.draw(st.sampled_from([400, 404, 405, 500, 501, 503]))
    if what.rsplit(maxsplit=1)[-1] not in ("live", "ready"):
        with pytest.raises(ServerError):
            read(WireResponse(status, {}, data.draw(mutated(body))))


@pytest.mark.parametrize("what", [what for what in ANSWERS if what.startswith("http")])
def test_every_truncation_is_noticed(what: str) -> None:
    body, read = ANSWERS[what]
    for end in range(1 if "ready" in what else 0, len(body)):
        with pytest.raises(ProtocolError):
            read(ok(body[:end]))
