"""Calls beside plain tensors: errors, descriptions, management, streams, what goes along with a request."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest

from mcp_client import (
    AsyncMCPClient,
    DeadlineExceededError,
    InvalidInputError,
    MCPClient,
    NotFoundError,
    RequestRejectedError,
    ServerError,
)
from tests.peers.conftest import Peer

X = np.array([1.0, 2.0, 3.0], np.float32)
ADD = {"a": X, "b": X}


# --- errors -------------------------------------------------------------------------------------------------


def test_unknown_model(client: MCPClient) -> None:
    """A model that is not there: `NotFoundError`."""
    with pytest.raises(NotFoundError, match="nobody"):
        client.infer({"x": X}, model="nobody")


def test_unknown_version(client: MCPClient) -> None:
    """A version that is not there: `NotFoundError`."""
    with pytest.raises(NotFoundError):
        client.infer(ADD, model="add", version="77")


def test_model_error(client: MCPClient) -> None:
    """A model that fails: a `ServerError` with its words."""
    with pytest.raises(ServerError, match=r"always fails|out of data bounds") as caught:
        client.infer({"x": X}, model="fail")
    assert caught.value.request_id
    assert caught.value.status in (400, 500)


def test_wrong_inputs(client: MCPClient) -> None:
    """Inputs that the model's description rules out: told before anything is sent."""
    for wrong in (
        {"a": X},
        {"a": X, "c": X},
        {"a": X, "b": X.astype(np.float64)},
        {"a": X, "b": X.reshape(1, 3, 1)},
    ):
        with pytest.raises(InvalidInputError):
            client.infer(wrong, model="add")


def test_refused_inputs(peer: Peer, client: MCPClient) -> None:
    """Inputs that only the model finds wrong: an error of its server."""
    with pytest.raises(ServerError) as caught:
        client.infer({"a": X, "b": X[:2]}, model="add")
    assert str(caught.value).strip()


def test_unknown_output(client: MCPClient) -> None:
    """An output that is not there: an error before anything is sent, or the server's."""
    with pytest.raises((InvalidInputError, RequestRejectedError)):
        client.infer(ADD, model="add", outputs=["nothing"])


def test_deadline(peer: Peer, client: MCPClient) -> None:
    """The deadline holds while a model computes, and the client goes on."""
    client.metadata("slow")
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.infer({"x": X}, model="slow", timeout=0.3)
    assert time.monotonic() - started < 2
    assert client.infer(ADD, model="add")["sum"].ravel().tolist() == [2, 4, 6]


# --- what servers say of themselves -------------------------------------------------------------------------


def test_metadata(client: MCPClient) -> None:
    """`metadata()`: names, datatypes and shapes of inputs and outputs."""
    told = client.metadata("add")
    assert told.name == "add"
    assert [(t.name, t.datatype, t.shape) for t in told.inputs] == [
        ("a", "FP32", (-1,)),
        ("b", "FP32", (-1,)),
    ]
    assert [(t.name, t.datatype) for t in told.outputs] == [("sum", "FP32"), ("difference", "FP32")]


def test_server(peer: Peer, client: MCPClient) -> None:
    """`server()`: name and version."""
    told = client.server()
    assert told.name == peer.name
    assert told.version


def test_health(client: MCPClient) -> None:
    """`live()`, `ready()`, `ready(model=…)`."""
    assert client.live(timeout=10)
    assert client.ready(timeout=10)
    assert client.ready(timeout=10, model="add")
    assert not client.ready(timeout=10, model="nobody")


def test_models(client: MCPClient) -> None:
    """`models()`: the names of all models."""
    names = client.models()
    assert {"add", "fail", "slow", "spare"} <= set(names)
    assert len(names) == len(set(names))


def test_index(client: MCPClient) -> None:
    """`index()`: model versions and their states."""
    (entry,) = [entry for entry in client.index() if entry.name == "add"]
    assert entry.version == "1"
    assert entry.state == "READY"


def test_config(client: MCPClient) -> None:
    """`config()`: a model's configuration."""
    told = client.config("add")
    assert told.name == "add"
    assert [spec.name for spec in told.inputs] == ["a", "b"]
    assert not told.decoupled


def test_statistics(client: MCPClient) -> None:
    """`statistics()`: counts and times."""
    (before,) = client.statistics("add")
    for _ in range(3):
        client.infer(ADD, model="add")
    (after,) = client.statistics("add")
    assert after.inferences - before.inferences == 3
    assert after.success.count - before.success.count == 3
    assert after.success.seconds > before.success.seconds
    assert after.last_inference is not None
    assert abs(after.last_inference - time.time()) < 60


def test_unload_and_load(peer: Peer, client: MCPClient) -> None:
    """`unload()` and `load()`."""
    client.load("spare")
    assert client.infer({"x": X}, model="spare")["y"].tolist() == X.tolist()
    client.unload("spare")
    give_up = time.monotonic() + 20
    while client.ready(timeout=10, model="spare") and time.monotonic() < give_up:  # Triton lets it end first
        time.sleep(0.05)
    with pytest.raises(ServerError):
        client.infer({"x": X}, model="spare")
    client.load("spare")
    assert client.infer({"x": X}, model="spare")["y"].tolist() == X.tolist()


