"""The pipe: recording costs nothing and never raises; what was recorded reaches the Profile API once."""

from __future__ import annotations

import gzip
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson
import pytest

from mcp_client.config import Telemetry
from mcp_client.errors import ConfigurationError
from mcp_client.telemetry import TelemetryPipe, uploader
from mcp_client.telemetry.events import uuid7
from mcp_profile import ProfileServer

FP = bytes(range(20))
Answer = tuple[int, dict[str, Any]] | None  # None: the connection breaks without a word


class PickyServer(ThreadingHTTPServer):
    """Answers batches as a test says, and keeps them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.batches: list[dict[str, Any]] = []
        self.decide: Callable[[dict[str, Any]], Answer] = lambda batch: (
            202,
            {"accepted": len(batch["events"])},
        )

    @property
    def seqs(self) -> list[int]:
        return [event["seq"] for batch in self.batches for event in batch["events"]]


class _Handler(BaseHTTPRequestHandler):
    server: PickyServer

    def do_POST(self) -> None:
        batch = orjson.loads(gzip.decompress(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.batches.append(batch)
        answer = self.server.decide(batch)
        if answer is None:
            self.close_connection = True
            return
        status, body = answer
        self.send_response(status)
        self.send_header("Content-Length", str(len(orjson.dumps(body))))
        self.end_headers()
        self.wfile.write(orjson.dumps(body))

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def picky() -> Iterator[PickyServer]:
    with PickyServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def server() -> Iterator[ProfileServer]:
    with ProfileServer() as running:
        yield running


@pytest.fixture
def pipe_to(tmp_path: Path) -> Iterator[Callable[..., TelemetryPipe]]:
    pipes: list[TelemetryPipe] = []

    def make(url: str, **options: Any) -> TelemetryPipe:
        clock = options.pop("clock", time.time)
        pipes.append(
            TelemetryPipe(
                Telemetry(url, spool_dir=options.pop("spool_dir", tmp_path / "spool"), **options), clock=clock
            )
        )
        return pipes[-1]

    yield make
    for pipe in pipes:
        pipe.close(0.2)


def _record(pipe: TelemetryPipe, n: int = 1, **changes: Any) -> None:
    for number in range(n):
        values = {
            "session": "user-42",
            "path": f"/page/{number}",
            "route": "/page/{n:int}",
            "fp": FP,
            "model": "ocr",
            "source": "server",
            "latency_ms": 3.25,
            "nbytes": 4012,
        }
        pipe.record(**(values | changes))


def _stored(server: ProfileServer, pipe: TelemetryPipe) -> list[int]:
    """The seqs that the Profile API has of this pipe's spool."""
    client = pipe._disk.client_id
    with server.store.read() as db:
        found = db.exec_driver_sql(
            "SELECT seq FROM events WHERE client = (SELECT id FROM clients WHERE client_id = ?) ORDER BY seq",
            (client,),
        )
        return [seq for (seq,) in found]


def test_flush_with_nothing_recorded_has_nothing_to_complain_about(picky: PickyServer, pipe_to: Any) -> None:
    pipe = pipe_to(picky.url)
    assert pipe.flush()
    assert (pipe.stats().last_error, picky.batches) == ("", [])


def test_a_recorded_event_arrives_as_the_protocol_has_it(picky: PickyServer, pipe_to: Any) -> None:
    pipe = pipe_to(picky.url, clock=lambda: 1767225600.1234)
    _record(pipe)
    _record(pipe, source="prefetch", prefetch_id="p1", outcome="used", route="", session="")
    assert pipe.flush()
    (batch,) = picky.batches
    first, second = batch["events"]
    assert set(batch) == {"batch_id", "client_id", "sdk", "sent_at", "events"}
    hidden = first.pop("session")
    assert first == {
        "seq": 1,
        "t": 1767225600.123,
        "path": "/page/0",
        "route": "/page/{n:int}",
        "fp": "aaaqeayeaudaocajbifqydiob4ibceqt",
        "model": "ocr",
        "source": "server",
        "latency_ms": 3.25,
        "bytes": 4012,
    }
    assert len(hidden) == 24
    assert "user-42" not in hidden
    assert second["session"] == ""
    assert (second["prefetch_id"], second["outcome"]) == ("p1", "used")


