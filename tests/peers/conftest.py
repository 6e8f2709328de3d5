"""Each case runs against each peer over each protocol; ``incapable.py`` says where a peer is expected to fail.

From a run of everything comes ``docs/compatibility.md``: it must equal the file, or with ``--write-compatibility`` replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest

from mcp_client import AsyncMCPClient, MCPClient
from tests.peers import incapable, report, servers, triton_repository
from tests.peers.venvs import PeerError

PEERS: dict[str, Callable[[], AbstractContextManager[servers.Server]]] = {
    "mcp-server": servers.mcp_server,
    "triton": lambda: servers.triton(list(triton_repository.MODELS)),
    "mlserver": servers.mlserver,
    "kserve": servers.kserve,
}
PROTOCOLS = ("http", "grpc")


@dataclass(frozen=True)
class Peer:
    """A running server as one protocol shows it."""

    name: str
    protocol: str
    server: servers.Server

    @property
    def url(self) -> str:
        return self.server.http if self.protocol == "http" else self.server.grpc

    def identity(self, datatype: str, rank: int) -> str:
        """The model that hands its input ``x`` back as ``y``. Only Triton needs one for each rank."""
        name = f"identity_{datatype.lower()}"
        return f"{name}_{rank}" if self.name == "triton" else name

    def client(self, **options: Any) -> MCPClient:
        return MCPClient(self.url, protocol="oip", **{"cache": None, **options})

    def aio(self, **options: Any) -> AsyncMCPClient:
        return AsyncMCPClient(self.url, protocol="oip", **{"cache": None, **options})


@pytest.fixture(scope="session", params=list(PEERS))
def server(request: pytest.FixtureRequest) -> Iterator[servers.Server]:
    try:
        running = PEERS[request.param]()
        started = running.__enter__()
    except PeerError as error:  # once, and not for each of the peer's cases
        pytest.exit(str(error), returncode=1)
    try:
        yield started
    finally:
        running.__exit__(None, None, None)


@pytest.fixture(scope="session", params=PROTOCOLS)
def peer(server: servers.Server, request: pytest.FixtureRequest) -> Peer:
    return Peer(server.name, request.param, server)


@pytest.fixture
def client(peer: Peer) -> Iterator[MCPClient]:
    with peer.client() as made:
        yield made


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-compatibility", action="store_true", help="write docs/compatibility.md")


@pytest.hookimpl(
    trylast=True
)  # after pytest's own sorting, which starts a server again for its second protocol
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: [*PEERS].index(case.peer) if (case := report.case_of(item)) else -1)
    for item in items:
        item.add_marker(
            pytest.mark.timeout(300)
        )  # the first one of a peer waits for it to be installed and started
        case = report.case_of(item)
        expected = incapable.expected(case) if case is not None else None
        if expected is not None:
            item.add_marker(pytest.mark.xfail(reason=expected.reason, raises=expected.error, strict=True))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(report.Recorder(config), "compatibility")
