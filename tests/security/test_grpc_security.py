"""TLS, mutual TLS and tokens over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from mcp_client import TLS, AsyncMCPClient, ConnectionFailedError, MCPClient, Retry
from mcp_client.protocols import oip_pb2 as pb
from mcp_client.transports import tunnel
from stub_server import StubServer
from tests import models
from tests.security.test_tls_and_secrets import LOOPBACK, SPIFFE, Authority, authority, x509

__all__ = ["authority"]


def uri(text: str) -> Any:
    return x509.UniformResourceIdentifier(text)


class _Guard(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Is ready for whoever shows the valid token."""

    def __init__(self) -> None:
        self.valid = "first"
        self.seen: list[str] = []

    def service(self, details: Any) -> Any:
        token = dict(details.invocation_metadata).get("authorization", "")
        self.seen.append(token)

        def answer(request: bytes, context: Any) -> bytes:
            if token != f"Bearer {self.valid}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
            return bytes(pb.ServerReadyResponse(ready=True).SerializeToString())  # type: ignore[attr-defined]

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def server(credentials: Any = None) -> Iterator[tuple[str, _Guard]]:
    guard = _Guard()
    running = grpc.server(ThreadPoolExecutor(2), handlers=[guard])
    address = "127.0.0.1:0"
    port = (
        running.add_secure_port(address, credentials) if credentials else running.add_insecure_port(address)
    )
    running.start()
    try:
        yield f"{'grpcs' if credentials else 'grpc'}://127.0.0.1:{port}", guard
    finally:
        running.stop(0).wait()


def is_ready(url: str, kind: str = "sync", **options: Any) -> bool:
    if kind == "sync":
        with MCPClient(url, **options) as client:
            return client.ready(timeout=5)

    async def scene() -> bool:
        async with AsyncMCPClient(url, **options) as client:
            return await client.ready(timeout=5)

    return asyncio.run(scene())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_function_gives_the_token_and_a_new_one_after_a_refusal(kind: str) -> None:
    tokens = iter(["stale", "first"])
    with server() as (url, guard):
        assert is_ready(url, kind, api_key=lambda: next(tokens))
        assert guard.seen == ["Bearer stale", "Bearer first"]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_mutual_tls_with_a_private_authority(authority: Authority, kind: str) -> None:
    cert, key = authority.issue("server", LOOPBACK)
    mine = authority.issue("me", x509.DNSName("me"))
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], authority.file.read_bytes(), require_client_auth=True
    )
    with server(credentials) as (url, _):
        tls = TLS(ca=authority.file, cert=mine[0], key=mine[1])
        assert is_ready(url, kind, api_key="first", tls=tls)
        assert not is_ready(url, kind, api_key="first", tls=TLS(ca=authority.file))
        assert not is_ready(url, kind, api_key="first")


def secured(authority: Authority, name: str, *sans: Any) -> Any:
    cert, key = authority.issue(name, *sans)
    return grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_peer_is_known_by_its_spiffe_id(authority: Authority, kind: str) -> None:
    """No call reaches a server with another id, though its certificate is trusted and names its host."""
    tls = TLS(ca=authority.file, spiffe_id=SPIFFE)
    with server(secured(authority, "right", uri(SPIFFE))) as (url, guard):
        assert is_ready(url, kind, api_key="first", tls=tls)
    for number, sans in enumerate(([LOOPBACK], [uri(SPIFFE + "-other")], [uri(SPIFFE), uri("spiffe://c/d")])):
        with server(secured(authority, f"wrong{number}", *sans)) as (url, guard):
            assert not is_ready(url, kind, api_key="first", tls=tls)
            assert not guard.seen


