"""Where models come from: an ``mcp-server``, a file or a manifest at any URL, or a folder. What each has, and how to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urljoin, urlsplit

import orjson

from .._httpx import httpx
from ..errors import (
    ConfigurationError,
    ConnectionFailedError,
    NotFoundError,
    ProtocolError,
    ServerError,
    listed,
)
from .contents import files_of
from .download import FileOrigin, HttpOrigin, Origin, require_no_downgrade
from .repository import (
    MODEL_FILE,
    PLAIN_VERSION,
    ModelFile,
    ModelRepository,
    inside,
    is_digest,
    parse_digests,
)
from .signing import MAX_SIGNATURE_BYTES, read_signature

MANIFEST_FILE = "models.json"
_MAX_TEXT_BYTES = 16 * 2**20  # of a manifest; a .sha256 has a line a file


@dataclass(frozen=True, slots=True)
class Announced:
    """What a source says of a model. ``files``: name → (digest, bytes or ``None``) of every file it consists of, in the
    names that they have here; ``urls``: of those that do not lie where they would be looked for. ``signature``: base64.
    """

    model: str
    version: str
    files: Mapping[str, tuple[str, int | None]]
    signature: str = ""
    urls: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Of the model file."""
        return self.files[MODEL_FILE][0]

    @property
    def digests(self) -> dict[str, str]:
        """Of every file."""
        return {name: digest for name, (digest, _) in self.files.items()}


class Source(Protocol):
    """What a sync needs of a place that has models."""

    def models(self) -> list[str]:
        """The ids of all models there."""

    def announced(self, model: str) -> Announced:
        """The version of a model that counts there."""

    def origin(self, announced: Announced, name: str) -> Origin:
        """One of its files."""


def open_source(where: str, http: httpx.Client | None) -> Source:
    """The source at ``where``: ``http(s)://…``: a model file if it ends with ``.onnx``, a manifest if it ends with
    ``.json``, else an ``mcp-server``; anything else, and ``file://…``, is a folder of models, which needs no ``http``.
    """
    if where.startswith("file://"):
        return FolderSource(Path(unquote(urlsplit(where).path)))
    if not where.startswith(("http://", "https://")):
        if "://" in where:
            raise ConfigurationError(f"models come from http(s)://… or from a folder; got {where!r}")
        return FolderSource(Path(where))
    assert http is not None
    path = urlsplit(where).path
    if path.endswith(".onnx"):
        return FileUrlSource(where, http)
    if path.endswith(".json"):
        return ManifestSource(where, http)
    return ServerSource(where, http)


class ServerSource:
    """An ``mcp-server``: ``/v1/models`` and what lies below."""

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._base = url.rstrip("/")
        self._http = http

    def models(self) -> list[str]:
        return [entry["id"] for entry in _entries(_json(self._http, f"{self._base}/v1/models"), self._base)]

    def announced(self, model: str) -> Announced:
        document = _json(self._http, f"{self._base}/v1/models/{quote(model, safe='')}")
        return _announced({**document, "id": model}, f"the server {self._base}")

    def origin(self, announced: Announced, name: str) -> Origin:
        params = {"version": announced.version} | ({"name": name} if name != MODEL_FILE else {})
        url = f"{self._base}/v1/models/{quote(announced.model, safe='')}/file"
        etag = f'"{announced.files[name][0].removeprefix("sha256:")}"'
        return HttpOrigin(self._http, url, params=params, etag=etag)


