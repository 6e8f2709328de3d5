"""Signed models: what the key did not sign is not used, wherever it comes from; nothing signed can be passed off as another."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from typer.testing import CliRunner

from mcp_client.cli.models import app
from mcp_client.edge.repository import ModelRepository
from mcp_client.edge.signing import PublicKey, seal, statement
from mcp_client.edge.sync import sync
from mcp_client.errors import ConfigurationError, IntegrityError, MCPError
from tests import models
from tests.conftest import RawServer
from tests.edge.test_sources import Offer

Start = Callable[[Any], RawServer]


def key_pair(folder: Path, name: str = "key", private: Any = None) -> tuple[Path, Path]:
    """Files of a private key and of its public key."""
    private = private or ed25519.Ed25519PrivateKey.generate()
    secret, public = folder / f"{name}.pem", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    secret.write_bytes(
        private.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    public.write_bytes(
        private.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    return secret, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return key_pair(tmp_path)


@pytest.fixture
def repository(tmp_path: Path) -> ModelRepository:
    return ModelRepository(tmp_path / "edge")


class Place:
    """Where signed models can be had; ``where`` after every change, as an ``mcp-server`` has to be started anew."""

    def __init__(self, kind: str, tmp_path: Path, raw_server: Start, stub_server: Callable[..., Any]) -> None:
        self.offer = Offer("folder" if kind == "server" else kind, tmp_path / "offered", raw_server)
        self.root = self.offer.root
        self._kind = kind
        self._stub_server = stub_server

    def where(self) -> str:
        return self._stub_server(self.root).url if self._kind == "server" else self.offer.where


@pytest.fixture(params=["server", "file", "manifest", "folder"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, raw_server: Start, stub_server: Callable[..., Any]
) -> Place:
    return Place(request.param, tmp_path, raw_server, stub_server)


def test_what_is_signed_comes_over_and_can_be_checked_here_and_passed_on(
    place: Place, keys: tuple[Path, Path], repository: ModelRepository, tmp_path: Path
) -> None:
    secret, public = keys
    place.offer.put("1", 1.0, external=True, key=secret)
    where = place.where()
    assert sync(repository, where, public_key=public).downloaded == {"m": "1"}
    assert sync(repository, where, public_key=public).unchanged == {"m": "1"}
    PublicKey(public.read_text()).check_here(repository, "m", "1")
    onwards = ModelRepository(tmp_path / "onwards")
    assert sync(onwards, str(repository.root), public_key=public).downloaded == {"m": "1"}


def test_a_signature_that_comes_later_is_all_that_is_fetched(
    place: Place, keys: tuple[Path, Path], repository: ModelRepository
) -> None:
    secret, public = keys
    place.offer.put("1", 1.0, external=True)
    where = place.where()
    assert sync(repository, where).downloaded == {"m": "1"}
    assert "not signed" in str(sync(repository, where, public_key=public).failed["m"])
    place.offer.seal("1", secret)
    report = sync(repository, place.where(), public_key=public)
    assert (report.downloaded, report.bytes) == ({"m": "1"}, 0)
    PublicKey(public).check_here(repository, "m", "1")


def others_model(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """A file of another's, with digests that fit and the old signature."""
    signature = (place.root / "m" / "2" / "model.onnx.sha256.sig").read_bytes()
    place.offer.put("2", 666.0)
    (place.root / "m" / "2" / "model.onnx.sha256.sig").write_bytes(signature)