def test_why_a_peer_was_refused_is_told(authority: Authority) -> None:
    with (
        server(secured(authority, "other", LOOPBACK)) as (url, _),
        MCPClient(url, tls=TLS(ca=authority.file, spiffe_id=SPIFFE), retry=Retry(attempts=1)) as client,
        pytest.raises(ConnectionFailedError, match="names no URI, not 'spiffe://"),
    ):
        client.models()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_tls_1_3_can_be_asked_for(authority: Authority, kind: str) -> None:
    """gRPC's server speaks 1.3; a peer that only speaks 1.2 is a plain socket's: the handshake is all there is to see."""
    with server(secured(authority, "modern", LOOPBACK)) as (url, guard):
        assert is_ready(url, kind, api_key="first", tls=TLS(ca=authority.file, min_version="1.3"))
        assert guard.seen
    cert, key = authority.issue("old", LOOPBACK)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    got: list[bytes] = []

    def accept(listener: socket.socket) -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain, contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as secure:
                got.append(secure.recv(100))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        url = f"grpcs://127.0.0.1:{listener.getsockname()[1]}"
        assert not is_ready(url, kind, tls=TLS(ca=authority.file, min_version="1.3"))
        assert not any(got)
        assert not is_ready(url, kind, tls=TLS(ca=authority.file))
        assert any(got), "with 1.2 allowed the handshake is made"


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("min_version", ["1.2", "1.3"])
def test_rotated_certificates_are_shown_to_the_server(
    authority: Authority, kind: str, min_version: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_client.transports.grpc._Channel._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("mcp_client.transports.grpc.MAX_AGE_S", 0.0 if min_version == "1.3" else 300.0)
    cert, key = authority.issue("server", LOOPBACK)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], authority.file.read_bytes(), require_client_auth=True
    )
    stranger = Authority(make_folder(tmp_path / "stranger")).issue("me", x509.DNSName("me"))
    mine = authority.issue("me", x509.DNSName("me"))
    shown = tmp_path / "cert.pem", tmp_path / "key.pem"

    def show(pair: tuple[Path, Path]) -> None:
        for source, target in zip(pair, shown, strict=True):
            target.write_bytes(source.read_bytes())

    tls = TLS(ca=authority.file, cert=shown[0], key=shown[1], min_version=min_version)
    with server(credentials) as (url, _):
        show(stranger)
        if kind == "sync":
            with MCPClient(url, api_key="first", tls=tls) as client:
                assert not client.ready(timeout=5)
                show(mine)
                assert client.ready(timeout=5)
            return

        async def scene() -> None:
            async with AsyncMCPClient(url, api_key="first", tls=tls) as client:
                assert not await client.ready(timeout=5)
                show(mine)
                assert await client.ready(timeout=5)

        asyncio.run(scene())


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("tunnelled", [True, False])
def test_channels_have_a_maximum_age_and_calls_outlive_it(
    authority: Authority, kind: str, tunnelled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every call on a new channel, many at once, large tensors: none is lost when its channel is given up."""
    monkeypatch.setattr("mcp_client.transports.grpc.MAX_AGE_S", 0.0)
    cert, key = authority.issue("server", LOOPBACK)
    models.identity(tmp_path / "identity.onnx", "FP32", (1, -1))
    x = np.random.default_rng(0).random((1, 300_000), np.float32)
    with StubServer(tmp_path, grpc=True) as running, tls_in_front(running.grpc_url, cert, key) as url:
        options: Any = {"cache": None, "prefetch": None}
        options["tls"] = TLS(ca=authority.file, min_version="1.3" if tunnelled else "1.2")
        if kind == "sync":
            with MCPClient(url, **options) as client, ThreadPoolExecutor(8) as pool:
                without_shared_memory(client)
                results = list(pool.map(lambda _: client.infer(x), range(40)))
        else:

            async def scene() -> list[Any]:
                async with AsyncMCPClient(url, **options) as client:
                    without_shared_memory(client)
                    return await asyncio.gather(*(client.infer(x) for _ in range(40)))

            results = asyncio.run(scene())
    assert all(np.array_equal(result.output, x) for result in results)


def make_folder(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("min_version", ["1.2", "1.3"])
def test_a_server_far_away_may_take_its_time_to_connect(
    authority: Authority, min_version: Any, affine_model: Path
) -> None:
    cert, key = authority.issue("server", LOOPBACK)
    tls = TLS(ca=authority.file, min_version=min_version)
    with (
        StubServer(affine_model, grpc=True) as running,
        tls_in_front(running.grpc_url, cert, key, delay_s=1.0) as url,
        MCPClient(url, tls=tls, retry=Retry(attempts=1)) as client,
    ):
        assert client.infer([0.1, 0.9, 0.4]).source == "server"


def without_shared_memory(client: Any) -> None:
    for endpoint in client._engine.endpoints:
        endpoint.transport.arena = None


@contextmanager
def tls_in_front(grpc_url: str, cert: Path, key: Path, delay_s: float = 0.0) -> Iterator[str]:
    """TLS in front of a server that speaks none, as a sidecar has it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    context.set_alpn_protocols(["h2"])
    host, port = grpc_url.removeprefix("grpc://").split(":")

    def carry(plain: socket.socket) -> None:
        time.sleep(delay_s)
        with (
            contextlib.suppress(OSError),
            plain,
            context.wrap_socket(plain, server_side=True) as secure,
            socket.create_connection((host, int(port))) as behind,
        ):
            tunnel._carry(behind, secure)

    def accept() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=carry, args=(plain,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"grpcs://127.0.0.1:{listener.getsockname()[1]}"


def test_a_closed_client_leaves_no_socket_behind(authority: Authority) -> None:
    before = set(Path(tempfile.gettempdir()).glob("mcp-tls-*"))
    with server(secured(authority, "s", LOOPBACK)) as (url, _):
        assert is_ready(url, api_key="first", tls=TLS(ca=authority.file, min_version="1.3"))
    assert set(Path(tempfile.gettempdir()).glob("mcp-tls-*")) <= before
