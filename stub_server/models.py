"""The models that are served: found on disk, loaded, chosen by id and version, and loaded again or unloaded
on request."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from mcp_client.edge.contents import files_of
from mcp_client.edge.model import OnnxModel, Stamp, file_digest, file_stamp
from mcp_client.edge.repository import ModelRepository, version_order
from mcp_client.edge.signing import read_signature
from mcp_client.errors import ConfigurationError, EdgeError, ServerError, listed
from mcp_client.management import IndexEntry, ModelConfig
from mcp_client.tensors import ModelMetadata

from .override import NO_OVERRIDE, Override


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A file that may be downloaded. ``stamp`` tells whether it is still the one that was loaded."""

    path: Path
    digest: str
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class Loaded:
    """One version of a model, ready to run. ``files``: the model's and those that belong to it, by name. ``signature``:
    of whoever made it, handed on as it is.
    """

    model: OnnxModel
    files: Mapping[str, ServedFile]
    signature: str = ""

    @property
    def metadata(self) -> ModelMetadata:
        return self.model.metadata


class Models:
    """Every model under a path: one ``.onnx`` file, a folder of them, or ``{id}/{version}/model.onnx``.
    Thread-safe.

    A file on its own is version "1" of the model named after it. The default version is the highest. A single
    file that can't be loaded is a ``ConfigurationError``; in a folder it is UNAVAILABLE, with the reason in
    the index.
    """

    def __init__(self, root: str | os.PathLike[str], *, device: str = "cpu") -> None:
        self._repository = ModelRepository.open(root)
        self._device = device
        # Guards the four below. Every change replaces values, so that readers may keep what they got.
        self._lock = threading.Lock()
        self._found: dict[str, list[str]] = {}
        self._loaded: dict[str, dict[str, Loaded]] = {}
        self._reasons: dict[tuple[str, str], str] = {}
        self._overrides: dict[str, Override] = {}
        names = self._repository.models()
        if not names:
            raise ConfigurationError(
                f"{self._repository.root} holds no model; "
                "expected a .onnx file, a folder of them, or a folder of ID/VERSION/model.onnx"
            )
        for name in names:
            self.load(name)
        if self._repository.root.is_file() and self._reasons:
            raise ConfigurationError(next(iter(self._reasons.values())))

    def load(self, name: str, override: Override = NO_OVERRIDE) -> None:
        """Load (again) every version of a model that is on disk now, and serve the new ones in place of the
        old. ``override``: files and versions instead of the repository's, until the next load."""
        repository = override.repository(name) or self._repository
        versions = override.chosen(repository.versions(name))
        if not versions:
            raise _no_such_model(name, repository.models())
        loaded: dict[str, Loaded] = {}
        reasons: dict[tuple[str, str], str] = {}
        for version in versions:
            try:
                loaded[version] = self._load_one(repository, name, version)
            except EdgeError as error:
                reasons[name, version] = error.message
        with self._lock:
            self._found[name] = versions
            self._loaded[name] = loaded
            self._overrides[name] = override
            self._reasons = {key: why for key, why in self._reasons.items() if key[0] != name} | reasons

    def _load_one(self, repository: ModelRepository, name: str, version: str) -> Loaded:
        file = repository.resolve(name, version)
        stamp = file_stamp(file.path)
        model = OnnxModel(file.path, name=name, version=version, device=self._device, digest=file.digest)
        model.warm()
        files = {file.path.name: ServedFile(file.path, file.digest, stamp)}
        for part, path in files_of(file.path).items():
            if path != file.path:
                files[part] = ServedFile(path, file_digest(path), file_stamp(path))
        return Loaded(model, files, read_signature(file.path))

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
            chosen = version or max(versions, key=version_order)
            if chosen in versions:
                return versions[chosen]
            if chosen in self._found[name]:
                why = self._reasons.get((name, chosen), "not loaded")
                raise ServerError.of(
                    503,
                    f"version {chosen!r} of model {name!r} is not available: {why}",
                    code="model_unavailable",
                )
            there = listed(self._found[name])
            raise ServerError.of(
                404, f"model {name!r} has no version {chosen!r}; it has {there}", code="version_not_found"
            )

    def describe(self, name: str, version: str = "") -> ModelMetadata:
        """A model's metadata with the versions that are ready now, and its files (in ``extra``)."""
        loaded = self.get(name, version)
        metadata = loaded.metadata
        with self._lock:
            ready = tuple(sorted(self._loaded[metadata.name], key=version_order))
        files = [
            {"name": name, "digest": file.digest, "size": file.stamp[1]}
            for name, file in loaded.files.items()
        ]
        signed = {"signature": loaded.signature} if loaded.signature else {}
        return replace(metadata, versions=ready, extra={"files": files, **signed})

    def config(self, name: str, version: str = "") -> ModelConfig:
        """As Triton would have it: no batching of its own, so every axis is among the ``dims``."""
        metadata = self.get(name, version).metadata
        with self._lock:
            policy = self._overrides[metadata.name].version_policy
        return ModelConfig(
            name=metadata.name,
            platform=metadata.platform,
            backend="onnxruntime",
            inputs=metadata.inputs,
            outputs=metadata.outputs,
            extra={"version_policy": policy},
        )

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
                for version in versions
            ]


def _no_such_model(name: str, there: list[str]) -> ServerError:
    return ServerError.of(404, f"no model {name!r}; this server has {listed(there)}", code="model_not_found")
