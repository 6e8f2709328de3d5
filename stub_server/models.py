"""The models that are served: found on disk, loaded, chosen by id and version, and loaded again or unloaded
on request."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mcp_client.errors import ConfigurationError, MCPError, ServerError, listed
from mcp_client.protocols.oip_http import IndexEntry
from mcp_client.tensors import Array, ModelMetadata

PLATFORM = "onnxruntime_onnx"


class Runnable(Protocol):
    """What runs a model; safe to call from several threads. ``mcp_client.edge.runtime.OnnxModel`` is one."""

    @property
    def metadata(self) -> ModelMetadata: ...
    def run(self, inputs: Mapping[str, Array], outputs: tuple[str, ...] = ()) -> dict[str, Array]: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """One version of a model, ready to run. ``stamp`` tells whether the file is still the one that was
    loaded."""

    metadata: ModelMetadata
    path: Path
    stamp: tuple[int, int, int]
    runnable: Runnable


class Models:
    """Every model under a path: one ``.onnx`` file, a folder of them, or ``{id}/{version}/model.onnx``.
    Thread-safe.

    A file on its own is version "1" of the model named after it. The default version is the highest. A single
    file that can't be loaded is a ``ConfigurationError``; in a folder it is UNAVAILABLE, with the reason in
    the index.
    """

    def __init__(self, root: str | os.PathLike[str], load: Callable[[Path], Runnable]) -> None:
        self._root = Path(root)
        self._load = load
        self._lock = threading.Lock()  # guards the three below; every change is made by replacing values
        self._found: dict[str, dict[str, Path]] = {}
        self._loaded: dict[str, dict[str, Loaded]] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._found = self._find()
        if not self._found:
            raise ConfigurationError(
                f"{self._root} holds no model; expected a .onnx file, a folder of them, or a folder of "
                "ID/VERSION/model.onnx"
            )
        for name in self._found:
            self.load(name)
        if self._root.is_file() and self._reasons:
            raise ConfigurationError(f"{self._root} can't be served: {next(iter(self._reasons.values()))}")

    def _find(self) -> dict[str, dict[str, Path]]:
        if self._root.is_file():
            return {self._root.stem: {"1": self._root}}
        if not self._root.is_dir():
            raise ConfigurationError(
                f"{self._root} does not exist; expected a .onnx file or a folder of models"
            )
        found: dict[str, dict[str, Path]] = {
            path.stem: {"1": path} for path in sorted(self._root.glob("*.onnx"))
        }
        for path in sorted(self._root.glob("*/*/model.onnx")):
            found.setdefault(path.parts[-3], {})[path.parts[-2]] = path
        return found

    def load(self, name: str) -> None:
        """Load (again) every version of a model that is on disk now, and serve the new ones in place of the
        old."""
        found = self._find()
        if name not in found:
            raise _no_such_model(name, list(found))
        loaded: dict[str, Loaded] = {}
        reasons: dict[tuple[str, str], str] = {}
        for version, path in found[name].items():
            try:
                loaded[version] = self._load_one(name, version, path)
            except (MCPError, OSError) as error:
                reasons[name, version] = str(error)
        with self._lock:
            self._found[name] = found[name]
            self._loaded[name] = loaded
            self._reasons = {key: why for key, why in self._reasons.items() if key[0] != name} | reasons

    def _load_one(self, name: str, version: str, path: Path) -> Loaded:
        stamp = stamp_of(path)
        with path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        runnable = self._load(path)
        metadata = replace(runnable.metadata, name=name, version=version, platform=PLATFORM, digest=digest)
        return Loaded(metadata, path, stamp, runnable)

    def unload(self, name: str) -> None:
        """Serve a model no more until it is loaded again; calls that run now end as usual."""
        with self._lock:
            if name not in self._found:
                raise _no_such_model(name, list(self._found))
            self._loaded[name] = {}
            self._reasons |= {(name, version): "unloaded" for version in self._found[name]}

    def get(self, name: str, version: str = "") -> Loaded:
        """The version asked for (default: the highest) of the model asked for (default: the only one)."""
        with self._lock:
            if not name:
                if len(self._found) != 1:
                    raise ServerError.of(
                        400,
                        f'name a "model": this server has {listed(list(self._found))}',
                        code="model_required",
                    )
                name = next(iter(self._found))
            if name not in self._found:
                raise _no_such_model(name, list(self._found))
            versions = self._loaded[name]
            if not versions and not version:
                why = next((why for key, why in self._reasons.items() if key[0] == name), "not loaded")
                raise ServerError.of(503, f"model {name!r} is not available: {why}", code="model_unavailable")
            chosen = version or max(versions, key=_by_number)
            if chosen in versions:
                return versions[chosen]
            if chosen in self._found[name]:
                why = self._reasons.get((name, chosen), "not loaded")
                raise ServerError.of(
                    503,
                    f"version {chosen!r} of model {name!r} is not available: {why}",
                    code="model_unavailable",
                )
            there = listed(sorted(self._found[name], key=_by_number))
            raise ServerError.of(
                404, f"model {name!r} has no version {chosen!r}; it has {there}", code="version_not_found"
            )

    def describe(self, name: str, version: str = "") -> ModelMetadata:
        """A model's metadata with the versions that are ready now."""
        metadata = self.get(name, version).metadata
        with self._lock:
            ready = tuple(sorted(self._loaded[metadata.name], key=_by_number))
        return replace(metadata, versions=ready)

    def ready(self) -> list[str]:
        """The ids of the models that have a version ready to run."""
        with self._lock:
            return sorted(name for name, versions in self._loaded.items() if versions)

    def index(self) -> list[IndexEntry]:
        """Every model version there is, and its state."""
        with self._lock:
            return [
                IndexEntry(name, version, "READY")
                if version in self._loaded[name]
                else IndexEntry(
                    name, version, "UNAVAILABLE", self._reasons.get((name, version), "not loaded")
                )
                for name, versions in sorted(self._found.items())
                for version in sorted(versions, key=_by_number)
            ]


def stamp_of(path: Path) -> tuple[int, int, int]:
    """What changes when a file does: inode, size and modification time."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _by_number(version: str) -> tuple[int, str]:
    return (int(version), "") if version.isascii() and version.isdigit() else (-1, version)


def _no_such_model(name: str, there: list[str]) -> ServerError:
    return ServerError.of(404, f"no model {name!r}; this server has {listed(there)}", code="model_not_found")