def unsigned(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    place.offer.put("2", 666.0)


def another_key(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    place.offer.put("2", 666.0, key=key_pair(tmp_path, "thief")[0])


def another_version(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """What was signed as version 1, offered as version 2."""
    shutil.rmtree(place.root / "m" / "2")
    shutil.copytree(place.root / "m" / "1", place.root / "m" / "2")


def another_model(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """What was signed as another model."""
    models.affine(place.root / "n" / "2" / "model.onnx", scale=666.0)
    seal(ModelRepository(place.root), "n", "2", keys[0])
    shutil.rmtree(place.root / "m" / "2")
    (place.root / "n").rename(tmp_path / "n")
    shutil.move(tmp_path / "n" / "2", place.root / "m" / "2")


def rubbish(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    (place.root / "m" / "2" / "model.onnx.sha256.sig").write_text("no base64!")


def another_smoke_input(place: Place, keys: tuple[Path, Path], tmp_path: Path) -> None:
    """A file put beside what was signed."""
    np.savez(place.root / "m" / "2" / "smoke.npz", **{"inputs/x": np.ones((1, 3), np.float32)})


@pytest.mark.parametrize(
    "tamper",
    [others_model, unsigned, another_key, another_version, another_model, rubbish, another_smoke_input],
)
def test_a_tampered_mirror_is_refused_and_what_was_here_stays(
    place: Place,
    keys: tuple[Path, Path],
    repository: ModelRepository,
    tmp_path: Path,
    tamper: Callable[[Place, tuple[Path, Path], Path], None],
) -> None:
    secret, public = keys
    place.offer.put("1", 1.0, key=secret)
    assert sync(repository, place.where(), public_key=public).downloaded == {"m": "1"}
    place.offer.put("2", 2.0, key=secret)
    tamper(place, keys, tmp_path)
    sign_of = place.root / "m" / "2" / "model.onnx.sha256.sig"
    kept = sign_of.read_bytes() if sign_of.exists() else None
    place.offer.seal("2")  # digests and manifest that fit; the signature stays what it is
    if kept is not None:
        assert sign_of.read_bytes() == kept
    report = sync(repository, place.where(), models=["m"], public_key=public)
    assert isinstance(report.failed["m"], IntegrityError)
    assert repository.versions("m") == ["1"]
    assert report.bytes == 0
    assert sync(repository, place.where(), models=["m"]).downloaded == {
        "m": "2"
    }  # without a key nobody looks


def test_openssl_makes_keys_and_checks_what_was_signed(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    secret, public = tmp_path / "key.pem", tmp_path / "key.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", secret], check=True)
    subprocess.run(["openssl", "pkey", "-in", secret, "-pubout", "-out", public], check=True)
    models.external(tmp_path / "models" / "m" / "1" / "model.onnx")
    repository = ModelRepository(tmp_path / "models")
    digests = seal(repository, "m", "1", secret)
    sums = (tmp_path / "models" / "m" / "1" / "model.onnx.sha256").read_text()
    said = "mcp-model-1\nm\n1\n" + "".join(sorted(sums.splitlines(True), key=lambda line: line[66:]))
    assert statement("m", "1", digests) == said.encode()
    (tmp_path / "said").write_text(said)
    signature = (tmp_path / "models" / "m" / "1" / "model.onnx.sha256.sig").read_text()
    (tmp_path / "raw").write_bytes(base64.b64decode(signature))
    command = "openssl pkeyutl -verify -pubin -inkey key.pub -rawin -in said -sigfile raw"
    subprocess.run(command.split(), check=True, cwd=tmp_path, stdout=subprocess.DEVNULL)
    assert subprocess.run(["sha256sum", "-c", "model.onnx.sha256"], cwd=tmp_path / "models/m/1", check=True)


def test_only_ed25519_keys_are_taken(tmp_path: Path, repository: ModelRepository) -> None:
    secret, public = key_pair(tmp_path, "ec", ec.generate_private_key(ec.SECP256R1()))
    models.affine(repository.root / "m" / "1" / "model.onnx")
    for key in (public, secret, tmp_path / "missing", "-----BEGIN RUBBISH-----"):
        with pytest.raises(ConfigurationError):
            PublicKey(key)
        with pytest.raises(ConfigurationError):
            seal(repository, "m", "1", key)


def test_without_cryptography_it_says_which_extra_is_missing() -> None:
    code = """
import sys
sys.modules["cryptography.hazmat.primitives"] = None
from mcp_client.edge.signing import PublicKey
try:
    PublicKey("-----BEGIN PUBLIC KEY-----")
except Exception as error:
    print(type(error).__name__, error)
import mcp_client.edge.sync
assert "cryptography.hazmat.primitives.asymmetric.ed25519" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("MissingExtraError")
    assert "mcp2026[sign]" in done.stdout


def test_a_damaged_file_is_never_sealed(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    path = models.affine(tmp_path / "m" / "1" / "model.onnx")
    repository = ModelRepository(tmp_path)
    seal(repository, "m", "1")
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(MCPError, match="it was not used"):
        seal(repository, "m", "1", keys[0])


def run(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, (result.output, result.exception)
    return result.stdout


def test_commands_from_seal_to_verify(tmp_path: Path, keys: tuple[Path, Path]) -> None:
    secret, public = keys
    models.repository(tmp_path / "here", m={"1": 1.0, "2": 2.0})
    models.affine(tmp_path / "here" / "plain.onnx")
    here, there = ("--folder", tmp_path / "here"), ("--folder", tmp_path / "there")
    assert run("seal", *here).startswith("sealed m 1\nsealed m 2\nsealed plain 1\nwrote ")
    assert "not signed" in run("verify", *here, "--public-key", public, status=1)
    assert run("seal", *here, "--key", secret).startswith("signed m 1")
    assert run("verify", *here, "--public-key", public).count("intact") == 3
    said = run("sync", tmp_path / "here", *there, "--public-key", public)
    assert said == "downloaded m 2\ndownloaded plain 1\n"
    assert run("verify", *there, "--public-key", public).count("intact") == 2
    (tmp_path / "there" / "m" / "2" / "model.onnx.sha256.sig").write_text("AAAA")
    assert "not by this key" in run("verify", *there, "--public-key", public, status=1)