# --- what goes along with a request -------------------------------------------------------------------------


def told_by(client: MCPClient, **call: Any) -> dict[str, Any]:
    (text,) = client.infer({"x": X}, model="echo", **call)["told"].ravel().tolist()
    told: dict[str, Any] = json.loads(text)
    return told


def test_request_id(client: MCPClient) -> None:
    """A request id reaches the model."""
    assert told_by(client, request_id="order-66")["id"] == "order-66"


def test_parameters(client: MCPClient) -> None:
    """Parameters reach the model: text, whole numbers, booleans."""
    parameters = {"word": "é", "whole": 2**40, "yes": True, "no": False}
    came = told_by(client, parameters=parameters)["parameters"]
    assert {name: came.get(name) for name in parameters} == parameters


def test_headers(client: MCPClient) -> None:
    """Headers of a call reach the model."""
    came = {
        name.lower(): value
        for name, value in told_by(client, headers={"X-Test-Color": "green"})["headers"].items()
    }
    assert came.get("x-test-color") == "green"


def test_priority_and_timeout(client: MCPClient) -> None:
    """`priority` and a server-side `timeout` are taken."""
    result = client.infer(ADD, model="add", priority=1, parameters={"timeout": 5_000_000})
    assert result["sum"].ravel().tolist() == [2, 4, 6]


def test_sequence(client: MCPClient) -> None:
    """Sequences: `sequence_id`, `sequence_start`, `sequence_end`."""

    def step(number: int, sequence: int, **marks: bool) -> int:
        x = np.array([[number]], np.int32)
        total = client.infer({"x": x}, model="sequence", parameters={"sequence_id": sequence, **marks})[
            "total"
        ]
        return int(total.ravel()[0])

    assert step(1, 7, sequence_start=True) == 1
    assert step(10, 8, sequence_start=True) == 10
    assert step(2, 7) == 3
    assert step(20, 8, sequence_end=True) == 30
    assert step(3, 7, sequence_end=True) == 6


def test_classification(peer: Peer, client: MCPClient) -> None:
    """Classification outputs."""
    scores = np.array([0.1, 0.7, 0.2], np.float32)
    best = client.infer({"x": scores}, model=peer.identity("FP32", 1), outputs={"y": 2}).classes()
    assert [(each.index, round(each.score, 3)) for each in best] == [(1, 0.7), (2, 0.2)]


def test_compression(peer: Peer) -> None:
    """`compression="gzip"` of requests and answers."""
    x = np.zeros(100_000, np.float32)
    with peer.client(compression="gzip") as client:
        assert client.infer({"x": x}, model=peer.identity("FP32", 1))["y"].tobytes() == x.tobytes()


# --- streams ------------------------------------------------------------------------------------------------


def test_stream_of_one(peer: Peer, client: MCPClient) -> None:
    """`stream()` of a model that answers once."""
    answers = list(client.stream({"x": X}, model=peer.identity("FP32", 1)))
    assert [answer["y"].tolist() for answer in answers] == [X.tolist()]


REPEATED = np.array([3, 1, 4, 1, 5], np.int32)


def test_decoupled(client: MCPClient) -> None:
    """`stream()` of a decoupled model: any number of answers."""
    answers = list(client.stream({"x": REPEATED}, model="repeat"))
    assert [int(answer["y"].ravel()[0]) for answer in answers] == REPEATED.tolist()


def test_no_answer_at_all(client: MCPClient) -> None:
    """`stream()` of a decoupled model that answers nothing."""
    assert list(client.stream({"x": REPEATED[:0]}, model="repeat")) == []


def test_error_midway(client: MCPClient) -> None:
    """An error in the middle of a stream: what came before it was handed out."""
    answers = client.stream({"x": np.array([1, 2, -1, 3], np.int32)}, model="repeat")
    came = [int(next(answers)["y"].ravel()[0]) for _ in range(2)]
    with pytest.raises(ServerError, match="no negative numbers"):
        next(answers)
    assert came == [1, 2]


def test_stream_left_early(client: MCPClient) -> None:
    """A stream that is left early is cancelled, and the client goes on."""
    for answer in client.stream({"x": np.ones(200, np.int32)}, model="repeat"):
        assert int(answer["y"].ravel()[0]) == 1
        break
    assert client.infer(ADD, model="add")["sum"].ravel().tolist() == [2, 4, 6]


def test_stream_asyncio(peer: Peer) -> None:
    """`stream()` with asyncio."""
    import asyncio

    async def go() -> list[int]:
        async with peer.aio() as client:
            assert isinstance(client, AsyncMCPClient)
            return [
                int(answer["y"].ravel()[0]) async for answer in client.stream({"x": REPEATED}, model="repeat")
            ]

    assert asyncio.run(go()) == REPEATED.tolist()