def test_a_session_id_never_reaches_the_disk_and_is_hidden_alike_each_time(
    picky: PickyServer, pipe_to: Any, tmp_path: Path
) -> None:
    picky.decide = lambda batch: (503, {})
    pipe = pipe_to(picky.url)
    _record(pipe, 2, session="alice@example.org")
    assert not pipe.flush(1)
    for file in (tmp_path / "spool").iterdir():
        assert b"alice" not in file.read_bytes()
    pipe.close(0.1)
    other = pipe_to(picky.url)
    _record(other, session="alice@example.org")
    _record(other, session="bob")
    picky.decide = lambda batch: (202, {"accepted": 4})
    picky.batches.clear()
    assert other.flush()
    sessions = [event["session"] for batch in picky.batches for event in batch["events"]]
    assert len(sessions) == 4
    assert len(set(sessions[:3])) == 1
    assert sessions[3] != sessions[0]


@pytest.mark.parametrize(
    ("name", "value"), [("DO_NOT_TRACK", "1"), ("MCP_TELEMETRY", "0"), ("MCP_TELEMETRY", "off")]
)
def test_the_environment_turns_it_off(
    name: str,
    value: str,
    *,
    picky: PickyServer,
    pipe_to: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, value)
    threads = threading.active_count()
    pipe = pipe_to(picky.url)
    _record(pipe, 10)
    assert pipe.flush()
    pipe.close()
    assert not pipe.stats().enabled
    assert (picky.batches, threading.active_count(), (tmp_path / "spool").exists()) == ([], threads, False)


