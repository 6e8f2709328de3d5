"""Unix sockets, for HTTP and for gRPC: all that TCP does, on one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mcp_client import AsyncMCPClient, ConfigurationError, ConnectionFailedError, MCPClient
from stub_server import StubServer
from tests import models

X = np.array([[0.1, 0.9, 0.4]], np.float32)


@pytest.fixture(scope="module")
def urls(affine_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("sockets")
    with StubServer(affine_model, uds=folder / "http.sock", grpc_uds=folder / "grpc.sock"):
        yield [f"unix://{folder}/http.sock", f"grpc+unix://{folder}/grpc.sock"]


@pytest.mark.parametrize("kind", [0, 1])
def test_inference_over_a_unix_socket(urls: list[str], kind: int) -> None:
    with MCPClient(urls[kind], cache=None) as client:
        assert client.ready()
        assert client.models() == ["affine"]
        for i in range(3):
            result = client.infer(X + i)
            np.testing.assert_allclose(result.output, (X + i) @ models.WEIGHTS + models.BIAS, rtol=1e-5)
        (endpoint,) = client._engine.endpoints
        assert endpoint.url == urls[kind]

    async def main() -> None:
        async with AsyncMCPClient(urls[kind], cache=None) as aio:
            assert (await aio.infer(X)).output.shape == (1, 2)

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["unix", "grpc+unix"])
def test_a_socket_that_is_not_there_is_a_connection_error(tmp_path: Path, scheme: str) -> None:
    with MCPClient(f"{scheme}://{tmp_path}/none.sock", timeout=5) as client:
        with pytest.raises(ConnectionFailedError):
            client.infer(X, model="m")
        assert not client.ready()


@pytest.mark.parametrize("url", ["unix:", "unix://", "unix://relative.sock", "unix:///"])
def test_paths_must_be_absolute(url: str) -> None:
    with pytest.raises(ConfigurationError, match="unix:///path"):
        MCPClient(url)