class ManifestSource:
    """A JSON file at a URL that says which models there are: ``{"models": [{"id", "version", "files": [{"name", "digest",
    "size"}], "signature"}]}``, as ``mcp-client models seal`` writes it. A file lies at ``{id}/{version}/{name}`` beside the
    manifest, or at its own ``"url"``.
    """

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._url = url
        self._http = http
        self._models: dict[str, Any] | None = None  # asked for once a sync

    def models(self) -> list[str]:
        return list(self._read())

    def announced(self, model: str) -> Announced:
        models = self._read()
        if model not in models:
            raise NotFoundError(
                f"{self._url} has no model {model!r}; it has {listed(list(models))}", status=404
            )
        return _announced(models[model], self._url)

    def origin(self, announced: Announced, name: str) -> Origin:
        beside = "/".join(
            quote(part, safe="") for part in (announced.model, announced.version, *name.split("/"))
        )
        url = urljoin(self._url, announced.urls.get(name, beside))
        if (
            urlsplit(url)[:2] != urlsplit(self._url)[:2]
        ):  # the client's credentials are for the manifest's host
            raise ProtocolError(
                f"{self._url} names {url!r}, which is on another host; let that one redirect, or have its own"
            )
        return HttpOrigin(self._http, url, redirects=True)

    def _read(self) -> dict[str, Any]:
        if self._models is None:
            document = _json(self._http, self._url, redirects=True)
            self._models = {entry["id"]: entry for entry in _entries(document, self._url)}
        return self._models


class FileUrlSource:
    """One ``.onnx`` file at a URL, with its ``.sha256`` beside it, which also names its external-data files beside it.

    ``…/{id}/{version}/model.onnx`` says which model and version it is; ``…/{id}.onnx`` is version "1".
    """

    def __init__(self, url: str, http: httpx.Client) -> None:
        self._url = httpx.URL(url)
        self._http = http
        *above, self._file = [part for part in self._url.path.split("/") if part]
        self._is = (self._file.removesuffix(".onnx"), PLAIN_VERSION)
        if self._file == MODEL_FILE and len(above) >= 2:
            self._is = (above[-2], above[-1])

    def models(self) -> list[str]:
        return [self._is[0]]

    def announced(self, model: str) -> Announced:
        if model != self._is[0]:
            raise NotFoundError(f"{self._url} is the model {self._is[0]!r}, not {model!r}", status=404)
        sums = self._beside(self._file + ".sha256")
        try:
            text = _get(self._http, sums, redirects=True).decode("utf-8", "replace")
        except NotFoundError:
            raise NotFoundError(
                f"{sums} is not there: a model is downloaded only with its SHA-256, as sha256sum {self._file} writes it",
                status=404,
            ) from None
        digests = parse_digests(text, self._file, sums)
        files: dict[str, tuple[str, int | None]] = {MODEL_FILE: (digests.pop(self._file), None)}
        files |= {name: (digest, None) for name, digest in digests.items()}
        try:
            signature = _get(self._http, self._beside(self._file + ".sha256.sig"), redirects=True)
        except NotFoundError:
            signature = b""
        return Announced(*self._is, files, signature[:MAX_SIGNATURE_BYTES].decode("ascii", "replace").strip())

    def origin(self, announced: Announced, name: str) -> Origin:
        return HttpOrigin(
            self._http, self._beside(self._file if name == MODEL_FILE else name), redirects=True
        )

    def _beside(self, name: str) -> str:
        folder = self._url.raw_path.decode("ascii").partition("?")[0].rpartition("/")[0]
        path = f"{folder}/{quote(name)}"
        query = self._url.query  # a token that the whole folder asks for
        return str(self._url.copy_with(raw_path=path.encode() + (b"?" + query if query else b"")))


class FolderSource:
    """A folder of models, or one ``.onnx`` file, on this machine: a stick, a mounted share."""

    def __init__(self, path: Path) -> None:
        self._repository = ModelRepository.open(path)
        self._found: dict[str, ModelFile] = {}

    def models(self) -> list[str]:
        return self._repository.models()

    def announced(self, model: str) -> Announced:
        found = self._repository.resolve(model)
        files: dict[str, tuple[str, int | None]] = {}
        for name, path in files_of(found.path).items():
            files[name] = (self._repository.digest(path), path.stat().st_size)
        self._found[model] = found
        return Announced(found.model, found.version, files, read_signature(found.path))

    def origin(self, announced: Announced, name: str) -> Origin:
        path = self._found[announced.model].path
        return FileOrigin(path if name == MODEL_FILE else inside(path.parent, name))


