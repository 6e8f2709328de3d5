"""Models from any web server or a folder: as whole, as checked and as resumable as from an mcp-server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mcp_client import MCPClient
from mcp_client._httpx import httpx
from mcp_client.edge import download as download_module
from mcp_client.edge.repository import ModelRepository
from mcp_client.edge.signing import seal
from mcp_client.edge.sources import write_manifest
from mcp_client.edge.sync import SyncReport, sync
from mcp_client.errors import (
    ConfigurationError,
    ConnectionFailedError,
    EdgeError,
    IntegrityError,
    MCPError,
    NotFoundError,
    ProtocolError,
)
from tests import models
from tests.conftest import RawServer
from tests.edge.mirror import Static, digest_of
from tests.edge.test_edge_sync import die_at, in_child, leftovers, probs, scaled
from tests.security.test_tls_and_secrets import LOOPBACK, Authority

Start = Callable[[Any], RawServer]
KINDS = ("file", "manifest", "folder")


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=5.0, trust_env=False, verify=False) as client:
        yield client


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(tmp_path / "edge")


class Offer:
    """A folder of models as somebody publishes it: over HTTP as files or by manifest, or as the folder itself."""

    def __init__(self, kind: str, root: Path, raw_server: Start) -> None:
        self.kind = kind
        self.root = root
        self.static = Static(root=root)
        self._url = raw_server(self.static).url

    def put(self, version: str, scale: float, *, external: bool = False, key: Path | None = None) -> None:
        """Publish a version of model ``m`` as the one that counts."""
        path = self.root / "m" / version / "model.onnx"
        shutil.rmtree(path.parent, ignore_errors=True)
        models.affine(path, scale=scale)
        if external:
            models.external(path)
        self.seal(version, key)

    def seal(self, version: str, key: Path | None = None) -> None:
        repository = ModelRepository(self.root)
        repository.follow("m", version)
        seal(repository, "m", version, key)
        write_manifest(repository)

    @property
    def where(self) -> str:
        version = ModelRepository(self.root).followed("m")
        return {
            "file": f"{self._url}/m/{version}/model.onnx",
            "manifest": f"{self._url}/models.json",
            "folder": str(self.root),
        }[self.kind]


@pytest.fixture(params=KINDS)
def offer(request: pytest.FixtureRequest, tmp_path: Path, raw_server: Start) -> Offer:
    return Offer(request.param, tmp_path / "offered", raw_server)


@pytest.fixture(params=KINDS[:2])
def remote(request: pytest.FixtureRequest, tmp_path: Path, raw_server: Start) -> Offer:
    return Offer(request.param, tmp_path / "offered", raw_server)


def failure(repository: ModelRepository, offer: Offer, http: httpx.Client, **options: Any) -> MCPError:
    report = sync(repository, offer.where, http=http, models=["m"], **options)
    assert report.downloaded == {}
    return report.failed["m"]


def test_a_model_comes_with_all_its_files_once_and_again_only_when_it_changes(
    offer: Offer, http: httpx.Client, repository: ModelRepository
) -> None:
    offer.put("1", 1.0, external=True)
    beside = offer.root / "m" / "1"
    np.savez(beside / "smoke.npz", **{"inputs/x": np.ones((1, 3), np.float32)})
    (beside / "labels.txt").write_text("cat\ndog\n")
    offer.seal("1")
    report = sync(repository, offer.where, http=http)
    names = ("model.onnx", "weights.bin", "smoke.npz", "labels.txt")
    size = sum((beside / name).stat().st_size for name in names)
    assert report == SyncReport({"m": "1"}, {}, {}, size)
    for name in (*names, "model.onnx.sha256"):
        assert (repository.root / "m" / "1" / name).read_bytes() == (beside / name).read_bytes()
    assert np.allclose(probs(repository), scaled(1.0))
    assert sync(repository, offer.where, http=http) == SyncReport({}, {"m": "1"}, {}, 0)
    offer.put("2", 2.0)
    assert sync(repository, offer.where, http=http).downloaded == {"m": "2"}
    assert np.allclose(probs(repository), scaled(2.0))
    offer.put("2", 3.0)  # the same version, other bytes
    assert sync(repository, offer.where, http=http).downloaded == {"m": "2"}
    assert np.allclose(probs(repository), scaled(3.0))
    assert repository.versions("m") == ["1", "2"]


def test_a_file_that_a_version_here_has_is_not_fetched_again(
    offer: Offer, http: httpx.Client, repository: ModelRepository
) -> None:
    offer.put("1", 1.0, external=True)
    sync(repository, offer.where, http=http)
    offer.put("2", 1.0, external=True)
    (offer.root / "m" / "2" / "labels.txt").write_text("cat\n")
    offer.seal("2")
    report = sync(repository, offer.where, http=http)
    assert (report.downloaded, report.bytes) == ({"m": "2"}, len("cat\n"))
    (repository.root / "m" / "1" / "weights.bin").write_bytes(
        b"x"
    )  # the same file by two names: damaged in both
    assert sync(repository, offer.where, http=http).downloaded == {"m": "2"}
    assert np.allclose(probs(repository), scaled(1.0))


@pytest.mark.parametrize("had_old", [False, True])
def test_a_cut_at_any_byte_leaves_the_old_or_the_new_and_the_next_sync_ends_it(
    tmp_path: Path, remote: Offer, http: httpx.Client, had_old: bool
) -> None:
    mirror = remote.static
    remote.put("1", 2.0, external=True)
    new = digest_of((remote.root / "m" / "1" / "model.onnx").read_bytes())
    sync(ModelRepository(tmp_path / "whole"), remote.where, http=http)
    whole, cuts = mirror.sent, 0
    old = tmp_path / "old"
    remote.put("1", 1.0)
    mirror.sent = 0
    sync(ModelRepository(old), remote.where, http=http)
    was = digest_of((remote.root / "m" / "1" / "model.onnx").read_bytes())
    remote.put("1", 2.0, external=True)
    budgets = range(0, whole, 37)
    for budget in budgets:
        repository = ModelRepository(tmp_path / f"edge-{budget}")
        if had_old:
            shutil.copytree(old, repository.root)
        mirror.budget, mirror.sent = budget, 0
        try:
            cuts += bool(sync(repository, remote.where, http=http).failed)
        except (ConnectionFailedError, ProtocolError):
            cuts += 1
        reread = ModelRepository(repository.root)
        assert reread.models() == (["m"] if had_old else [])
        if had_old:
            assert reread.resolve("m").digest == was
        mirror.budget, mirror.sent = None, 0
        assert sync(repository, remote.where, http=http).downloaded == {"m": "1"}
        assert repository.resolve("m").digest == new
        assert leftovers(repository) == []
    assert cuts == len(budgets)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_broke_off_if_the_server_can(
    tmp_path: Path, remote: Offer, http: httpx.Client, repository: ModelRepository, ranges: bool
) -> None:
    mirror = remote.static
    mirror.ranges = ranges
    remote.put("1", 1.0)
    size = (remote.root / "m" / "1" / "model.onnx").stat().st_size
    sync(ModelRepository(tmp_path / "other"), remote.where, http=http)
    mirror.budget, mirror.sent = mirror.sent - size // 2, 0
    assert isinstance(failure(repository, remote, http), ConnectionFailedError)
    mirror.budget = None
    mirror.asked.clear()
    report = sync(repository, remote.where, http=http)
    assert report.downloaded == {"m": "1"}
    assert report.bytes == (size // 2 if ranges else size)
    assert ("/m/1/model.onnx", f"bytes={size - size // 2}-") in mirror.asked


def test_what_does_not_fit_its_digest_is_not_taken(
    offer: Offer, http: httpx.Client, repository: ModelRepository
) -> None:
    offer.put("1", 1.0)
    sync(repository, offer.where, http=http)
    offer.put("2", 2.0, external=True)
    for name in ("model.onnx", "weights.bin"):
        path = offer.root / "m" / "2" / name
        whole = path.read_bytes()
        for damaged in (whole[:-1], whole + b"x", whole[:-1] + b"\1"):
            path.write_bytes(damaged)
            assert isinstance(failure(repository, offer, http), IntegrityError)
            assert repository.versions("m") == ["1"]
        path.write_bytes(whole)
    assert sync(repository, offer.where, http=http).downloaded == {"m": "2"}
    assert leftovers(repository) == []


@pytest.mark.parametrize("had_old", [False, True])
def test_kill_9_at_every_step_of_taking_from_a_folder(
    tmp_path: Path, raw_server: Start, had_old: bool
) -> None:
    offer = Offer("folder", tmp_path / "offered", raw_server)
    offer.put("1", 1.0)
    old = digest_of((offer.root / "m" / "1" / "model.onnx").read_bytes())
    sync(ModelRepository(tmp_path / "old"), offer.where)
    offer.put("1", 2.0, external=True)
    new = digest_of((offer.root / "m" / "1" / "model.onnx").read_bytes())
    killed = 0
    for step in range(1, 200):
        root = tmp_path / f"edge-{step}"
        if had_old:
            shutil.copytree(tmp_path / "old", root)

        def work(step: int = step, root: Path = root) -> None:
            die_at(step, root)
            sync(ModelRepository(root), offer.where)

        status = in_child(work)
        fresh = ModelRepository(root)
        assert not had_old or fresh.models()
        if fresh.models():
            assert fresh.resolve("m").digest in (old, new)
        assert sync(fresh, offer.where).failed == {}
        assert fresh.resolve("m").digest == new
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
    assert killed > 15


def test_a_plain_file_is_version_1_of_the_model_named_after_it(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    path = models.affine(tmp_path / "web" / "my model.onnx", scale=2.0)
    url = raw_server(Static(root=tmp_path / "web")).url + "/my%20model.onnx?token=a%2Fb"
    missing = sync(repository, url, http=http).failed["my model"]
    assert isinstance(missing, NotFoundError)
    assert "only with its SHA-256" in str(missing)
    subprocess.run(f"sha256sum '{path.name}' > '{path.name}.sha256'", shell=True, check=True, cwd=path.parent)
    assert sync(repository, url, http=http).downloaded == {"my model": "1"}
    assert np.allclose(probs(repository, "my model"), scaled(2.0))
    assert isinstance(sync(repository, url, http=http, models=["other"]).failed["other"], NotFoundError)


@pytest.mark.parametrize(
    "entry",
    [
        {"id": "..", "version": "1"},
        {"id": "m", "version": "../../x"},
        {"id": "m", "version": ""},
        {"id": "m", "version": 1},
        {"id": "m", "files": []},
        {"id": "m", "files": [{"name": "model.onnx"}]},
        {"id": "m", "files": [{"name": "model.onnx", "digest": "md5:0", "size": 1}]},
        {"id": "m", "signature": 5},
        {"id": "m", "files": "all"},
    ],
    ids=str,
)
def test_a_manifest_is_checked_before_it_is_believed(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start, entry: dict[str, Any]
) -> None:
    import json

    path = models.affine(tmp_path / "web" / "m" / "1" / "model.onnx")
    digest = digest_of(path.read_bytes())
    whole = {"version": "1", "files": [{"name": "model.onnx", "digest": digest, "size": path.stat().st_size}]}
    (tmp_path / "web" / "models.json").write_text(json.dumps({"models": [whole | entry]}))
    url = raw_server(Static(root=tmp_path / "web")).url + "/models.json"
    report = sync(repository, url, http=http)
    assert isinstance(report.failed[entry["id"]], (ProtocolError, EdgeError))
    assert repository.models() == []
    (tmp_path / "web" / "models.json").write_text('{"models": {"m": 1}}')
    with pytest.raises(ProtocolError):
        sync(repository, url, http=http)


def test_a_manifest_may_say_where_a_file_lies_on_its_own_host(
    tmp_path: Path, http: httpx.Client, repository: ModelRepository, raw_server: Start
) -> None:
    offer = Offer("manifest", tmp_path / "offered", raw_server)
    offer.put("1", 2.0)
    shutil.move(offer.root / "m" / "1" / "model.onnx", offer.root / "elsewhere.bin")
    manifest = offer.root / "models.json"
    text = manifest.read_text()
    for url, fits in (
        ("/elsewhere.bin", True),
        ("https://127.0.0.1:9/x", False),
        ("file:///etc/passwd", False),
    ):
        manifest.write_text(text.replace('"model.onnx"', f'"model.onnx", "url": "{url}"'))
        if fits:
            assert sync(repository, offer.where, http=http).downloaded == {"m": "1"}
            shutil.rmtree(repository.root)
        else:
            assert isinstance(failure(repository, offer, http), ProtocolError)


def test_https_and_redirects_but_never_back_to_http(
    tmp_path: Path, repository: ModelRepository, raw_server: Start
) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("server", LOOPBACK))
    offer = Offer("file", tmp_path / "offered", raw_server)
    offer.put("1", 2.0)
    plain = offer.where
    secure = Static(root=offer.root)

    def serve(raw: socket.socket) -> None:
        with context.wrap_socket(raw, server_side=True) as connection:
            secure(connection)

    url = raw_server(serve).url.replace("http:", "https:")
    trust = ssl.create_default_context(cafile=str(authority.file))
    with httpx.Client(verify=trust, trust_env=False) as http:
        secure.moved = {
            "/old.onnx": f"{url}/m/1/model.onnx",
            "/old.onnx.sha256": f"{url}/m/1/model.onnx.sha256",
        }
        sums = offer.root / "m" / "1" / "model.onnx.sha256"
        sums.write_text(sums.read_text().replace("model.onnx", "old.onnx"))
        assert sync(repository, f"{url}/old.onnx", http=http).downloaded == {"old": "1"}
        secure.moved = {"/new.onnx.sha256": plain + ".sha256"}
        assert "not https" in str(sync(repository, f"{url}/new.onnx", http=http).failed["new"])
    with httpx.Client(verify=True, trust_env=False) as http:
        report = sync(repository, f"{url}/m/1/model.onnx", http=http)
        assert isinstance(report.failed["m"], ConnectionFailedError)


def test_where_models_come_from_is_said_or_refused(tmp_path: Path, repository: ModelRepository) -> None:
    with pytest.raises(ConfigurationError, match="from a folder"):
        sync(repository, "ftp://host/m.onnx")
    with pytest.raises(EdgeError, match="no model file or folder"):
        sync(repository, str(tmp_path / "missing"))
    models.affine(tmp_path / "one.onnx", scale=2.0)
    assert sync(repository, f"file://{tmp_path}/one.onnx").downloaded == {"one": "1"}
    assert np.allclose(probs(repository, "one"), scaled(2.0))


# --- the disk -----------------------------------------------------------------------------------------------


def test_what_can_not_fit_the_budget_is_not_fetched_and_what_is_not_used_goes(
    tmp_path: Path, repository: ModelRepository, raw_server: Start
) -> None:
    offer = Offer("folder", tmp_path / "offered", raw_server)
    offer.put("1", 1.0)
    sync(repository, offer.where)
    size = (offer.root / "m" / "1" / "model.onnx").stat().st_size
    offer.put("2", 2.0)
    report = sync(repository, offer.where, max_bytes=2 * size)
    assert (report.downloaded, report.removed) == (
        {"m": "2"},
        (("m", "1"),),
    )  # with its .sha256 each is more than a half
    repository.pin("m", "2")
    offer.put("3", 3.0)
    report = sync(repository, offer.where, max_bytes=2 * size)
    assert "more than the budget" in str(report.failed["m"])
    assert report.bytes == 0
    assert repository.versions("m") == ["2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_keeps_the_old_version_and_what_was_gathered_goes(
    small_disk: Path, tmp_path: Path, raw_server: Start, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        download_module, "_KEEP_FREE", -(2**60)
    )  # not seen beforehand: the write itself fails
    offer = Offer("manifest", tmp_path / "offered", raw_server)
    offer.put("1", 1.0)
    repository = ModelRepository(small_disk / "edge")
    sync(repository, offer.where, http=http)
    offer.put("2", 2.0, external=True)
    (offer.root / "m" / "2" / "weights.bin").write_bytes(os.urandom(200_000))
    (offer.root / "m" / "2" / "model.onnx.sha256").unlink()
    offer.seal("2")
    assert "no room for weights.bin" in str(failure(repository, offer, http))
    assert np.allclose(probs(repository), scaled(1.0))
    assert not list(repository.root.rglob("*.part"))


# --- through a client ---------------------------------------------------------------------------------------


def test_a_client_takes_what_a_sync_brought_at_once(tmp_path: Path, raw_server: Start) -> None:
    offer = Offer("folder", tmp_path / "offered", raw_server)
    offer.put("1", 1.0)
    x = np.ones((1, 3), np.float32)
    (tmp_path / "edge").mkdir()
    with MCPClient(f"edge:{tmp_path / 'edge'}", cache=None, telemetry=None) as client:
        with pytest.raises(ConfigurationError, match="source="):
            client.edge.sync()
        client.edge.sync(source=offer.root)
        assert np.allclose(client.infer(x).outputs["probs"], scaled(1.0))
        offer.put("2", 2.0)
        report = client.edge.sync(source=offer.root)
        assert (report.downloaded, report.refused) == ({"m": "2"}, {})
        assert np.allclose(client.infer(x).outputs["probs"], scaled(2.0))
        offer.put("3", 3.0)
        np.savez(
            offer.root / "m" / "3" / "smoke.npz",
            **{"inputs/x": x, "outputs/probs": np.zeros((1, 2), np.float32)},
        )
        offer.seal("3")
        report = client.edge.sync(source=offer.root)
        assert report.downloaded == {"m": "3"}
        assert "smoke.npz" in report.refused["m"]
        assert client.edge.refused().keys() == {("m", "3")}
        assert np.allclose(client.infer(x).outputs["probs"], scaled(2.0))


def test_credentials_go_to_the_clients_own_server_alone(
    tmp_path: Path, raw_server: Start, stub_server: Callable[..., Any]
) -> None:
    offer = Offer("manifest", tmp_path / "offered", raw_server)
    offer.put("1", 1.0)
    server = stub_server(models.repository(tmp_path / "server", m={"1": 1.0}))
    (tmp_path / "edge").mkdir()
    options = {"edge": tmp_path / "edge", "api_key": "secret", "telemetry": None}
    with MCPClient(server.url, headers={"X-Api-Key": "secret"}, **options) as client:
        assert client.edge.sync(source=offer.where).failed == {}
    assert set(offer.static.authorization) == {""}
    with MCPClient(offer.where.removesuffix("/models.json"), **options) as client:
        offer.static.authorization.clear()
        client.edge.sync(source=offer.where)
    assert set(offer.static.authorization) == {"Bearer secret"}
