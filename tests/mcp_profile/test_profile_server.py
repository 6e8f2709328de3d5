"""The Profile API over a real socket: PROTOCOL.md section 4, and what it must not do."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgpack
import orjson
import pytest
import zstandard

from mcp_client._httpx import httpx
from mcp_client.errors import (
    AuthenticationError,
    ConnectionFailedError,
    DeadlineExceededError,
    OverloadedError,
)
from mcp_client.prefetch.profile import SEPARATOR, Profile
from mcp_client.telemetry import ProfileAPI
from mcp_client.telemetry.events import uuid7
from mcp_profile import ProfileServer
from mcp_profile.app import MSGPACK
from mcp_profile.ingest import MAX_BODY_BYTES, MAX_EVENTS
from mcp_profile.limits import RateLimit


@pytest.fixture
def server() -> Iterator[ProfileServer]:
    with ProfileServer() as running:
        yield running


@pytest.fixture
def http(server: ProfileServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def _event(seq: int, path: str = "/a", session: str = "s", **more: Any) -> dict[str, Any]:
    return {
        "seq": seq,
        "t": 1.7e9 + seq,
        "session": session,
        "path": path,
        "source": "server",
        "latency_ms": 2.0,
    } | more


def _batch(*events: dict[str, Any], batch_id: str = "", client_id: str = "c") -> dict[str, Any]:
    return {
        "batch_id": batch_id or uuid7(),
        "client_id": client_id,
        "sdk": "t",
        "sent_at": "",
        "events": list(events),
    }


def _walk(*paths: str, session: str = "s", start: int = 0) -> dict[str, Any]:
    return _batch(*(_event(start + place, path, session) for place, path in enumerate(paths)))


def test_a_batch_is_accepted_and_counted_once_whenever_it_comes_again(
    server: ProfileServer, http: httpx.Client
) -> None:
    batch = _batch(_event(1), _event(2))
    first = http.post("/v1/telemetry", json=batch)
    assert (first.status_code, first.json()) == (202, {"accepted": 2, "duplicates": 0})
    assert http.post("/v1/telemetry", json=batch).json() == {"accepted": 0, "duplicates": 2}
    server.stop()
    server.start()  # the same port, the same database
    again = http.post("/v1/telemetry", json=batch)
    assert (again.status_code, again.json()) == (202, {"accepted": 0, "duplicates": 2})
    assert http.get("/v1/stats").json()["events"] == 2


def test_of_many_that_bring_a_batch_at_once_one_counts(server: ProfileServer) -> None:
    batches = [_batch(*(_event(n) for n in range(20))) for _ in range(5)]
    barrier = threading.Barrier(20)

    def bring(number: int) -> int:
        barrier.wait(10)
        return ProfileAPI(server.url).report(batches[number % 5]).accepted

    with ThreadPoolExecutor(20) as pool:
        accepted = list(pool.map(bring, range(20)))
    assert sorted(accepted) == [0] * 15 + [20] * 5
    assert httpx.get(server.url + "/v1/stats").json()["events"] == 100


def test_two_servers_on_one_database_count_a_batch_once(tmp_path: Path) -> None:
    batch = _batch(_event(1))
    with ProfileServer(tmp_path / "db.sqlite") as one, ProfileServer(tmp_path / "db.sqlite") as other:
        reports = [ProfileAPI(server.url).report(batch) for server in (one, other, one)]
        assert [report.accepted for report in reports] == [1, 0, 0]


def test_a_bad_event_is_rejected_by_index_and_again_when_the_batch_comes_again(server: ProfileServer) -> None:
    batch = _batch(_event(1), _event(2, source="moon"), _event(3))
    api = ProfileAPI(server.url)
    first, second = api.report(batch), api.report(batch)
    assert (first.accepted, second.accepted, second.duplicates) == (2, 0, 2)
    assert first.rejected == second.rejected
    assert first.rejected[0][0] == 1
    api.close()


@pytest.mark.parametrize("encoding", ["", "gzip", "zstd"])
def test_every_encoding_is_taken(encoding: str, http: httpx.Client) -> None:
    body = orjson.dumps(_batch(_event(1)))
    packed = {"": body, "gzip": gzip.compress(body), "zstd": zstandard.compress(body)}[encoding]
    headers = {"Content-Type": "application/json; charset=utf-8", "Content-Encoding": encoding}
    assert http.post("/v1/telemetry", content=packed, headers=headers).json()["accepted"] == 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", {}, 400),
        (b"[]", {}, 422),
        (b"{}", {"Content-Type": "text/plain"}, 415),
        (b"{}", {"Content-Encoding": "br"}, 415),
        (b"{}", {"Content-Encoding": "gzip"}, 400),
        (b"x" * (MAX_BODY_BYTES + 1), {}, 413),
        (gzip.compress(b"0" * (1 << 25)), {"Content-Encoding": "gzip"}, 413),
        (orjson.dumps(_batch(*[{}] * (MAX_EVENTS + 1))), {}, 413),
    ],
)
def test_errors_have_a_code_a_message_and_the_request_id(
    content: bytes, headers: dict[str, str], status: int, http: httpx.Client
) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": "r-1"} | headers
    answer = http.post("/v1/telemetry", content=content, headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"]
    assert len(error["message"]) > 10
    assert error["request_id"] == answer.headers["x-request-id"] == "r-1"
    assert ("limits" in answer.json()) == (status == 413)


def test_a_body_of_unknown_length_is_cut_off_at_the_limit(http: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(2 * MAX_BODY_BYTES // 65536):
            yield b"0" * 65536

    answer = http.post("/v1/telemetry", content=endless(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_unknown_routes_and_methods_are_told_alike(http: httpx.Client) -> None:
    assert http.get("/v2/telemetry").json()["error"]["code"] == "not_found"
    assert http.get("/v1/telemetry").status_code == 405
    assert http.get("/v1/paths", params={"limit": 0}).status_code == 422


def test_health_says_so(http: httpx.Client) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}


def test_a_new_profile_has_what_the_events_say(server: ProfileServer) -> None:
    api = ProfileAPI(server.url)
    empty, etag = api.profile()
    assert empty is not None
    assert (empty.paths, empty.version) == ({}, "0")
    assert api.profile(etag) == (None, etag)
    api.report(_walk("/a", "/b", "/c"))
    api.report(_walk("/a", "/b", "/d", session="t", start=10))
    learned, newer = api.profile(etag)
    assert learned is not None
    assert newer != etag
    assert learned.paths[""] == {"/b": 2, "/c": 1, "/d": 1}
    assert learned.paths["/b"] == {"/c": 1, "/d": 1}
    assert learned.paths[f"/a{SEPARATOR}/b"] == {"/c": 1, "/d": 1}
    assert learned.keys["/a"].count == 2
    assert (learned.keys["/a"].gap_s, learned.keys["/a"].latency_ms) == (1.0, 2.0)
    assert api.profile(newer) == (None, newer)
    api.close()


def test_the_profile_is_json_or_msgpack_as_asked(server: ProfileServer, http: httpx.Client) -> None:
    http.post("/v1/telemetry", json=_walk("/a", "/b"))
    plain = http.get("/v1/profile")
    packed = http.get("/v1/profile", headers={"Accept": MSGPACK})
    assert packed.headers["content-type"] == MSGPACK
    assert Profile.from_dict(msgpack.unpackb(packed.content)) == Profile.from_json(plain.content)
    assert packed.headers["etag"] != plain.headers["etag"]
    for tag in (packed.headers["etag"], f'"x", W/{packed.headers["etag"]}', "*"):
        again = http.get("/v1/profile", headers={"Accept": MSGPACK, "If-None-Match": tag})
        assert (again.status_code, again.content) == (304, b"")


def test_the_fate_of_a_prefetch_is_counted_and_is_no_step(http: httpx.Client) -> None:
    events = [
        _event(1, "/a"),
        _event(2, "/x", source="prefetch", outcome="evicted", prefetch_id="p1"),
        _event(3, "/b", source="prefetch", outcome="used", prefetch_id="p2"),
    ]
    http.post("/v1/telemetry", json=_batch(*events))
    stats = http.get("/v1/stats").json()
    assert stats["demanded"] == 2
    assert stats["prefetch"] == {"outcomes": {"evicted": 1, "used": 1}, "precision": 0.5, "overfetch": 1.0}
    assert stats["sources"]["prefetch"]["events"] == 1
    assert Profile.from_json(http.get("/v1/profile").content).paths["/a"] == {"/b": 1}


def test_frequent_paths_are_closed_and_ordered(http: httpx.Client) -> None:
    for session in range(3):
        http.post("/v1/telemetry", json=_walk("/a", "/b", "/c", session=f"s{session}"))
    http.post("/v1/telemetry", json=_walk("/a", "/d", session="other"))
    found = http.get("/v1/paths", params={"min_support": 2}).json()["paths"]
    assert found == [{"steps": ["/a"], "support": 4}, {"steps": ["/a", "/b", "/c"], "support": 3}]
    assert len(http.get("/v1/paths", params={"min_support": 1, "limit": 1}).json()["paths"]) == 1


def test_the_graph_is_of_all_sessions_or_of_one(http: httpx.Client) -> None:
    http.post("/v1/telemetry", json=_walk("/a", "/b", "/a", "/b"))
    http.post("/v1/telemetry", json=_walk("/a", "/c", session="other"))
    graph = http.get("/v1/graph").json()
    assert graph["nodes"] == [
        {"path": "/a", "count": 3},
        {"path": "/b", "count": 2},
        {"path": "/c", "count": 1},
    ]
    assert graph["edges"][0] == {"from": "/a", "to": "/b", "count": 2}
    one = http.get("/v1/graph", params={"session": "other"}).json()
    assert [step["path"] for step in one["steps"]] == ["/a", "/c"]
    assert one["edges"] == [{"from": "/a", "to": "/c", "count": 1}]
    assert http.get("/v1/graph", params={"session": "nobody"}).json()["nodes"] == []


_NASTY = [
    "",
    "0",
    "-1",
    "1e9",
    "NaN",
    "9" * 30,
    "a\x00b",
    "\x1f",
    "💡" * 40,
    "x" * 10_000,
    "' OR 1=1 --",
    "%",
    "_",
    "../..",
    "[]",
]


@pytest.mark.parametrize("value", _NASTY)
def test_nothing_a_caller_asks_is_an_error_of_the_server(value: str, http: httpx.Client) -> None:
    for path in ("/v1/graph", "/v1/paths", "/v1/profile", "/v1/stats", "/metrics"):
        for name in ("session", "limit", "min_support", "max_bytes"):
            assert http.get(path, params={name: value}).status_code in (200, 422)
    if value.isprintable() and 0 < len(value) < 1000:  # what HTTP can carry
        raw = value.encode()
        headers = {"If-None-Match": raw, "Accept": raw, "Authorization": b"Bearer " + raw}
        assert http.get("/v1/profile", headers=headers).status_code == 200


def test_metrics_are_there_for_prometheus(http: httpx.Client) -> None:
    http.post("/v1/telemetry", json=_batch(_event(1), _event(2, source="moon")))
    text = http.get("/metrics").text
    assert 'mcp_profile_events_total{result="accepted"} 1.0' in text
    assert 'mcp_profile_events_total{result="rejected"} 1.0' in text


def test_an_open_server_answers_only_to_loopback_names(http: httpx.Client) -> None:
    assert http.get("/v1/stats", headers={"Host": "attacker.example"}).status_code == 403
    assert http.get("/v1/stats", headers={"Host": "localhost:1234"}).status_code == 200


def test_a_server_open_to_the_network_refuses_to_start() -> None:
    with pytest.raises(ValueError, match="refusing"):
        ProfileServer(host="0.0.0.0").start()
    with ProfileServer(host="0.0.0.0", api_key="k") as server:
        assert httpx.get(f"http://127.0.0.1:{server.port}/v1/stats").status_code == 401


def test_a_key_is_asked_for_where_there_is_one() -> None:
    with ProfileServer(api_key="right") as server:
        assert ProfileAPI(server.url, "right").report(_batch(_event(1))).accepted == 1
        for key in ("wrong", None, ""):
            with pytest.raises(AuthenticationError):
                ProfileAPI(server.url, key).report(_batch(_event(1)))
        answer = httpx.get(server.url + "/v1/profile")
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.get(server.url + "/healthz").status_code == 200


def test_an_application_that_sends_too_fast_is_told_how_long_to_wait() -> None:
    with ProfileServer(max_events_per_s=1) as server:
        assert (
            ProfileAPI(server.url).report(_batch(*(_event(n) for n in range(100)))).accepted == 100
        )  # 60 s worth, and a bit
        with pytest.raises(OverloadedError) as caught:
            ProfileAPI(server.url).report(_batch(_event(101)))
        assert caught.value.retry_after_s is not None
        assert 35 <= caught.value.retry_after_s <= 41


def test_the_rate_is_each_applications_own_and_comes_back_with_time() -> None:
    now = [0.0]
    limit = RateLimit(10, monotonic=lambda: now[0])
    assert limit.take(1, 700) == 0
    assert limit.take(1, 1) == pytest.approx(10.1)
    assert limit.take(2, 1) == 0
    now[0] = 10.2
    assert limit.take(1, 1) == 0
    assert RateLimit(0).take(1, 10**9) == 0


def test_the_client_side_names_what_failed(server: ProfileServer) -> None:
    url = server.url
    server.stop()
    with pytest.raises(ConnectionFailedError, match=url):
        ProfileAPI(url).profile()
    server.start()
    with pytest.raises((DeadlineExceededError, ConnectionFailedError)):
        ProfileAPI(url).profile(timeout_s=1e-6)


def test_a_temporary_database_is_gone_with_its_server() -> None:
    with ProfileServer() as server:
        folder = Path(server.store.url.database or "").parent
        assert folder.exists()
    assert not folder.exists()


def test_the_database_is_its_users_alone(tmp_path: Path) -> None:
    with ProfileServer(tmp_path / "new" / "db.sqlite") as server:
        ProfileAPI(server.url).report(_batch(_event(1)))
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / "new").iterdir()} == {0o600}
