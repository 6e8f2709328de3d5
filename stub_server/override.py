"""What a load may bring along (Triton's load parameters): a configuration, and the model's files themselves."""

from __future__ import annotations

import base64
import binascii
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mcp_client.edge.repository import ModelRepository, inside, name_fault
from mcp_client.errors import MCPError, ProtocolError, ServerError, listed
from mcp_client.protocols.json_tensors import loads_object

# Of a configuration only this changes anything here; these others may stand in it as they are anyway.
_POLICY = "version_policy"
_GIVEN = {"backend": "onnxruntime", "platform": "onnxruntime_onnx", "max_batch_size": 0}


class _Folder:
    """A folder that goes when nobody holds it any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mcp-server-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True)
class Override:
    """``files``: path in the model's folder (``1/model.onnx``) → content."""

    version_policy: Mapping[str, Any] = field(default_factory=lambda: {"all": {}})
    files: Mapping[str, bytes] = field(default_factory=dict)
    folder: _Folder | None = None  # of the files: theirs until the next load

    def repository(self, name: str) -> ModelRepository | None:
        """The repository that the files make, if there are any."""
        if self.folder is None:
            return None
        if name_fault(name) is not None:
            raise _refused(f"{name!r} is no name for a model: {name_fault(name)}")
        root = self.folder.path
        for path, content in self.files.items():
            try:
                file = inside(root / name, path)
            except MCPError as error:
                raise _refused(error.message) from error
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return ModelRepository.open(root)

    def chosen(self, versions: Sequence[str]) -> list[str]:
        """Those of the versions (oldest first) that the policy wants."""
        if "latest" in self.version_policy:
            return list(versions)[-self.version_policy["latest"].get("num_versions", 1) :]
        if "specific" in self.version_policy:
            wanted = {str(version) for version in self.version_policy["specific"]["versions"]}
            return [version for version in versions if version in wanted]
        return list(versions)


NO_OVERRIDE = Override()


def read_override(parameters: Any) -> Override:
    """Triton's load parameters: ``config`` (JSON as text), ``file:{version}/{name}`` (base64 in JSON, bytes over gRPC)."""
    if parameters is None or parameters == {}:
        return NO_OVERRIDE
    if not isinstance(parameters, Mapping):
        raise _refused("the parameters of a load must be an object")
    config: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for name, value in parameters.items():
        if name == "config" and isinstance(value, str):
            try:
                config = loads_object(value.encode(), "config")
            except ProtocolError as error:
                raise _refused(error.message) from error
        elif name.startswith("file:") and isinstance(value, (str, bytes)):
            files[name.removeprefix("file:")] = value if isinstance(value, bytes) else _decoded(name, value)
        else:
            raise _refused(f"parameter {name!r} of a load is not known here; expected config and file:…")
    if files and not config:
        raise _refused('files need a "config" beside them, {} at least with "backend": "onnxruntime"')
    unknown = [
        key for key, value in config.items() if key not in (_POLICY, "name") and _GIVEN.get(key) != value
    ]
    if unknown:
        raise _refused(f"of a configuration only {_POLICY!r} can be changed here; got {listed(unknown)}")
    folder = _Folder() if files else None
    return Override(_policy(config.get(_POLICY, {"all": {}})), files, folder)


def _policy(policy: Any) -> Mapping[str, Any]:
    if isinstance(policy, dict) and len(policy) == 1:
        ((kind, value),) = policy.items()
        if isinstance(value, dict):
            count, versions = value.get("num_versions", 1), value.get("versions")
            if kind == "all" or (kind == "latest" and type(count) is int and count > 0):
                return policy
            if kind == "specific" and isinstance(versions, list):
                return policy
    raise _refused(
        'version_policy is {"all": {}}, {"latest": {"num_versions": n}} or {"specific": {"versions": [n, …]}}'
    )


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"{name!r} is not base64: {error}") from error


def _refused(message: str) -> ServerError:
    return ServerError.of(400, message, code="load_refused")
