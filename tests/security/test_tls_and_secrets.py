"""TLS to real servers with certificates made here; tokens that change; secrets that are never shown; redirects."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mcp_client import (
    TLS,
    AsyncMCPClient,
    AuthenticationError,
    ConfigurationError,
    ConnectionFailedError,
    MCPClient,
    MCPError,
    Retry,
    ServerError,
)
from tests.conftest import RawServer, read_request, respond

ONCE = Retry(attempts=1)
SPIFFE = "spiffe://cluster.local/ns/ai/sa/mcp-2026"


class Authority:
    """A private CA."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = builder.add_extension(identifier, critical=False)
        self.file = folder / f"{name}.pem"
        certificate = builder.sign(self._key, hashes.SHA256())
        self.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _builder(self, subject: x509.Name, key: Any) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )

    def issue(self, name: str, *sans: x509.GeneralName) -> tuple[Path, Path]:
        """Certificate and key files."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName(list(sans)), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
        )
        certificate = builder.sign(self._key, hashes.SHA256())
        cert_file, key_file = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_file, key_file


LOOPBACK = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@dataclass
class Secure:
    url: str
    context: ssl.SSLContext
    peers: list[str]
    versions: list[str]


@contextmanager
def secure_server(
    certificate: tuple[Path, Path], *, clients: Path | None = None, newest: ssl.TLSVersion | None = None
) -> Iterator[Secure]:
    """An OIP server of one model over TLS; ``clients``: the CA whose certificates clients must show."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    if newest is not None:
        context.maximum_version = newest
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    running = Secure(f"https://127.0.0.1:{port}", context, [], [])
    open_: list[socket.socket] = []

    def serve(raw: socket.socket) -> None:
        try:
            with raw, context.wrap_socket(raw, server_side=True) as connection:
                peer = connection.getpeercert() or {}
                running.peers.append(str(dict(pair for (pair,) in peer.get("subject", ())).get("commonName")))
                running.versions.append(str(connection.version()))
                while (request := read_request(connection)) is not None:
                    oip_answer(connection, request[0])
        except OSError:
            return  # a refused handshake is what some tests want

    def accept() -> None:
        while True:
            try:
                raw, _ = listener.accept()
            except OSError:
                return
            open_.append(raw)
            threading.Thread(target=serve, args=(raw,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield running
    finally:
        listener.close()
        for raw in open_:
            raw.close()


def oip_answer(connection: socket.socket, first: str) -> None:
    if first.startswith("GET /v2 "):
        respond(connection, 200, b'{"name": "t", "version": "1", "extensions": []}')
    elif first.startswith("GET "):
        tensor = {"name": "x", "datatype": "FP32", "shape": [-1]}
        respond(connection, 200, json.dumps({"name": "m", "inputs": [tensor], "outputs": [tensor]}).encode())
    else:
        output = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}
        respond(connection, 200, json.dumps({"model_name": "m", "outputs": [output]}).encode())


def ask(url: str, tls: TLS | None, kind: str = "sync") -> None:
    options: dict[str, Any] = {"model": "m", "cache": None, "retry": ONCE, "tls": tls, "timeout": 5}
    if kind == "sync":
        with MCPClient(url, **options) as client:
            client.infer([1.0])
        return

    async def scene() -> None:
        async with AsyncMCPClient(url, **options) as client:
            await client.infer([1.0])

    asyncio.run(scene())


def hang_up(client: MCPClient) -> None:
    for endpoint in client._engine.endpoints:
        endpoint.transport.close()


both = pytest.mark.parametrize("kind", ["sync", "async"])


@both
def test_a_private_authority_is_trusted_where_it_is_named_only(authority: Authority, kind: str) -> None:
    with secure_server(authority.issue("server", LOOPBACK)) as running:
        ask(running.url, TLS(ca=authority.file), kind)
        with pytest.raises(ConnectionFailedError, match=r"not trusted; TLS\(ca="):
            ask(running.url, None, kind)


@both
def test_the_name_in_the_certificate_must_be_the_hosts(authority: Authority, kind: str) -> None:
    with (
        secure_server(authority.issue("other", x509.DNSName("elsewhere.test"))) as running,
        pytest.raises(ConnectionFailedError, match="IP address mismatch"),
    ):
        ask(running.url, TLS(ca=authority.file), kind)


@both
def test_mutual_tls(authority: Authority, kind: str) -> None:
    cert, key = authority.issue("me", x509.DNSName("me"))
    with secure_server(authority.issue("server", LOOPBACK), clients=authority.file) as running:
        ask(running.url, TLS(ca=authority.file, cert=cert, key=key), kind)
        assert set(running.peers) == {"me"}
        with pytest.raises(MCPError):
            ask(running.url, TLS(ca=authority.file), kind)


def test_tls_1_3_as_the_minimum(authority: Authority) -> None:
    certificate = authority.issue("server", LOOPBACK)
    with secure_server(certificate) as running:
        ask(running.url, TLS(ca=authority.file, min_version="1.3"))
        assert running.versions == ["TLSv1.3"]
    with secure_server(certificate, newest=ssl.TLSVersion.TLSv1_2) as running:
        ask(running.url, TLS(ca=authority.file))
        with pytest.raises(ConnectionFailedError):
            ask(running.url, TLS(ca=authority.file, min_version="1.3"))


def test_rotated_certificates_are_used_by_new_connections(authority: Authority, tmp_path: Path) -> None:
    cert, key = tmp_path / "current.pem", tmp_path / "current.key"

    def rotate(name: str) -> None:
        for source, target in zip(authority.issue(name, x509.DNSName(name)), (cert, key), strict=True):
            fresh = target.with_suffix(".new")
            fresh.write_bytes(source.read_bytes())
            os.replace(fresh, target)

    rotate("monday")
    tls = TLS(ca=authority.file, cert=cert, key=key)
    with (
        secure_server(authority.issue("server", LOOPBACK), clients=authority.file) as running,
        MCPClient(running.url, model="m", cache=None, retry=ONCE, tls=tls) as client,
    ):
        client.infer([1.0])
        rotate("tuesday")
        client.infer([1.0])
        assert running.peers == ["monday"], "the open connection stays"
        hang_up(client)
        client.infer([1.0])
        assert running.peers == ["monday", "tuesday"]
        key.write_text("half a rotation")
        hang_up(client)
        client.infer([1.0])
        assert running.peers[-1] == "tuesday", "the pair that worked goes on until the new one fits"


@both
def test_a_peer_is_known_by_its_spiffe_id(authority: Authority, kind: str) -> None:
    uri = x509.UniformResourceIdentifier
    tls = TLS(ca=authority.file, spiffe_id=SPIFFE)
    with secure_server(authority.issue("workload", uri(SPIFFE))) as running:
        ask(running.url, tls, kind)  # no host name in there
    for sans in ([uri(SPIFFE + "-other")], [LOOPBACK], [uri(SPIFFE), uri("spiffe://cluster.local/more")]):
        with (
            secure_server(authority.issue("impostor", *sans)) as running,
            pytest.raises(ConnectionFailedError, match="certificate names"),
        ):
            ask(running.url, tls, kind)
    stranger = Authority(authority.file.parent, "stranger")
    with (
        secure_server(stranger.issue("fake", uri(SPIFFE))) as running,
        pytest.raises(ConnectionFailedError, match="not trusted"),
    ):
        ask(running.url, tls, kind)


def test_wrong_tls_settings_are_told_at_once(tmp_path: Path) -> None:
    for wrong in ({"min_version": "1.1"}, {"key": "k.pem"}, {"spiffe_id": "cluster.local/x"}):
        with pytest.raises(ConfigurationError):
            TLS(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"nothing\.pem"):
        MCPClient("https://127.0.0.1:1", tls=TLS(ca=tmp_path / "nothing.pem"))


# --- tokens ---

SECRET = "s3cret-t0ken-of-mine"


def guarded(valid: Callable[[], str], seen: list[str]) -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        while (request := read_request(connection)) is not None:
            seen.append(request[1].get("authorization", ""))
            if seen[-1] != f"Bearer {valid()}":
                respond(connection, 401, b'{"error": "who are you?"}')
            else:
                oip_answer(connection, request[0])

    return handle


@both
def test_a_function_gives_the_token_and_a_new_one_after_a_401(
    raw_server: Callable[..., RawServer], kind: str
) -> None:
    valid, asked, seen = ["first"], [], []

    def fetch() -> str:
        asked.append(valid[0])
        return valid[0]

    running = raw_server(guarded(lambda: valid[0], seen))
    options: dict[str, Any] = {"model": "m", "cache": None, "api_key": fetch, "retry": ONCE}
    if kind == "sync":
        with MCPClient(running.url, **options) as client:
            client.infer([1.0])
            valid[0] = "second"
            client.infer([1.0])
            client.infer([1.0])
    else:

        async def scene() -> None:
            async with AsyncMCPClient(running.url, **options) as client:
                await client.infer([1.0])
                valid[0] = "second"
                await client.infer([1.0])
                await client.infer([1.0])

        asyncio.run(scene())
    assert asked == ["first", "second"]


def test_a_token_that_stays_wrong_is_fetched_again_once_a_request(
    raw_server: Callable[..., RawServer],
) -> None:
    seen: list[str] = []
    count = iter(range(100))
    running = raw_server(guarded(lambda: "never", seen))
    with (
        MCPClient(running.url, model="m", api_key=lambda: f"try-{next(count)}") as client,
        pytest.raises(AuthenticationError),
    ):
        client.infer([1.0])
    assert seen == ["Bearer try-0", "Bearer try-1"]


def test_a_token_file_is_read_again_when_it_was_replaced(
    raw_server: Callable[..., RawServer], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    valid, seen = ["first"], []
    running = raw_server(guarded(lambda: valid[0], seen))
    with MCPClient(running.url, model="m", cache=None, api_key=file) as client:
        client.infer([1.0])
        file.write_text("the second\n")
        valid[0] = "the second"
        client.infer([1.0])
    assert "Bearer first" not in seen[-1:]
    with (
        MCPClient(running.url, model="m", api_key=tmp_path / "none") as client,
        pytest.raises(ConfigurationError, match="none"),
    ):
        client.infer([1.0])


@both
def test_secrets_are_never_shown(
    raw_server: Callable[..., RawServer], caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    shown: list[str] = []
    running = raw_server(guarded(lambda: "another", []))
    gone = "http://127.0.0.1:9"
    sources: list[Any] = [SECRET, lambda: SECRET]
    with caplog.at_level(logging.DEBUG):
        for source in sources:
            for url in (running.url, gone, [gone, running.url]):
                options: dict[str, Any] = {"model": "m", "api_key": source, "headers": {"X-API-Key": SECRET}}
                client: Any
                try:
                    if kind == "sync":
                        client = MCPClient(url, **options)
                        shown += [repr(client), repr(client._engine.endpoints.sites)]
                        with client:
                            client.infer([1.0])
                    else:
                        client = AsyncMCPClient(url, **options)
                        shown += [repr(client), repr(client._engine.endpoints.sites)]
                        asyncio.run(client.infer([1.0]))
                except MCPError as error:
                    shown += [str(error), repr(error), repr(error.__dict__)]
    assert any(record.name.startswith("mcp_client") for record in caplog.records)
    shown += [record.getMessage() + repr(record.args) for record in caplog.records]
    assert not [line for line in shown if SECRET in line]


def test_a_redirect_is_an_error_and_carries_nothing_along(raw_server: Callable[..., RawServer]) -> None:
    reached: list[Any] = []
    elsewhere = raw_server(lambda c: reached.append(read_request(c)))
    running = raw_server(
        lambda c: (read_request(c), respond(c, 307, b"", Location=elsewhere.url + "/v2?token=abc"))
    )
    for protocol in ("auto", "mcp", "oip"):
        with (
            MCPClient(running.url, model="m", api_key=SECRET, protocol=protocol) as client,
            pytest.raises(ServerError, match=f"redirects to {elsewhere.url}") as caught,
        ):
            client.infer([1.0])
        assert caught.value.status == 307
    assert not reached
