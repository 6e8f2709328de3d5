"""Bring the models of a server onto this machine: only what changed, checked before it is used, whole or
not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .._httpx import httpx
from ..errors import (
    ConfigurationError,
    ConnectionFailedError,
    EdgeError,
    IntegrityError,
    MCPError,
    NotFoundError,
    ProtocolError,
    ServerError,
)
from .download import download
from .labels import LABELS_FILE
from .onnx_file import external_files
from .repository import DIGEST_FILE, MODEL_FILE, ModelRepository, inside, is_digest
from .staging import Staging, locked, private_folder

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync did. ``downloaded`` and ``unchanged``: model → version; ``failed``: model → why.
    ``bytes`` came over the wire.
    """

    downloaded: Mapping[str, str]
    unchanged: Mapping[str, str]
    failed: Mapping[str, MCPError]
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Announced:
    """What the server says of a model. ``files``: name → (digest, bytes) of every file it consists of."""

    model: str
    version: str
    digest: str
    files: Mapping[str, tuple[str, int]] = field(default_factory=dict)


def sync(
    repository: ModelRepository,
    base_url: str,
    *,
    http: httpx.Client,
    models: Sequence[str] | None = None,
    progress: Progress | None = None,
) -> SyncReport:
    """Download the current version of each model (``models``: only these) that is not here yet or is another
    one here.

    A model that fails is reported and costs the others nothing; what was here of it stays as it was, and its
    download goes on where it broke off at the next sync. ``progress(what, bytes_done, bytes_total)`` is
    called as bytes come in. Raises ``ConnectionFailedError`` or ``ServerError`` if the server can't even be
    asked what it has.
    """
    if repository.root.is_file():
        raise ConfigurationError(
            f"{repository.root} is a single model file; sync needs a folder to put models in"
        )
    base = base_url.rstrip("/")
    if models is None:
        models = _model_ids(http, base)
    downloaded: dict[str, str] = {}
    unchanged: dict[str, str] = {}
    failed: dict[str, MCPError] = {}
    received = 0
    private_folder(repository.root)
    for model in dict.fromkeys(models):
        try:
            announced = _announced(http, base, model)
            if _is_here(repository, announced) and repository.followed(model) == announced.version:
                unchanged[model] = announced.version
                continue
            with locked(repository.root):
                here = _is_here(repository, announced)  # another process may have been quicker
                if not here:
                    received += _fetch(http, base, repository, announced, progress)
                repository.follow(model, announced.version)
            (unchanged if here else downloaded)[model] = announced.version
        except MCPError as error:
            failed[model] = error
        except OSError as error:
            failed[model] = EdgeError(f"{repository.root} can't be written: {error}")
    return SyncReport(downloaded, unchanged, failed, received)


def _is_here(repository: ModelRepository, announced: _Announced) -> bool:
    repository.folder(
        announced.model, announced.version
    )  # names from the server, refused before anything is asked of it
    if announced.version not in repository.versions(announced.model):
        return False
    try:
        return repository.resolve(announced.model, announced.version).digest == announced.digest
    except IntegrityError:
        return False  # damaged: it is fetched again


def _fetch(
    http: httpx.Client,
    base: str,
    repository: ModelRepository,
    announced: _Announced,
    progress: Progress | None,
) -> int:
    """Download a model with all its files and put it in place; the bytes that came. The lock is held."""
    staging = Staging(repository, announced.model, announced.version, announced.digest)
    url = f"{base}/v1/models/{quote(announced.model, safe='')}/file"
    what = f"{announced.model} {announced.version}"

    def get(name: str, target: Path, digest: str, size: int | None) -> int:
        params = {"version": announced.version} | ({"name": name} if name else {})
        told = (
            None if progress is None else lambda done, total: progress(f"{what} {name}".rstrip(), done, total)
        )
        return download(http, url, target, digest=digest, size=size, params=params, progress=told)

    model_file = staging.folder / MODEL_FILE
    received = 0
    digests = {MODEL_FILE: announced.digest}
    try:
        sizes = dict(announced.files.values())
        if not model_file.exists():
            received += get("", model_file, announced.digest, sizes.get(announced.digest))
        labels = [LABELS_FILE] if LABELS_FILE in announced.files else []
        for name in [*external_files(model_file), *labels]:
            file = inside(staging.folder, name)
            if name in (MODEL_FILE, DIGEST_FILE) or name.endswith(".part"):
                raise IntegrityError(f"a model can't keep its tensors in a file named {name!r}")
            if name not in announced.files:
                raise ProtocolError(
                    f"model {announced.model!r} needs the file {name!r}, which the server does not announce"
                )
            digests[name], size = announced.files[name]
            if not file.exists():
                private_folder(file.parent)
                received += get(name, file, digests[name], size)
    except IntegrityError:
        staging.discard()
        raise
    staging.publish(digests)
    return received


# --- what the server has ------------------------------------------------------------------------------------


def _model_ids(http: httpx.Client, base: str) -> list[str]:
    models = _get(http, f"{base}/v1/models").get("models")
    if not isinstance(models, list) or not all(
        isinstance(m, dict) and isinstance(m.get("id"), str) for m in models
    ):
        raise ProtocolError(
            f'{base}/v1/models must answer {{"models": [{{"id": "…"}}, …]}}; got {str(models)[:200]}'
        )
    return [model["id"] for model in models]


def _announced(http: httpx.Client, base: str, model: str) -> _Announced:
    document = _get(http, f"{base}/v1/models/{quote(model, safe='')}")
    version, digest, files = document.get("version"), document.get("digest"), document.get("files", [])
    if not isinstance(version, str) or not version or not is_digest(digest):
        raise ProtocolError(
            f"the server announces model {model!r} with version {version!r} and digest {digest!r}; a model is downloaded "
            "only with a version and a digest (sha256:…)"
        )
    if not isinstance(files, list) or not all(map(_is_file, files)):
        raise ProtocolError(f"the server's list of files of model {model!r} is malformed: {str(files)[:200]}")
    return _Announced(model, version, digest, {f["name"]: (f["digest"], f["size"]) for f in files})


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and is_digest(entry.get("digest"))
        and isinstance(entry.get("size"), int)
    )


def _get(http: httpx.Client, url: str) -> dict[str, Any]:
    try:
        response = http.get(url, headers={"Accept": "application/json"})
    except httpx.HTTPError as error:
        raise ConnectionFailedError(f"{url} could not be reached: {error!r}") from error
    if response.status_code == 404:
        raise NotFoundError(f"{url} is not there: no such model, or no server of MCP 2026", status=404)
    if response.status_code != 200:
        raise ServerError.of(
            response.status_code, f"{url} answered {response.status_code}: {response.text[:200]}"
        )
    try:
        document = response.json()
    except ValueError as error:
        raise ProtocolError(f"{url} did not answer with JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"{url} must answer with a JSON object; got {type(document).__name__}")
    return document