def test_do_not_track_0_is_no_wish(picky: PickyServer, pipe_to: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    assert pipe_to(picky.url).stats().enabled


def test_making_a_pipe_does_no_io(pipe_to: Any, tmp_path: Path) -> None:
    threads = threading.active_count()
    pipe = pipe_to("http://127.0.0.1:9")
    assert (threading.active_count(), (tmp_path / "spool").exists()) == (threads, False)
    pipe.close()
    assert not (tmp_path / "spool").exists()


def test_a_full_ring_drops_the_oldest_and_counts_them(
    picky: PickyServer, pipe_to: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "RING", 100)
    pipe = pipe_to(picky.url)
    pipe._idle = False  # nobody drains
    _record(pipe, 250)
    assert pipe.flush()
    assert [event["path"] for batch in picky.batches for event in batch["events"]] == [
        f"/page/{n}" for n in range(150, 250)
    ]
    stats = pipe.stats()
    assert (stats.recorded, stats.sent, stats.dropped) == (250, 100, 150)


def test_what_cannot_be_json_is_dropped_and_counted(picky: PickyServer, pipe_to: Any) -> None:
    pipe = pipe_to(picky.url)
    _record(pipe, path="\ud800")
    _record(pipe, path="/" + "x" * 20_000)
    _record(pipe, fp=None)
    _record(pipe, latency_ms=math.nan)  # becomes 0: the event is worth more than its latency
    _record(pipe, session="\ud800 is no text, but a session may be called so")
    assert pipe.flush()
    assert (pipe.stats().sent, pipe.stats().dropped) == (2, 3)


def test_many_threads_record_and_all_is_counted(server: ProfileServer, pipe_to: Any) -> None:
    pipe = pipe_to(server.url)
    threads = [threading.Thread(target=_record, args=(pipe, 2000)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pipe.flush()
    assert _stored(server, pipe) == list(range(1, 16_001))
    assert pipe.stats().dropped == 0


def test_the_background_delivers_by_itself(server: ProfileServer, pipe_to: Any) -> None:
    pipe = pipe_to(server.url, interval_s=0.2)
    _record(pipe, 3)
    _wait(lambda: pipe.stats().sent == 3)
    _record(pipe, 2)  # the drainer sleeps by now and is woken
    _wait(lambda: pipe.stats().sent == 5)


def test_a_full_batch_goes_at_once(server: ProfileServer, pipe_to: Any) -> None:
    pipe = pipe_to(server.url, interval_s=3600, max_batch=100)
    _record(pipe, 250)
    _wait(lambda: pipe.stats().sent == 250)


def test_a_server_that_was_away_gets_everything_once(tmp_path: Path, pipe_to: Any) -> None:
    server = ProfileServer(tmp_path / "profile.sqlite").start()
    pipe = pipe_to(server.url, max_batch=40)
    _record(pipe, 100)
    assert pipe.flush()
    server.stop()
    _record(pipe, 100)
    assert not pipe.flush(2)
    pipe.close(0.5)  # also the client goes away
    assert pipe.stats().pending == 100
    server.start()
    pipe = pipe_to(server.url)
    _record(pipe, 1)
    assert pipe.flush()
    assert _stored(server, pipe) == list(range(1, 202))
    server.close()


def test_a_batch_whose_answer_got_lost_is_sent_again_under_its_id(picky: PickyServer, pipe_to: Any) -> None:
    picky.decide = lambda batch: None
    pipe = pipe_to(picky.url)
    _record(pipe, 3)
    assert not pipe.flush(2)
    _record(pipe, 2)
    pipe.close(0.2)
    picky.decide = lambda batch: (202, {"accepted": 0, "duplicates": 3})
    again = pipe_to(picky.url)
    assert again.flush()
    first, repeated, rest = picky.batches[0], picky.batches[-2], picky.batches[-1]
    assert (repeated["batch_id"], repeated["events"]) == (first["batch_id"], first["events"])
    assert [event["seq"] for event in rest["events"]] == [4, 5]
    assert rest["batch_id"] != first["batch_id"]


def test_a_batch_too_large_is_halved_until_it_fits(picky: PickyServer, pipe_to: Any) -> None:
    picky.decide = lambda batch: (
        (413, {}) if len(batch["events"]) > 3 else (202, {"accepted": len(batch["events"])})
    )
    pipe = pipe_to(picky.url)
    _record(pipe, 10)
    assert pipe.flush()
    taken = [batch for batch in picky.batches if len(batch["events"]) <= 3]
    assert [event["seq"] for batch in taken for event in batch["events"]] == list(range(1, 11))
    assert len({batch["batch_id"] for batch in picky.batches}) == len(picky.batches)
    assert pipe.stats().sent == 10


def test_an_event_too_large_by_itself_does_not_block_the_rest(picky: PickyServer, pipe_to: Any) -> None:
    picky.decide = lambda batch: (
        (413, {}) if any(e["seq"] == 4 for e in batch["events"]) else (202, {"accepted": 1})
    )
    pipe = pipe_to(picky.url)
    _record(pipe, 10)
    assert pipe.flush()
    assert (pipe.stats().sent, pipe.stats().rejected, pipe.stats().pending) == (9, 1, 0)


@pytest.mark.parametrize("status", [400, 422])
def test_a_batch_that_is_refused_does_not_block_the_rest(
    status: int, picky: PickyServer, pipe_to: Any
) -> None:
    picky.decide = lambda batch: (status, {}) if batch["events"][0]["seq"] <= 100 else (202, {"accepted": 1})
    pipe = pipe_to(picky.url, max_batch=100)
    _record(pipe, 300)
    assert pipe.flush()
    assert (pipe.stats().sent, pipe.stats().rejected, pipe.stats().pending) == (200, 100, 0)
    assert len(picky.batches) < 10


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_what_may_get_better_keeps_its_events(
    status: int, picky: PickyServer, pipe_to: Any, caplog: Any
) -> None:
    picky.decide = lambda batch: (status, {"error": {"code": "x", "message": "no"}})
    pipe = pipe_to(picky.url, api_key="old")
    _record(pipe, 5)
    assert not pipe.flush(1)
    assert not pipe.flush(1)
    assert pipe.stats().pending == 5
    assert str(picky.url) in pipe.stats().last_error
    warnings = [entry for entry in caplog.records if "does not let us in" in entry.message]
    assert len(warnings) == (1 if status in (401, 403) else 0)
    picky.decide = lambda batch: (202, {"accepted": 5})
    assert pipe.flush()


def test_an_answer_that_is_none_of_ours_keeps_the_events(picky: PickyServer, pipe_to: Any) -> None:
    picky.decide = lambda batch: (200, {"hello": "I am another service"})
    pipe = pipe_to(picky.url)
    _record(pipe, 2)
    assert not pipe.flush(1)
    assert "check the telemetry URL" in pipe.stats().last_error
    assert pipe.stats().pending == 2


def test_events_rejected_by_index_are_counted(server: ProfileServer, pipe_to: Any) -> None:
    pipe = pipe_to(server.url)
    _record(pipe, 3)
    _record(pipe, 2, source="moon")
    assert pipe.flush()
    assert (pipe.stats().sent, pipe.stats().rejected, pipe.stats().pending) == (3, 2, 0)


def test_a_clock_that_jumps_changes_times_and_nothing_else(server: ProfileServer, pipe_to: Any) -> None:
    times = iter([1.7e9, 1.7e9 + 1e6, 1.6e9, 1.7e9, 3e9])
    pipe = pipe_to(server.url, clock=lambda: next(times))
    _record(pipe, 5)
    assert pipe.flush()
    assert _stored(server, pipe) == [1, 2, 3, 4, 5]


def test_sampling_keeps_whole_sessions(picky: PickyServer, pipe_to: Any) -> None:
    pipe = pipe_to(picky.url, sample=0.3)
    for session in range(200):
        _record(pipe, 3, session=f"s{session}")
    assert pipe.flush()
    counts: dict[str, int] = {}
    for batch in picky.batches:
        for event in batch["events"]:
            counts[event["session"]] = counts.get(event["session"], 0) + 1
    assert set(counts.values()) == {3}
    assert 30 < len(counts) < 95
    assert pipe.stats().left_out == 600 - 3 * len(counts)


def test_redact_sees_what_would_leave_and_decides(picky: PickyServer, pipe_to: Any) -> None:
    def redact(event: dict[str, Any]) -> dict[str, Any] | None:
        if event["path"] == "/page/1":
            return None
        if event["path"] == "/page/2":
            raise RuntimeError("a bug in redact must not leak the event")
        return event | {"model": "hidden", "secret": "no field of an event"}

    pipe = pipe_to(picky.url, redact=redact)
    _record(pipe, 4)
    assert pipe.flush()
    events = picky.batches[0]["events"]
    assert [(event["path"], event["model"], "secret" in event) for event in events] == [
        ("/page/0", "hidden", False),
        ("/page/3", "hidden", False),
    ]
    assert (pipe.stats().left_out, pipe.stats().dropped) == (1, 1)


def test_a_directory_that_cannot_be_made_keeps_events_in_memory(
    server: ProfileServer, pipe_to: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    pipe = pipe_to(server.url, spool_dir=tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        _record(pipe, 3)
        assert pipe.flush()
        _record(pipe, 4)
        assert pipe.flush()
    assert (pipe.stats().sent, pipe.stats().dropped) == (7, 0)
    assert len([entry for entry in caplog.records if "stays in memory" in entry.message]) == 1
    pipe.close()
    assert "Traceback" not in caplog.text


def test_a_damaged_spool_costs_what_was_in_it_and_no_more(
    server: ProfileServer, pipe_to: Any, tmp_path: Path
) -> None:
    pipe = pipe_to(server.url)
    (tmp_path / "spool").mkdir()
    pipe._disk.file.write_bytes(b"\xff" * 9000)
    _record(pipe, 3)
    assert pipe.flush()
    assert pipe.stats().sent == 3
    assert len(list((tmp_path / "spool").glob("*.damaged"))) == 1


def test_a_spool_that_is_full_says_so_once_and_keeps_the_newest(
    picky: PickyServer, pipe_to: Any, caplog: pytest.LogCaptureFixture
) -> None:
    picky.decide = lambda batch: (503, {})
    pipe = pipe_to(picky.url, max_spool_bytes=300_000)
    for _ in range(4):
        _record(pipe, 1000)
        pipe.flush(1)
    picky.decide = lambda batch: (202, {"accepted": 1})
    picky.batches.clear()
    assert pipe.flush()
    stats = pipe.stats()
    assert stats.dropped > 0
    assert stats.sent + stats.dropped == 4000
    assert picky.seqs[-1] == 4000
    assert len([entry for entry in caplog.records if "spool is full" in entry.message]) == 1


def test_a_closed_pipe_takes_nothing_and_says_nothing(picky: PickyServer, pipe_to: Any) -> None:
    pipe = pipe_to(picky.url)
    _record(pipe, 1)
    pipe.close()
    _record(pipe, 100)
    pipe.close()
    time.sleep(0.05)
    assert picky.seqs == [1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mcp-telemetry")]


def test_a_quick_close_stores_what_it_has_no_time_to_send(pipe_to: Any) -> None:
    pipe = pipe_to("http://127.0.0.1:9")
    _record(pipe, 40_000)
    pipe.close(0.01)
    assert (pipe.stats().dropped, pipe.stats().spooled) == (0, 40_000)


def test_close_is_quick_when_the_server_hangs(picky: PickyServer, pipe_to: Any) -> None:
    hold = threading.Event()
    picky.decide = lambda batch: (hold.wait(10), None)[1]  # type: ignore[func-returns-value]
    pipe = pipe_to(picky.url)
    _record(pipe, 1)
    started = time.monotonic()
    pipe.close(0.3)
    assert time.monotonic() - started < 1.5
    hold.set()


def test_a_forked_child_sends_its_own_events_and_none_of_its_parents(
    server: ProfileServer, pipe_to: Any
) -> None:
    pipe = pipe_to(server.url)
    _record(pipe, 5)
    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            _record(pipe, 7)
            os._exit(0 if pipe.flush(10) and pipe.stats().recorded == 7 else 1)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    _record(pipe, 2)
    assert pipe.flush()
    assert _stored(server, pipe) == list(range(1, 5 + 3 * 7 + 2 + 1))


def test_pipes_for_two_places_do_not_mix(picky: PickyServer, server: ProfileServer, pipe_to: Any) -> None:
    one, other = pipe_to(picky.url), pipe_to(server.url)
    _record(one, 2)
    _record(other, 3)
    assert one.flush()
    assert other.flush()
    assert picky.seqs == [1, 2]
    assert _stored(server, other) == [1, 2, 3]


def test_uuid7_is_ordered_by_time_and_unique_without_it() -> None:
    ids = [uuid7(lambda: 1.7e9) for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {(len(i), i[14], i[19] in "89ab") for i in ids} == {(36, "7", True)}
    assert uuid7(lambda: 1.7e9) < uuid7(lambda: 1.8e9)


@pytest.mark.parametrize("wrong", [{"url": "ftp://x"}, {"sample": 2}, {"interval_s": 0}, {"max_batch": -1}])
def test_settings_that_make_no_sense_are_told(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Telemetry(**({"url": "http://127.0.0.1:8090"} | wrong))


def test_the_key_is_in_no_repr() -> None:
    assert "hunter2" not in repr(Telemetry("http://127.0.0.1:8090", api_key="hunter2"))


def _wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
