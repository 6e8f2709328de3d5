"""The Profile API over gRPC: Report with the rules of the HTTP route, Watch that tells and resumes, a client that uses both."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import orjson
import pytest
from typer.testing import CliRunner

from mcp_client import MCPClient
from mcp_client._httpx import httpx
from mcp_client.cache.ttl import TTLPolicy
from mcp_client.config import Prefetch, Telemetry
from mcp_client.errors import (
    AuthenticationError,
    ConfigurationError,
    ConnectionFailedError,
    DeadlineExceededError,
    OverloadedError,
    RequestRejectedError,
)
from mcp_client.prefetch.profile import Profile
from mcp_client.protocols import profile_pb2 as pb
from mcp_client.telemetry import ProfileAPI, TelemetryPipe
from mcp_client.telemetry.events import uuid7
from mcp_client.telemetry.grpc_api import Change, GrpcProfileAPI
from mcp_client.telemetry.watch import Watcher
from mcp_profile import ProfileServer
from mcp_profile.access import Access
from mcp_profile.cli import app
from mcp_profile.ingest import MAX_EVENTS

POLICY = {"rules": [{"prefix": "llama3-70b", "ttl_s": 300, "max_ttl_s": 1800}], "default_ttl_s": 60}


@pytest.fixture
def server() -> Iterator[ProfileServer]:
    with ProfileServer(grpc_port=0) as running:
        yield running


@pytest.fixture
def api(server: ProfileServer) -> Iterator[GrpcProfileAPI]:
    api = GrpcProfileAPI(server.grpc_url)
    yield api
    api.close()


def _batch(*paths: str, batch_id: str = "", **more: Any) -> dict[str, Any]:
    events = [
        {
            "seq": n,
            "t": 1.7e9 + n,
            "session": "s",
            "path": path,
            "source": "server",
            "latency_ms": 2.0,
            "bytes": 7,
        }
        | more
        for n, path in enumerate(paths)
    ]
    return {"batch_id": batch_id or uuid7(), "client_id": "c", "sdk": "t", "events": events}


def _until(condition: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass in time"
        time.sleep(0.02)
    return found


def _put_policy(server: ProfileServer, policy: dict[str, Any] | None = None, **headers: str) -> int:
    response = httpx.put(f"{server.url}/v1/ttl-policy", json=policy or POLICY, headers=headers)
    assert response.status_code == 200, response.text
    return int(response.json()["version"])


# --- Report ---


def test_the_generated_module_is_that_of_the_proto_file(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is a development tool")
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"-I{root}",
        f"--python_out={tmp_path}",
        f"--pyi_out={tmp_path}",
    ]
    subprocess.run([*command, f"{root}/mcp_client/protocols/profile.proto"], check=True, timeout=60)
    made = tmp_path / "mcp_client" / "protocols" / "profile_pb2.py"
    (line,) = [line for line in made.read_text().splitlines() if "AddSerializedFile(" in line]
    raw = eval(line.partition("AddSerializedFile(")[2].removesuffix(")"))
    assert FileDescriptorProto.FromString(raw) == FileDescriptorProto.FromString(pb.DESCRIPTOR.serialized_pb)


def test_a_batch_counts_once_over_grpc_and_http_together(server: ProfileServer, api: GrpcProfileAPI) -> None:
    batch = _batch("/a", "/b")
    assert [api.report(batch).accepted for _ in range(2)] == [2, 0]
    assert ProfileAPI(server.url).report(batch).duplicates == 2
    over_http = _batch("/c")
    ProfileAPI(server.url).report(over_http)
    assert api.report(over_http).duplicates == 1
    stats = httpx.get(f"{server.url}/v1/stats").json()
    assert (stats["events"], stats["batches"]) == (3, 2)
    assert 'mcp_profile_events_total{result="accepted"} 3.0' in httpx.get(f"{server.url}/metrics").text


def test_what_is_stored_is_what_http_would_store(server: ProfileServer, api: GrpcProfileAPI) -> None:
    full = {
        "route": "/{x}",
        "fp": "f" * 32,
        "model": "m",
        "prefetch_id": "p",
        "outcome": "used",
        "source": "prefetch",
    }
    api.report(_batch("/a", **full))
    ProfileAPI(server.url).report(_batch("/a", **full))
    with server.store.read() as db:
        one, other = db.exec_driver_sql("SELECT * FROM events ORDER BY id").mappings().all()
    assert {**one, "id": 0} == {**other, "id": 0}


def test_a_bad_event_is_rejected_by_index(api: GrpcProfileAPI) -> None:
    batch = _batch("/a", "/b", "/c")
    batch["events"][1]["source"] = "moon"
    batch["events"][2]["t"] = float("nan")
    stream = pb.ReportRequest(**{**batch, "events": [pb.Event(**event) for event in batch["events"]]})
    with grpc.insecure_channel(api.url.removeprefix("grpc://")) as channel:
        report = channel.stream_unary(
            "/mcp.profile.v1.Profile/Report", pb.ReportRequest.SerializeToString, pb.ReportResponse.FromString
        )
        other = pb.ReportRequest(batch_id="other", client_id="c", events=stream.events[:1])
        answer = report(iter([stream, other, stream]), timeout=10)
    assert [(one.batch_id, one.accepted, one.duplicates) for one in answer.batches] == [
        (batch["batch_id"], 1, 0),
        ("other", 1, 0),
        (batch["batch_id"], 0, 1),
    ]
    first, _, again = answer.batches
    assert [bad.index for bad in first.rejected] == [1, 2]
    assert first.rejected == again.rejected
    assert "source must be one of" in first.rejected[0].error


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"batch_id": "", "client_id": "c", "events": []}, "batch_id must be"),
        ({"batch_id": "b", "client_id": "c", "events": [{}] * (MAX_EVENTS + 1)}, "at most 20000"),
    ],
)
def test_what_is_no_batch_is_refused(batch: dict[str, Any], said: str, api: GrpcProfileAPI) -> None:
    with pytest.raises(RequestRejectedError, match=said) as caught:
        api.report(batch)
    assert caught.value.code in ("not_a_batch", "too_large")


def test_keys_scopes_and_limits_are_those_of_http() -> None:
    with ProfileServer(grpc_port=0, max_events_per_s=1) as server:
        access = Access(server.store)
        writer = access.create(application="shop", scopes=["ingest"])
        reader = access.create(application="shop", scopes=["read"])
        with pytest.raises(AuthenticationError, match="Bearer"):
            GrpcProfileAPI(server.grpc_url).report(_batch("/a"))
        with pytest.raises(AuthenticationError, match="needs ingest"):
            GrpcProfileAPI(server.grpc_url, reader).report(_batch("/a"))
        with pytest.raises(AuthenticationError, match="needs read"):
            next(GrpcProfileAPI(server.grpc_url, writer).watch("", 0))
        api = GrpcProfileAPI(server.grpc_url, writer)
        assert api.report(_batch(*["/a"] * 100)).accepted == 100
        with pytest.raises(OverloadedError) as caught:
            api.report(_batch("/a"))
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s > 30
        assert server.store.stats(1)["events"] == 0  # applications are kept apart


# --- Watch ---


def test_watch_tells_what_one_does_not_have_and_then_what_changes(
    server: ProfileServer, api: GrpcProfileAPI
) -> None:
    api.report(_batch("/a", "/b"))
    stream = api.watch("", 0, min_interval_s=1, timeout_s=30)
    first = next(stream)
    assert first.profile is not None
    assert first.profile.paths["/a"] == {"/b": 1}
    assert _put_policy(server) == 1
    policy = next(stream).policy
    assert policy == TTLPolicy.parse({"version": 1, **POLICY})
    api.report(_batch("/b", "/c"))
    changed = next(stream)
    assert changed.profile is not None
    assert "/c" in changed.profile.keys
    # Resumed with what one has, nothing comes; with an older version, what has changed since.
    with pytest.raises(DeadlineExceededError):
        next(api.watch(changed.etag, 1, timeout_s=1))
    resumed = api.watch(changed.etag, 0, timeout_s=10)
    assert next(resumed) == Change(policy=policy)
    assert httpx.get(f"{server.url}/v1/profile").headers["etag"] == changed.etag


def test_a_change_made_by_another_process_is_told(tmp_path: Path) -> None:
    file = tmp_path / "db.sqlite"
    with ProfileServer(file, grpc_port=0) as server:
        stream = GrpcProfileAPI(server.grpc_url).watch(ProfileAPI(server.url).profile()[1], 0, timeout_s=20)
        (tmp_path / "policy.json").write_bytes(orjson.dumps(POLICY))
        result = CliRunner().invoke(app, ["policy", str(tmp_path / "policy.json"), "--db", str(file)])
        assert orjson.loads(result.output) == {"version": 1, **POLICY}
        change = next(stream)
        assert change.policy is not None
        assert change.policy.version == 1
        assert orjson.loads(CliRunner().invoke(app, ["policy", "--db", str(file)]).output)["version"] == 1


def test_a_revoked_key_is_told_nothing_more() -> None:
    with ProfileServer(grpc_port=0) as server:
        access = Access(server.store)
        admin, reader = access.create(scopes=["admin"]), access.create(scopes=["read"])
        stream = GrpcProfileAPI(server.grpc_url, reader).watch("", 0, timeout_s=20)
        assert next(stream).profile is not None
        access.revoke(2)
        _put_policy(server, Authorization=f"Bearer {admin}")
        with pytest.raises(AuthenticationError, match="revoked"):
            next(stream)


def test_many_watch_and_all_are_told(server: ProfileServer) -> None:
    apis = [GrpcProfileAPI(server.grpc_url) for _ in range(30)]
    streams = [api.watch("", 0, timeout_s=30) for api in apis]
    assert all(next(stream).profile for stream in streams)
    _put_policy(server)
    assert all(next(stream).policy for stream in streams)
    for api in apis:
        api.close()


# --- the client ---


class _Told:
    def __init__(self, url: str, http: str | None = None) -> None:
        self.profiles: list[Profile] = []
        self.policies: list[int] = []
        self.watcher = Watcher(
            GrpcProfileAPI(url, http=ProfileAPI(http) if http else None),
            on_profile=self.profiles.append,
            on_policy=lambda policy: self.policies.append(policy.version),
            min_interval_s=1.0,
        )
        self.watcher.start()


def test_a_watcher_resumes_after_the_server_was_away(tmp_path: Path) -> None:
    with ProfileServer(tmp_path / "db.sqlite", grpc_port=0) as server:
        _put_policy(server)
        told = _Told(server.grpc_url)
        _until(lambda: told.policies == [1] and len(told.profiles) == 1)
        server.stop()
        time.sleep(0.5)
        server.start()
        _put_policy(server)
        _until(lambda: told.policies == [1, 2])
        assert len(told.profiles) == 1  # it was the same: it is not sent again
        started = time.monotonic()
        told.watcher.close()
        assert time.monotonic() - started < 2


def test_where_grpc_does_not_get_through_http_does(server: ProfileServer) -> None:
    _put_policy(server)
    nowhere = "grpc://127.0.0.1:9"
    told = _Told(nowhere, server.url)
    _until(lambda: told.policies == [1] and told.profiles)
    told.watcher.close()
    api = GrpcProfileAPI(nowhere, http=ProfileAPI(server.url))
    assert api.report(_batch("/a")).accepted == 1
    api.close()
    with pytest.raises(ConnectionFailedError):
        GrpcProfileAPI(nowhere).report(_batch("/a"))


def test_a_client_reports_learns_and_obeys_over_grpc_alone(server: ProfileServer, affine_model: Path) -> None:
    from stub_server import StubServer

    GrpcProfileAPI(server.grpc_url).report(_batch(*["/home", "/cart"] * 5))
    with (
        StubServer(affine_model) as inference,
        MCPClient(
            inference.url, telemetry=Telemetry(server.grpc_url, interval_s=0.2), prefetch=Prefetch()
        ) as client,
    ):
        session = client.session("reader")
        session.infer({"x": [[1.0, 2.0, 3.0]]}, path="/home")
        predictor = client._prefetcher._predictor  # type: ignore[union-attr]
        _until(lambda: "/cart" in [found.path for found in predictor.predict("reader", 3)])
        _put_policy(server)
        _until(lambda: client.ttl_policy.version == 1)
        assert client.flush()
        assert client.stats()["telemetry"].sent >= 1
    requests = httpx.get(f"{server.url}/metrics").text
    assert 'route="/v1/profile"' not in requests  # nobody polled
    assert 'route="/v1/telemetry"' not in requests


def test_without_consent_nothing_is_watched(server: ProfileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    pipe = TelemetryPipe(Telemetry(server.grpc_url))
    pipe.record("s", "/a", "", b"", "m", "server", 1.0, 1)
    assert pipe.flush()
    pipe.close()
    assert server.store.stats(1)["events"] == 0


def test_urls_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="grpcs://"):
        Telemetry("ftp://host")
    with pytest.raises(ConfigurationError, match="http_url"):
        Telemetry("grpc://host:1", http_url="grpc://host:1")


# --- the policy over HTTP ---


def test_a_policy_is_checked_versioned_and_for_admins() -> None:
    with ProfileServer(api_key="master") as server:
        reader = Access(server.store).create(scopes=["read"])
        http = httpx.Client(base_url=server.url, headers={"Authorization": "Bearer master"})
        assert http.get("/v1/ttl-policy").json() == {"version": 0, "rules": [], "default_ttl_s": None}
        assert [http.put("/v1/ttl-policy", json=POLICY).json()["version"] for _ in range(2)] == [1, 2]
        answer = http.get("/v1/ttl-policy")
        assert answer.json() == {"version": 2, **POLICY}
        again = http.get("/v1/ttl-policy", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for body in (
            [],
            {"rules": 1},
            {"rules": [{"prefix": 1, "ttl_s": 1}]},
            {"rules": [{"prefix": "a"}]},
            {"rules": ["a"]},
        ):
            refused = http.put("/v1/ttl-policy", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "not_a_policy"), body
        assert (
            http.put("/v1/ttl-policy", content=b"{", headers={"Content-Type": "application/json"}).status_code
            == 400
        )
        assert http.get("/v1/ttl-policy").json()["version"] == 2
        forbidden = http.put("/v1/ttl-policy", json=POLICY, headers={"Authorization": f"Bearer {reader}"})
        assert forbidden.status_code == 403
        http.close()
