"""Who made a model: an Ed25519 signature over its id, its version and the SHA-256 of each of its files.

A digest that comes from the same place as the file shows that nothing broke on the way, not that nobody put another file
there. A signature by a key that the place does not have shows that as well; and since the id and the version are part of
what is signed, one model can't be passed off as another. (An older version that was signed once stays signed.)
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, IntegrityError, MissingExtraError
from .contents import digests_of
from .repository import DIGEST_FILE, MODEL_FILE, ModelRepository

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE_FILE = DIGEST_FILE + ".sig"  # 64 bytes in base64, and a newline
MAX_SIGNATURE_BYTES = 1024


def statement(model: str, version: str, digests: Mapping[str, str]) -> bytes:
    """What is signed; ``digests``: file name → ``sha256:…`` of every file of the version.

    ``mcp-model-1``, the id, the version, then the lines of ``sha256sum`` in the order of the names; each ends with a newline.
    """
    lines = [f"{digests[name].removeprefix('sha256:')}  {name}" for name in sorted(digests)]
    return "".join(f"{line}\n" for line in ("mcp-model-1", model, version, *lines)).encode()


class PublicKey:
    """Checks signatures. ``key``: a PEM file, or the text of one (``openssl pkey -in key.pem -pubout``).

    Raises ``ConfigurationError`` for anything but an Ed25519 public key, ``MissingExtraError`` without ``cryptography``.
    """

    def __init__(self, key: str | os.PathLike[str]) -> None:
        serialization, ed25519 = _cryptography()
        pem, what = _pem(key)
        try:
            found = serialization.load_pem_public_key(pem)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(f"{what} is no public key in PEM form: {error}") from error
        if not isinstance(found, ed25519.Ed25519PublicKey):
            raise ConfigurationError(f"{what} is a {type(found).__name__}; expected an Ed25519 public key")
        self._key: Ed25519PublicKey = found

    def check(self, model: str, version: str, digests: Mapping[str, str], signature: str) -> None:
        """Raises ``IntegrityError`` unless ``signature`` (base64) is this key's for exactly this."""
        from cryptography.exceptions import InvalidSignature

        if not signature:
            raise IntegrityError(
                f"version {version!r} of {model!r} is not signed, and a public key was given; it was not used: sign it with "
                "mcp-client models seal --key where it is made"
            )
        try:
            raw = base64.b64decode(signature, validate=True)
            self._key.verify(raw, statement(model, version, digests))
        except (InvalidSignature, binascii.Error, ValueError):
            raise IntegrityError(
                f"the signature of version {version!r} of {model!r} is not by this key for these files; it was not used: "
                "where it came from may have been tampered with"
            ) from None

    def check_here(self, repository: ModelRepository, model: str, version: str) -> None:
        """The same for a version on disk."""
        found = repository.resolve(model, version)
        self.check(model, version, digests_of(repository, found), read_signature(found.path))


def seal(
    repository: ModelRepository, model: str, version: str, key: str | os.PathLike[str] | None = None
) -> dict[str, str]:
    """Write the ``.sha256`` of a version, of all its files, and with ``key`` its signature; name → digest of each file.

    ``key``: a PEM file of an Ed25519 private key without a password (``openssl genpkey -algorithm ed25519 -out key.pem``),
    or its text. Raises ``IntegrityError`` if there is a ``.sha256`` already and a file is not what it says.
    """
    found = repository.resolve(model, version)
    digests = digests_of(repository, found)
    names = {**{name: name for name in digests}, MODEL_FILE: found.path.name}
    lines = [f"{digest.removeprefix('sha256:')}  {names[name]}\n" for name, digest in digests.items()]
    _replace(found.path.with_name(found.path.name + ".sha256"), "".join(lines))
    if key is not None:
        signature = _private(key).sign(statement(model, version, digests))
        _replace(signature_path(found.path), base64.b64encode(signature).decode() + "\n")
    return digests


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(text, "utf-8")
    fresh.replace(path)


def _private(key: str | os.PathLike[str]) -> Ed25519PrivateKey:
    serialization, ed25519 = _cryptography()
    pem, what = _pem(key)
    try:
        found = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"{what} is no private key in PEM form without a password: {error}"
        ) from error
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise ConfigurationError(f"{what} is a {type(found).__name__}; expected an Ed25519 private key")
    private: Ed25519PrivateKey = found
    return private


def signature_path(model_file: Path) -> Path:
    """Where the signature of a version lies: beside its ``.sha256``."""
    return model_file.with_name(model_file.name + ".sha256.sig")


def read_signature(model_file: Path) -> str:
    """The signature beside a model, in base64; "" if there is none."""
    try:
        with signature_path(model_file).open("rb") as file:
            return file.read(MAX_SIGNATURE_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return ""


def _pem(key: str | os.PathLike[str]) -> tuple[bytes, str]:
    if isinstance(key, str) and key.lstrip().startswith("-----BEGIN"):
        return key.encode(), "the key"
    try:
        return Path(key).read_bytes(), str(key)
    except OSError as error:
        raise ConfigurationError(f"the key {os.fspath(key)!r} can't be read: {error}") from error


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingExtraError("sign", "cryptography", "signatures of models") from error
    return serialization, ed25519