def write_manifest(repository: ModelRepository) -> Path:
    """Write ``models.json`` of what counts in a folder, for ``ManifestSource``; its path. Every version must be
    ``{id}/{version}/model.onnx``: single files are left out.
    """
    source = FolderSource(repository.root)
    entries = []
    for model in repository.models():
        found = source.announced(model)
        if not (repository.folder(model, found.version) / MODEL_FILE).is_file():
            continue
        files = [
            {"name": name, "digest": digest, "size": size} for name, (digest, size) in found.files.items()
        ]
        entries.append({"id": model, "version": found.version, "files": files, "signature": found.signature})
    path = repository.root / MANIFEST_FILE
    fresh = path.with_name(MANIFEST_FILE + ".new")
    fresh.write_bytes(orjson.dumps({"models": entries}, option=orjson.OPT_INDENT_2) + b"\n")
    fresh.replace(path)
    return path


# --- what a source says, checked ----------------------------------------------------------------------------


def _announced(document: Mapping[str, Any], where: str) -> Announced:
    """One entry of a manifest, or what a server says of a model."""
    model, version, entries = document.get("id"), document.get("version"), document.get("files") or []
    if not isinstance(entries, list) or not all(map(_is_file, entries)):
        raise ProtocolError(
            f"{where}: the list of files of model {model!r} is malformed: {str(entries)[:200]}"
        )
    files = {entry["name"]: (entry["digest"], entry.get("size")) for entry in entries}
    digest = document.get("digest", files.get(MODEL_FILE, ("",))[0])
    if not isinstance(version, str) or not version or not is_digest(digest):
        raise ProtocolError(
            f"{where} announces model {model!r} with version {version!r} and digest {digest!r}; a model is downloaded only "
            "with a version and a digest (sha256:…)"
        )
    own = next((name for name, (found, _) in files.items() if found == digest), MODEL_FILE)
    files = {MODEL_FILE: files.pop(own, (digest, None)), **files}
    signature = document.get("signature") or ""
    if not isinstance(signature, str) or len(signature) > MAX_SIGNATURE_BYTES:
        raise ProtocolError(f"{where}: the signature of model {model!r} is malformed: {str(signature)[:200]}")
    urls = {entry["name"]: entry["url"] for entry in entries if isinstance(entry.get("url"), str)}
    return Announced(str(model), version, files, signature, urls)


def _is_file(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and is_digest(entry.get("digest"))
        and isinstance(entry.get("size"), int | None)
    )


def _entries(document: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    models = document.get("models")
    if not isinstance(models, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("id"), str) for entry in models
    ):
        raise ProtocolError(f'{where} must answer {{"models": [{{"id": "…"}}, …]}}; got {str(models)[:200]}')
    return models


def _json(http: httpx.Client, url: str, *, redirects: bool = False) -> dict[str, Any]:
    body = _get(http, url, redirects=redirects)
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"{url} did not answer with JSON: {error}") from error
    if not isinstance(document, dict):
        raise ProtocolError(f"{url} must answer with a JSON object; got {type(document).__name__}")
    return document


def _get(http: httpx.Client, url: str, *, redirects: bool = False) -> bytes:
    """What a URL answers with, ``_MAX_TEXT_BYTES`` of it at most."""
    body = bytearray()
    try:
        with http.stream("GET", url, follow_redirects=redirects) as response:
            require_no_downgrade(url, response)
            for chunk in response.iter_bytes():
                body += chunk
                if len(body) > _MAX_TEXT_BYTES:
                    raise ProtocolError(
                        f"{url} answered with more than {_MAX_TEXT_BYTES} bytes; it was not used"
                    )
    except httpx.HTTPError as error:
        raise ConnectionFailedError(f"{url} could not be reached: {error!r}") from error
    if response.status_code == 404:
        raise NotFoundError(f"{url} is not there: no such model, or no server of MCP 2026", status=404)
    if response.status_code != 200:
        said = bytes(body[:200]).decode("utf-8", "replace")
        raise ServerError.of(response.status_code, f"{url} answered {response.status_code}: {said}")
    return bytes(body)
