"""TLS, mutual TLS and tokens over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from mcp_client import TLS, AsyncMCPClient, ConfigurationError, MCPClient
from mcp_client.protocols import oip_pb2 as pb
from tests.security.test_tls_and_secrets import LOOPBACK, SPIFFE, Authority, authority, x509

__all__ = ["authority"]


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
    from concurrent.futures import ThreadPoolExecutor

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


def test_what_grpc_cannot_do_is_told(tmp_path: Path) -> None:
    for tls in (TLS(min_version="1.3"), TLS(spiffe_id=SPIFFE)):
        with pytest.raises(ConfigurationError, match="use https://"):
            MCPClient("grpcs://127.0.0.1:1", tls=tls)
