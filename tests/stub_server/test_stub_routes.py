"""mcp-server's routes, over real sockets: both protocols, their errors, their headers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client._httpx import httpx
from mcp_client.protocols import WireRequest, WireResponse
from mcp_client.protocols.http_common import response_hash
from mcp_client.protocols.mcp_v1 import McpV1Codec
from mcp_client.protocols.oip_http import OipHttpCodec
from mcp_client.request import Request
from mcp_client.result import Answer
from stub_server import StubServer
from tests import models
from tests.protocols.arrays import OIP_JSON_DATATYPES, same_bits
from tests.protocols.mutations import mutated

X = np.array([[0.1, 0.9, 0.4]], np.float32)
PROBS = X @ models.WEIGHTS + models.BIAS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """affine (versions 1, 2 and 10), add, and an identity of every datatype."""
    root = tmp_path_factory.mktemp("repository")
    models.repository(root, affine={"1": 1.0, "2": 2.0, "10": 10.0})
    models.add(root / "add.onnx")
    for datatype in models.IDENTITY_TYPES:
        models.identity(root / f"{datatype}.onnx", datatype, ("a", 3))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[StubServer]:
    with StubServer(folder, max_body_bytes=1_000_000) as running:
        yield running


@pytest.fixture(scope="module")
def single(affine_model: Path) -> Iterator[StubServer]:
    with StubServer(affine_model) as running:
        yield running


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client() as client:
        yield client


def send(http: httpx.Client, server: StubServer, wire: WireRequest) -> WireResponse:
    response = http.request(
        wire.method, server.url + wire.path, headers=wire.headers, content=b"".join(wire.body)
    )
    return WireResponse(
        response.status_code, {k.lower(): v for k, v in response.headers.items()}, response.content
    )


def infer(http: httpx.Client, server: StubServer, codec: Any, request: Request) -> Answer:
    return codec.decode_infer(send(http, server, codec.infer(request, None)), request)


def error(response: httpx.Response) -> tuple[int, str]:
    told = response.json()["error"]
    assert told["message"]
    assert told["request_id"] == response.headers["X-Request-Id"]
    return response.status_code, told["code"]


# --- MCP
# ---------------------------------------------------------------------------------------------------------


def test_the_curl_line_of_the_protocol(single: StubServer) -> None:
    line = ["curl", "-sS", f"{single.url}/v1/infer", "-d", '{"input": [0.1, 0.9, 0.4], "shape": [1, 3]}']
    answer = json.loads(subprocess.run(line, capture_output=True, check=True, timeout=30).stdout)
    assert answer.keys() == {"output", "shape", "datatype", "model", "version"}
    assert answer["shape"] == [1, 2]
    assert (answer["datatype"], answer["model"], answer["version"]) == ("FP32", "affine", "1")
    np.testing.assert_allclose(answer["output"], PROBS[0], rtol=1e-6)


@pytest.mark.parametrize(
    "codec", [McpV1Codec(), OipHttpCodec(), OipHttpCodec(binary=False)], ids=["mcp", "oip", "oip-json"]
)
def test_an_inference_with_everything_named(http: httpx.Client, server: StubServer, codec: Any) -> None:
    request = Request(
        "affine", {"x": X}, version="2", outputs=("probs",), id="r-1", timeout_ms=20_000, priority=1
    )
    answer = infer(http, server, codec, request)
    assert (answer.model, answer.version, answer.id) == ("affine", "2", "r-1")
    assert answer.digest.startswith("sha256:")
    np.testing.assert_allclose(answer.outputs["probs"], 2 * PROBS, rtol=1e-6)


@pytest.mark.parametrize("datatype", models.IDENTITY_TYPES)
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_every_datatype_through_every_form(
    http: httpx.Client, server: StubServer, datatype: str, rows: int
) -> None:
    codecs: list[Any] = [McpV1Codec(), OipHttpCodec()]
    if datatype in (*OIP_JSON_DATATYPES, "BYTES"):
        codecs.append(OipHttpCodec(binary=False))
    array = _sample(datatype, rows)
    for codec in codecs:
        answer = infer(http, server, codec, Request(datatype, {"x": array}))
        assert same_bits(answer.outputs["y"], array), codec


def _sample(datatype: str, rows: int) -> Any:
    from mcp_client.tensors import dtype_of

    if datatype == "BYTES":
        return np.array([[b"a", b"", "Grüße".encode()]] * rows, object).reshape(rows, 3)
    dtype = dtype_of(datatype)
    if datatype == "BOOL":
        row: list[Any] = [True, False, True]
    elif dtype.kind in "iu":
        row = [np.iinfo(dtype).min, np.iinfo(dtype).max, 7]
    else:
        row = [-0.0, 1.5, 96.0 if datatype.startswith("FP8") else np.inf]
    return np.array([row] * rows, dtype).reshape(rows, 3)


def test_outputs_come_as_they_were_asked_for(http: httpx.Client, server: StubServer) -> None:
    inputs = {"a": np.float32([1, 2]), "b": np.float32([10, 20])}
    for codec in (McpV1Codec(), OipHttpCodec()):
        both = infer(http, server, codec, Request("add", inputs))
        assert {name: array.tolist() for name, array in both.outputs.items()} == {
            "sum": [11, 22],
            "difference": [-9, -18],
        }
        one = infer(http, server, codec, Request("add", inputs, outputs=("difference",)))
        assert list(one.outputs) == ["difference"]
        turned = infer(http, server, codec, Request("add", inputs, outputs=("difference", "sum")))
        assert turned.outputs["sum"].tolist() == [11, 22]


def test_the_newest_version_answers_unless_another_is_asked_for(
    http: httpx.Client, server: StubServer
) -> None:
    for codec in (McpV1Codec(), OipHttpCodec()):
        assert infer(http, server, codec, Request("affine", {"x": X})).version == "10"
        assert infer(http, server, codec, Request("affine", {"x": X}, version="1")).version == "1"


def test_the_headers_of_an_answer(http: httpx.Client, server: StubServer) -> None:
    wire = McpV1Codec().infer(Request("affine", {"x": X}, id="my id"), None)
    response = send(http, server, wire)
    headers = response.headers
    assert headers["x-request-id"] == wire.headers["X-Request-Id"]
    assert (headers["x-model-id"], headers["x-model-version"]) == ("affine", "10")
    assert headers["cache-control"] == "private"
    etag = response_hash([response.body], content_type=headers["content-type"], model_id="affine")
    assert headers["etag"] == f'"{etag}"'
    stages = dict(stage.split(";dur=") for stage in headers["server-timing"].split(", "))
    assert stages.keys() == {"queue", "compute"}
    assert all(float(ms) >= 0 for ms in stages.values())


def test_an_answer_within_a_sequence_must_not_be_stored(http: httpx.Client, server: StubServer) -> None:
    request = Request("affine", {"x": X}, parameters={"sequence_id": 1})
    for codec in (McpV1Codec(), OipHttpCodec()):
        assert infer(http, server, codec, request).no_store


def test_a_request_without_an_id_gets_one(http: httpx.Client, server: StubServer) -> None:
    ids = {http.get(f"{server.url}/v1/models").headers["X-Request-Id"] for _ in range(3)}
    assert len(ids) == 3


TENSOR = {"data": [1, 2, 3], "shape": [1, 3]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"input": [1, 2, 3]}, (400, "model_required")),
        ({"model": "nope", "inputs": {"x": TENSOR}}, (404, "model_not_found")),
        ({"model": "affine", "version": "3", "inputs": {"x": TENSOR}}, (404, "version_not_found")),
        ({"model": "affine", "inputs": {"z": TENSOR}}, (400, "unknown_input")),
        ({"model": "add", "inputs": {"a": TENSOR}}, (400, "missing_input")),
        ({"model": "affine", "inputs": {"x": {"data": [1], "shape": [1, 1]}}}, (400, "shape_mismatch")),
        ({"model": "affine", "inputs": {"x": {"data": [1], "shape": [1, 3]}}}, (400, "shape_mismatch")),
        ({"model": "affine", "inputs": {"x": {**TENSOR, "shape": [3]}}}, (400, "shape_mismatch")),
        ({"model": "affine", "inputs": {"x": {**TENSOR, "datatype": "INT64"}}}, (400, "datatype_mismatch")),
        ({"model": "affine", "inputs": {"x": TENSOR}, "outputs": ["y"]}, (400, "unknown_output")),
        ({"model": "add", "input": [1, 2, 3]}, (400, "full_form_needed")),
        ({"model": "affine"}, (400, "malformed_request")),
        ({"model": "affine", "inputs": {"x": TENSOR}, "timeout_ms": 0}, (504, "deadline_exceeded")),
    ],
)
def test_mcp_errors_say_what_is_wrong(
    http: httpx.Client, server: StubServer, body: Any, expected: tuple[int, str]
) -> None:
    assert error(http.post(f"{server.url}/v1/infer", json=body)) == expected


def test_a_shape_error_says_what_was_expected_and_what_came(http: httpx.Client, single: StubServer) -> None:
    response = http.post(f"{single.url}/v1/infer", json={"input": [1, 2, 3, 4], "shape": [1, 4]})
    message = response.json()["error"]["message"]
    assert "'x'" in message
    assert "[-1, 3]" in message
    assert "[1, 4]" in message


def test_oip_errors_are_plain_strings_for_other_clients(http: httpx.Client, server: StubServer) -> None:
    response = http.post(
        f"{server.url}/v2/models/nope/infer", json={"inputs": [{"name": "x", **TENSOR, "datatype": "FP32"}]}
    )
    assert response.status_code == 404
    assert "'nope'" in response.json()["error"]
    assert response.json()["code"] == "model_not_found"


def test_json_can_not_carry_an_fp16_output_in_oip(http: httpx.Client, server: StubServer) -> None:
    wire = OipHttpCodec().infer(Request("FP16", {"x": np.ones((1, 3), np.float16)}), None)
    plain = wire.body[0].replace(b'"binary_data_output":true', b'"binary_data_output":false').rstrip()
    padded = plain.ljust(len(wire.body[0]))
    response = http.post(
        server.url + wire.path, headers=wire.headers, content=padded + b"".join(wire.body[1:])
    )
    assert (response.status_code, response.json()["code"]) == (400, "binary_only")


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nope", (404, "route_not_found")),
        ("GET", "/v1/infer", (405, "method_not_allowed")),
        ("GET", "/v1/models/nope", (404, "model_not_found")),
        ("GET", "/v1/models/affine?version=3", (404, "version_not_found")),
        ("GET", "/v1/models/nope/file", (404, "model_not_found")),
        ("GET", "/v1/models/affine/file?name=other", (404, "file_not_found")),
    ],
)
def test_every_route_answers_with_the_envelope(
    http: httpx.Client, server: StubServer, method: str, path: str, expected: tuple[int, str]
) -> None:
    assert error(http.request(method, server.url + path)) == expected


def test_a_body_over_the_limit_is_refused_without_reading_it(http: httpx.Client, server: StubServer) -> None:
    assert error(http.post(f"{server.url}/v1/infer", content=b" " * 1_000_001)) == (413, "body_too_large")

    def chunks() -> Iterator[bytes]:  # no Content-Length
        for _ in range(20):
            yield b" " * 100_000

    assert http.post(f"{server.url}/v1/infer", content=chunks()).status_code == 413


def test_a_body_compressed_in_an_unknown_way_is_refused(http: httpx.Client, server: StubServer) -> None:
    response = http.post(f"{server.url}/v1/infer", content=b"x", headers={"Content-Encoding": "br"})
    assert error(response) == (415, "unsupported_encoding")


def test_a_deadline_that_passes_before_the_model_runs_is_a_504(
    affine_model: Path, http: httpx.Client
) -> None:
    with StubServer(affine_model, latency_ms=10_000) as slow:
        for codec in (McpV1Codec(), OipHttpCodec()):
            response = send(http, slow, codec.infer(Request("affine", {"x": X}, timeout_ms=20), None))
            assert response.status == 504
            assert b"deadline" in response.body


def test_a_bug_in_the_server_is_told_without_its_insides(affine_model: Path, http: httpx.Client) -> None:
    with StubServer(affine_model) as server:

        def broken() -> tuple[bytes, str]:
            raise RuntimeError("insides")

        server.metrics.exposition = broken  # type: ignore[method-assign]
        response = http.get(f"{server.url}/metrics")
    assert error(response) == (500, "internal")
    assert "insides" not in response.text


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_body_makes_the_server_fail(server: StubServer, http: httpx.Client, data: st.DataObject) -> None:
    codec = data.draw(st.sampled_from([McpV1Codec(), OipHttpCodec()]))
    wire = codec.infer(Request("affine", {"x": X}, outputs=("probs",), priority=1, timeout_ms=9000), None)
    body = data.draw(mutated(b"".join(wire.body)))
    response = http.post(server.url + wire.path, headers=wire.headers, content=body)
    assert response.status_code in (200, 400, 404, 504), response.text


# --- what the server says of itself
# ----------------------------------------------------------------------------------


def test_health(http: httpx.Client, server: StubServer) -> None:
    for path in ("/v1/health/live", "/v1/health/ready", "/v2/health/live", "/v2/health/ready"):
        assert http.get(server.url + path).status_code == 200


@pytest.mark.parametrize("codec", [McpV1Codec(), OipHttpCodec()], ids=["mcp", "oip"])
def test_models_and_their_metadata(http: httpx.Client, server: StubServer, codec: Any) -> None:
    names = codec.decode_models(send(http, server, codec.models()))
    assert names == sorted(["affine", "add", *models.IDENTITY_TYPES])
    newest = codec.decode_metadata(send(http, server, codec.metadata("affine", "")))
    assert newest.versions == ("1", "2", "10")
    (spec,) = newest.inputs
    assert (spec.name, spec.datatype, spec.shape) == ("x", "FP32", (-1, 3))
    assert newest.outputs[0].name == "probs"
    older = codec.decode_metadata(send(http, server, codec.metadata("affine", "1")))
    assert older.digest.startswith("sha256:")
    assert older.digest != newest.digest


def test_the_server_offers_the_binary_extension(http: httpx.Client, server: StubServer) -> None:
    assert OipHttpCodec.offers_binary(send(http, server, OipHttpCodec().server()))


def test_oip_statistics_count_what_happened(affine_model: Path, http: httpx.Client) -> None:
    with StubServer(affine_model) as server:
        for _ in range(3):
            infer(http, server, OipHttpCodec(), Request("affine", {"x": X}))
        http.post(f"{server.url}/v1/infer", json={"input": [1], "shape": [1, 1]})
        (stats,) = http.get(f"{server.url}/v2/models/affine/stats").json()["model_stats"]
    assert (stats["name"], stats["version"], stats["inference_count"]) == ("affine", "1", 3)
    assert stats["inference_stats"]["success"]["count"] == 3
    assert stats["inference_stats"]["fail"]["count"] == 1


def test_prefetches_are_counted_apart(affine_model: Path, http: httpx.Client) -> None:
    with StubServer(affine_model) as server:
        for purpose in ("demand", "demand", "prefetch"):
            infer(http, server, McpV1Codec(), Request("affine", {"x": X}, purpose=purpose))  # type: ignore[arg-type]
        assert server.received == {"demand": 2, "prefetch": 1}
        text = http.get(f"{server.url}/metrics").text
    assert (
        'mcp_inferences_total{model="affine",outcome="ok",protocol="mcp",purpose="prefetch",version="1"} 1.0'
        in text
    )
    assert 'mcp_requests_total{endpoint="mcp_infer",status="200"} 3.0' in text


# --- the repository
# --------------------------------------------------------------------------------------------------


def test_models_are_unloaded_and_loaded(tmp_path: Path, http: httpx.Client) -> None:
    models.repository(tmp_path, m={"1": 1.0})
    request = Request("m", {"x": X})
    with StubServer(tmp_path) as server:
        index, control = f"{server.url}/v2/repository/index", f"{server.url}/v2/repository/models/m"
        assert http.post(f"{control}/unload").status_code == 200
        (entry,) = http.post(index).json()
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", "unloaded")
        assert http.post(index, json={"ready": True}).json() == []
        assert http.get(f"{server.url}/v1/health/ready").status_code == 503
        assert send(http, server, McpV1Codec().infer(request, None)).status == 503
        models.affine(tmp_path / "m" / "2" / "model.onnx", scale=2.0)
        assert http.post(f"{control}/load").status_code == 200
        assert infer(http, server, McpV1Codec(), request).version == "2"
        assert http.post(f"{server.url}/v2/repository/models/other/load").status_code == 404


def test_a_damaged_model_in_a_folder_costs_only_itself(tmp_path: Path, http: httpx.Client) -> None:
    models.affine(tmp_path / "good.onnx")
    (tmp_path / "bad.onnx").write_bytes(b"not a model")
    with StubServer(tmp_path) as server:
        states = {entry["name"]: entry for entry in http.post(f"{server.url}/v2/repository/index").json()}
        assert states["good"]["state"] == "READY"
        assert states["bad"]["state"] == "UNAVAILABLE"
        assert "bad.onnx" in states["bad"]["reason"]
        assert infer(http, server, McpV1Codec(), Request("good", {"x": X})).model == "good"
        assert error(http.get(f"{server.url}/v1/models/bad")) == (503, "model_unavailable")


# --- many at once
# ----------------------------------------------------------------------------------------------------


def test_many_callers_get_their_own_answers(http: httpx.Client, server: StubServer) -> None:
    def call(number: int) -> bool:
        array = np.full((2, 3), number, np.int64)
        codec: Any = McpV1Codec() if number % 2 else OipHttpCodec()
        answer = infer(http, server, codec, Request("INT64", {"x": array}, id=str(number)))
        return same_bits(answer.outputs["y"], array)

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(call, range(300)))


def test_a_slow_inference_does_not_hold_up_the_others(affine_model: Path, http: httpx.Client) -> None:
    with StubServer(affine_model, latency_ms=60_000) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(
            http.post, f"{server.url}/v1/infer", json={"input": [1, 2, 3], "shape": [1, 3]}, timeout=60
        )
        assert http.get(f"{server.url}/v1/health/live", timeout=5).status_code == 200
        assert not slow.done()
        server.kill()
        with pytest.raises(httpx.TransportError):
            slow.result()


def test_the_fixture_for_users_own_tests(
    stub_server: Callable[..., StubServer], affine_model: Path, http: httpx.Client
) -> None:
    one, two = stub_server(affine_model), stub_server(affine_model, error_rate=1.0)
    body = {"input": [1, 2, 3], "shape": [1, 3]}
    assert http.post(f"{one.url}/v1/infer", json=body).status_code == 200
    assert error(http.post(f"{two.url}/v1/infer", json=body)) == (503, "injected_fault")
