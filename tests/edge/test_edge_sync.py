"""Models from a server: only what changed, whole or not at all, whatever breaks and whoever else is at
work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from mcp_client._httpx import httpx
from mcp_client.edge import download as download_module
from mcp_client.edge import staging
from mcp_client.edge.repository import ModelRepository
from mcp_client.edge.runtime import EdgeRuntime
from mcp_client.edge.sync import SyncReport, sync
from mcp_client.errors import (
    ConfigurationError,
    ConnectionFailedError,
    EdgeError,
    IntegrityError,
    NotFoundError,
    ProtocolError,
    ServerError,
)
from mcp_client.request import Request
from tests import models
from tests.conftest import RawServer
from tests.edge.mirror import Mirror, digest_of

Start = Callable[[Mirror], RawServer]


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=5.0, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(tmp_path / "edge")


def model_bytes(folder: Path, scale: float) -> bytes:
    return models.affine(folder / f"source-{scale}.onnx", scale=scale).read_bytes()


def probs(repository: ModelRepository, model: str = "m") -> np.ndarray:
    runtime = EdgeRuntime(repository)
    answer = runtime.run(Request(model=model, inputs={"x": np.ones((1, 3), np.float32)}))
    runtime.close()
    return answer.outputs["probs"]


def scaled(scale: float) -> np.ndarray:
    return scale * (np.ones((1, 3), np.float32) @ models.WEIGHTS + models.BIAS)


def leftovers(repository: ModelRepository) -> list[str]:
    """What lies in the repository that is neither a version nor a note nor the lock."""
    return [
        str(path.relative_to(repository.root))
        for path in repository.root.rglob("*")
        if path.is_file()
        and path.name not in ("model.onnx", "model.onnx.sha256", "weights.bin", ".server", "lock")
    ]


# --- with the real server -----------------------------------------------------------------------------------


def test_models_come_over_once_and_again_only_when_they_change(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, stub_server: Callable[..., Any]
) -> None:
    root = models.repository(tmp_path / "server", a={"1": 1.0, "2": 2.0})
    models.external(root / "b" / "7" / "model.onnx")
    server = stub_server(root)
    told: list[tuple[str, int, int]] = []
    report = sync(repository, server.url, http=http, progress=lambda *step: told.append(step))
    assert (report.downloaded, report.unchanged, report.failed) == ({"a": "2", "b": "7"}, {}, {})
    sizes = [(root / name).stat().st_size for name in ("a/2/model.onnx", "b/7/model.onnx", "b/7/weights.bin")]
    assert report.bytes == sum(sizes)
    assert [step for step in told if step[1] == step[2]] == [
        ("a 2", sizes[0], sizes[0]),
        ("b 7", sizes[1], sizes[1]),
        ("b 7 weights.bin", sizes[2], sizes[2]),
    ]
    assert np.allclose(probs(repository, "a"), scaled(2.0))
    assert np.allclose(probs(repository, "b"), scaled(1.0))
    again = sync(repository, server.url + "/", http=http)
    assert again == SyncReport({}, {"a": "2", "b": "7"}, {}, 0)
    assert leftovers(repository) == []


def test_only_the_models_asked_for_are_synced(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, stub_server: Callable[..., Any]
) -> None:
    server = stub_server(models.repository(tmp_path / "server", a={"1": 1.0}, b={"1": 1.0}))
    report = sync(repository, server.url, http=http, models=["b", "missing"])
    assert report.downloaded == {"b": "1"}
    assert isinstance(report.failed["missing"], NotFoundError)
    assert repository.models() == ["b"]


def test_a_server_that_goes_back_to_an_older_version_is_followed(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    mirror = Mirror(model_bytes(tmp_path, 2.0), version="2")
    url = raw_server(mirror).url
    sync(repository, url, http=http)
    mirror.content, mirror.version = model_bytes(tmp_path, 1.0), "1"
    sync(repository, url, http=http)
    assert repository.versions("m") == ["1", "2"]
    assert repository.resolve("m").version == "1"
    assert sync(repository, url, http=http).unchanged == {"m": "1"}


def test_a_running_edge_takes_what_a_sync_brought(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    mirror = Mirror(model_bytes(tmp_path, 1.0))
    url = raw_server(mirror).url
    sync(repository, url, http=http)
    runtime = EdgeRuntime(repository)
    request = Request(model="m", inputs={"x": np.ones((1, 3), np.float32)})
    assert np.allclose(runtime.run(request).outputs["probs"], scaled(1.0))
    mirror.content = model_bytes(tmp_path, 2.0)  # the same version, other bytes
    sync(repository, url, http=http)
    runtime.refresh()
    answer = runtime.run(request)
    assert np.allclose(answer.outputs["probs"], scaled(2.0))
    assert answer.digest == digest_of(mirror.content)
    runtime.close()


def test_folders_are_for_this_user_alone(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    sync(repository, raw_server(Mirror(model_bytes(tmp_path, 1.0))).url, http=http)
    for path in (repository.root, *repository.root.rglob("*")):
        if path.is_dir():
            assert path.stat().st_mode & 0o777 == 0o700, path
    assert (repository.root / "m" / "1" / "model.onnx").stat().st_mode & 0o077 == 0


# --- broken lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("had_old", [False, True])
def test_a_cut_at_any_byte_leaves_the_old_or_the_new_and_the_next_sync_ends_it(
    tmp_path: Path, http: httpx.Client, raw_server: Start, had_old: bool
) -> None:
    old, new = model_bytes(tmp_path, 1.0), model_bytes(tmp_path, 2.0)
    mirror = Mirror(new)
    url = raw_server(mirror).url
    sync(ModelRepository(tmp_path / "whole"), url, http=http)
    whole, cuts = mirror.sent, 0
    for budget in range(0, whole, 13):
        repository = ModelRepository(tmp_path / f"edge-{budget}")
        if had_old:
            mirror.content, mirror.budget = old, None
            sync(repository, url, http=http)
        mirror.content, mirror.budget, mirror.sent = new, budget, 0
        try:
            cuts += bool(sync(repository, url, http=http).failed)
        except (ConnectionFailedError, ProtocolError):
            cuts += 1
        reread = ModelRepository(repository.root)
        assert reread.models() == (["m"] if had_old else [])
        if had_old:
            assert reread.resolve("m").digest == digest_of(old)
        mirror.budget, mirror.sent = None, 0
        assert sync(repository, url, http=http).downloaded == {"m": "1"}
        assert repository.resolve("m").digest == digest_of(new)
        assert leftovers(repository) == []
    assert cuts == len(range(0, whole, 13))


def test_a_download_goes_on_where_it_broke_off(
    http: httpx.Client, repository: ModelRepository, raw_server: Start, tmp_path: Path
) -> None:
    content = model_bytes(tmp_path, 1.0)
    mirror = Mirror(content)
    url = raw_server(mirror).url
    sync(ModelRepository(tmp_path / "other"), url, http=http)
    mirror.budget, mirror.sent = mirror.sent - len(content) // 2, 0
    mirror.asked.clear()
    first = sync(repository, url, http=http)
    assert isinstance(first.failed["m"], ConnectionFailedError)
    mirror.budget = None
    second = sync(repository, url, http=http)
    assert second.downloaded == {"m": "1"}
    assert second.bytes == len(content) // 2
    ranges = [asked for path, asked in mirror.asked if path.endswith("/file")]
    assert ranges[0] == ""
    assert ranges[-1] == f"bytes={len(content) - len(content) // 2}-"


def test_a_line_that_breaks_now_and_then_is_ridden_out_within_one_sync(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    class Hiccups(Mirror):
        def _send(self, connection: Any, data: bytes) -> None:
            if data.startswith((b"HTTP/1.1 200 x\r\nETag", b"HTTP/1.1 206")):
                connection.sendall(data[: 250 if len(data) > 400 else None])
                if len(data) > 400:
                    raise OSError("cut")
            else:
                connection.sendall(data)

    content = model_bytes(tmp_path, 1.0)
    assert sync(repository, raw_server(Hiccups(content)).url, http=http).downloaded == {"m": "1"}
    assert repository.resolve("m").digest == digest_of(content)


@pytest.mark.parametrize("fault", ["zeros", "longer", "exact_length", "no_ranges", "another_file"])
def test_what_an_earlier_attempt_left_is_never_trusted(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start, fault: str
) -> None:
    content = model_bytes(tmp_path, 1.0)
    mirror = Mirror(content, ranges=fault != "no_ranges")
    with staging.locked(repository.root):
        left = staging.Staging(repository, "m", "1", digest_of(content)).folder / "model.onnx.part"
    left.write_bytes(
        {
            "zeros": b"\0" * 100,  # a power cut: the length was on disk, the bytes were not
            "longer": content + b"x",
            "exact_length": b"\0" * len(content),
            "no_ranges": content[:100],
            "another_file": b"another" * 10,
        }[fault]
    )
    assert sync(repository, raw_server(mirror).url, http=http).downloaded == {"m": "1"}
    assert repository.resolve("m").digest == digest_of(content)
    assert leftovers(repository) == []


def test_a_server_that_is_not_there_is_an_error_not_an_empty_report(
    http: httpx.Client, repository: ModelRepository
) -> None:
    with pytest.raises(ConnectionFailedError):
        sync(repository, "http://127.0.0.1:9", http=http)


# --- servers that lie ---------------------------------------------------------------------------------------


def failure(repository: ModelRepository, mirror: Mirror, raw_server: Start, http: httpx.Client) -> EdgeError:
    report = sync(repository, raw_server(mirror).url, http=http, models=[mirror.model])
    assert report.downloaded == {}
    return report.failed[mirror.model]  # type: ignore[return-value]


def test_a_wrong_digest_keeps_the_old_model(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    old = model_bytes(tmp_path, 1.0)
    sync(repository, raw_server(Mirror(old)).url, http=http)
    lying = Mirror(model_bytes(tmp_path, 2.0), digest="sha256:" + "0" * 64)
    assert isinstance(failure(repository, lying, raw_server, http), IntegrityError)
    assert repository.resolve("m").digest == digest_of(old)
    assert leftovers(repository) == []


@pytest.mark.parametrize(
    "case",
    [
        ({"size": 10}, IntegrityError),
        ({"size": 10_000_000}, IntegrityError),
        ({"digest": "md5:123"}, ProtocolError),
        ({"version": ""}, ProtocolError),
        ({"version": "../../x"}, EdgeError),
        ({"version": ".."}, EdgeError),
        ({"model": ".."}, EdgeError),
        ({"model": "../x"}, EdgeError),
        ({"model": "a\\b"}, EdgeError),
        ({"model": "x" * 200}, EdgeError),
        ({"headers": {"Content-Encoding": "gzip"}}, ProtocolError),
    ],
    ids=str,
)
def test_what_a_server_says_is_checked_before_it_is_believed(
    tmp_path: Path,
    http: httpx.Client,
    repository: ModelRepository,
    raw_server: Start,
    case: tuple[dict[str, Any], type],
) -> None:
    changes, kind = case
    mirror = Mirror(model_bytes(tmp_path, 1.0), **changes)
    before = sorted(path for path in tmp_path.iterdir())
    error = failure(repository, mirror, raw_server, http)
    assert isinstance(error, (kind, NotFoundError))
    assert sorted(path for path in tmp_path.iterdir() if path != repository.root) == before
    assert repository.models() == []


def test_a_truncated_model_is_not_taken(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    whole = model_bytes(tmp_path, 1.0)
    mirror = Mirror(whole[:-20], digest=digest_of(whole))
    assert isinstance(failure(repository, mirror, raw_server, http), IntegrityError)
    assert repository.models() == []


@pytest.mark.parametrize(
    "location", ["../weights.bin", "/tmp/weights.bin", "model.onnx.sha256", "w.part", "absent.bin"]
)
def test_external_data_is_never_put_where_it_does_not_belong(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start, location: str
) -> None:
    hostile = _relocated(models.external(tmp_path / "source" / "model.onnx"), location)
    parts = {} if location == "absent.bin" else {location: b"x" * 64}
    error = failure(repository, Mirror(hostile, parts=parts), raw_server, http)
    assert isinstance(error, (IntegrityError, ProtocolError))
    assert repository.models() == []
    assert not (repository.root / "weights.bin").exists()


def _relocated(path: Path, location: str) -> bytes:
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return model.SerializeToString()


def test_an_error_status_is_reported_with_what_the_server_said(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, stub_server: Callable[..., Any]
) -> None:
    path = models.repository(tmp_path / "server", m={"1": 1.0}) / "m" / "1" / "model.onnx"
    server = stub_server(tmp_path / "server")
    models.affine(path, scale=3.0)  # changed behind the server's back: it answers 409
    report = sync(repository, server.url, http=http)
    assert isinstance(report.failed["m"], ServerError)
    assert "409" in str(report.failed["m"])


# --- the disk -----------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_and_leaves_nothing(
    tmp_path: Path,
    http: httpx.Client,
    repository: ModelRepository,
    raw_server: Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usage = type(download_module.shutil.disk_usage(tmp_path))
    monkeypatch.setattr(download_module.shutil, "disk_usage", lambda _: usage(100, 100, 0))
    error = failure(repository, Mirror(model_bytes(tmp_path, 1.0)), raw_server, http)
    assert "no room for model.onnx" in str(error)
    assert leftovers(repository) == []


def test_a_single_file_can_not_be_synced_into(tmp_path: Path, http: httpx.Client, affine_model: Path) -> None:
    with pytest.raises(ConfigurationError, match="single model file"):
        sync(ModelRepository(affine_model), "http://127.0.0.1:9", http=http)


def test_a_version_damaged_on_disk_is_fetched_again(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    content = model_bytes(tmp_path, 1.0)
    url = raw_server(Mirror(content)).url
    sync(repository, url, http=http)
    (repository.root / "m" / "1" / "model.onnx").write_bytes(content[:-1])
    assert sync(repository, url, http=http).downloaded == {"m": "1"}
    assert repository.resolve("m").digest == digest_of(content)


# --- several at work, and ends without warning --------------------------------------------------------------


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a forked child and return its exit status (negative: the signal that ended it)."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(step: int, root: Path) -> None:
    """Make this process end with SIGKILL just before its ``step``-th touch of a file below ``root``."""
    left = [step]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        touches = event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(root) in str(
            arguments[0]
        )
        if touches or event == "ctypes.dlsym":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two_renames"])
@pytest.mark.parametrize("had_old", [False, True])
def test_kill_9_at_every_step_leaves_the_old_or_the_new(
    tmp_path: Path, raw_server: Start, monkeypatch: pytest.MonkeyPatch, had_old: bool, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(staging.sys, "platform", "another")
    old, new = model_bytes(tmp_path, 1.0), model_bytes(tmp_path, 2.0)
    mirror = Mirror(old)
    url = raw_server(mirror).url
    killed, without = 0, 0
    for step in range(1, 200):
        repository = ModelRepository(tmp_path / f"edge-{step}")
        if had_old:
            mirror.content = old
            with httpx.Client(trust_env=False, verify=False) as http:
                sync(repository, url, http=http)
        mirror.content = new

        def work(step: int = step, root: Path = repository.root) -> None:
            with httpx.Client(trust_env=False, verify=False) as http:
                die_at(step, root)
                sync(ModelRepository(root), url, http=http)

        status = in_child(work)
        fresh = ModelRepository(repository.root)
        if fresh.models():
            assert fresh.resolve("m").digest in (digest_of(old), digest_of(new))
        without += not fresh.models()
        with httpx.Client(trust_env=False, verify=False) as http:
            report = sync(fresh, url, http=http)
        assert report.failed == {}
        assert fresh.resolve("m").digest == digest_of(new)
        assert set(leftovers(fresh)) <= {"m/.server.new"}
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
    assert killed > 15
    if had_old:
        assert without == (0 if exchange else 1)  # between two renames there is none; the next sync mends it


def test_processes_at_the_same_time_download_once(
    tmp_path: Path, repository: ModelRepository, raw_server: Start
) -> None:
    mirror = Mirror(model_bytes(tmp_path, 1.0))
    url = raw_server(mirror).url
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                with httpx.Client(trust_env=False, verify=False) as http:
                    report = sync(repository, url, http=http)
                os._exit(0 if report.failed == {} else 2)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    assert [path for path, _ in mirror.asked].count("/v1/models/m/file") == 1


def test_threads_at_the_same_time_download_once(
    tmp_path: Path, repository: ModelRepository, raw_server: Start
) -> None:
    mirror = Mirror(model_bytes(tmp_path, 1.0))
    url = raw_server(mirror).url
    reports: list[SyncReport] = []

    def work() -> None:
        with httpx.Client(trust_env=False, verify=False) as http:
            reports.append(sync(repository, url, http=http))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(report.downloaded) for report in reports) == [0, 0, 0, 1]


def test_a_lock_that_is_held_too_long_is_an_error_that_says_so(tmp_path: Path) -> None:
    with (
        staging.locked(tmp_path),
        pytest.raises(EdgeError, match="another process"),
        staging.locked(tmp_path, wait_s=0.05),
    ):
        pass
    with staging.locked(tmp_path, wait_s=0.0):
        pass
