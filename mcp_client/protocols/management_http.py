"""The management calls of the Open Inference Protocol v2 over HTTP: the client's side, and what mcp-server writes."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ..errors import InvalidInputError, NotOfferedError, ProtocolError, ServerError
from ..management import IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from . import WireRequest, WireResponse
from .http_common import name_in_path, server_error
from .json_tensors import dumps, loads, loads_object
from .management import (
    config_text,
    file_parameter,
    read_config,
    read_index,
    read_server,
    read_statistics,
    ready_names,
    statistics_error,
    write_config,
)

_JSON = {"Content-Type": "application/json"}
# What web frameworks and proxies say of a path that they do not have, as opposed to a model that is not there.
_NO_ROUTE = re.compile(
    r"(404[: ]*)?((page|resource|route|url|path) )?not found\.?|.* said nothing more", re.IGNORECASE
)


class OipHttpManagement:
    """The part of ``OipHttpCodec`` that is not about inference."""

    def server(self) -> WireRequest:
        """Asks what the server is and which extensions it has."""
        return WireRequest("GET", "/v2")

    def decode_server(self, response: WireResponse) -> ServerInfo:
        require_offered(response, "server metadata")
        return read_server(loads_object(response.body, "the server's metadata"))

    def live(self) -> WireRequest:
        return WireRequest("GET", "/v2/health/live")

    def decode_live(self, response: WireResponse) -> bool:
        return response.status == 200

    def ready(self) -> WireRequest:
        return WireRequest("GET", "/v2/health/ready")

    def decode_ready(self, response: WireResponse) -> bool:
        return response.status == 200

    def model_ready(self, model: str, version: str) -> WireRequest:
        return WireRequest("GET", f"{model_path(model, version)}/ready")

    def decode_model_ready(self, response: WireResponse) -> bool:
        """By the status; some servers (KServe) say no in a 200 too."""
        if response.status != 200:
            return False
        return (
            not bytes(response.body).strip()
            or loads_object(response.body, "the answer").get("ready") is not False
        )

    def models(self) -> WireRequest:
        return WireRequest("POST", "/v2/repository/index", _JSON, (dumps({"ready": True}),))

    def decode_models(self, response: WireResponse) -> list[str]:
        return ready_names(self.decode_index(response))

    def models_otherwise(self, response: WireResponse) -> WireRequest | None:
        """What to ask where ``models`` got this response; ``None``: nothing else. KServe has no index, but a list of names."""
        return WireRequest("GET", "/v2/models") if response.status in (404, 405) else None

    def decode_models_otherwise(self, response: WireResponse) -> list[str]:
        require_offered(response, "repository index")
        names = loads_object(response.body, "the list of models").get("models")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ProtocolError('the list of models must be {"models": ["…", …]}')
        return list(dict.fromkeys(names))

    def index(self) -> WireRequest:
        return WireRequest("POST", "/v2/repository/index", _JSON, (b"{}",))

    def decode_index(self, response: WireResponse) -> list[IndexEntry]:
        require_offered(response, "repository index")
        return read_index(loads(response.body, "the repository index"))

    def statistics(self, model: str, version: str) -> WireRequest:
        return WireRequest("GET", f"{model_path(model, version)}/stats" if model else "/v2/models/stats")

    def decode_statistics(self, response: WireResponse) -> list[ModelStatistics]:
        try:
            require_offered(response, "model statistics")
        except ServerError as error:
            raise statistics_error(error) from None
        return read_statistics(loads_object(response.body, "the model statistics"))

    def config(self, model: str, version: str) -> WireRequest:
        return WireRequest("GET", f"{model_path(model, version)}/config")

    def decode_config(self, response: WireResponse) -> ModelConfig:
        require_offered(response, "model configuration")
        return read_config(loads_object(response.body, "the model's configuration"))

    def load(
        self, model: str, config: str | Mapping[str, Any] | None, files: Mapping[str, bytes]
    ) -> WireRequest:
        parameters: dict[str, Any] = {"config": config_text(config)} if config is not None else {}
        for path, content in files.items():
            parameters[file_parameter(path)] = base64.b64encode(content).decode("ascii")
        body = dumps({"parameters": parameters} if parameters else {})
        path = f"/v2/repository/models/{name_in_path(model, 'model')}/load"
        return WireRequest("POST", path, _JSON, (body,), repeatable=False)

    def decode_load(self, response: WireResponse) -> None:
        require_offered(response, "loading of models")

    def unload(self, model: str, dependents: bool) -> WireRequest:
        body = dumps({"parameters": {"unload_dependents": True}} if dependents else {})
        path = f"/v2/repository/models/{name_in_path(model, 'model')}/unload"
        return WireRequest("POST", path, _JSON, (body,), repeatable=False)

    def decode_unload(self, response: WireResponse) -> None:
        require_offered(response, "unloading of models")


def model_path(model: str, version: str) -> str:
    if not model:
        raise InvalidInputError("the Open Inference Protocol needs the model's name; pass model=…")
    path = f"/v2/models/{name_in_path(model, 'model')}"
    return f"{path}/versions/{name_in_path(version, 'version')}" if version else path


def require_offered(response: WireResponse, what: str) -> None:
    """Raise what a status other than 200 means; a path that is not there is a call that the server does not offer."""
    if response.status == 200:
        return
    error = server_error(response)
    missing = error.status == 404 and (error.code == "route_not_found" or _NO_ROUTE.fullmatch(error.message))
    if missing or error.status in (405, 501):
        raise NotOfferedError(
            f"this server does not offer the {what} (it answered {error.status}: {error.message})",
            status=error.status,
            code=error.code,
        )
    raise error


# --- the server's side --------------------------------------------------------------------------------------


def format_index(entries: Iterable[IndexEntry]) -> bytes:
    """The body of ``POST /v2/repository/index``."""
    return dumps([asdict(entry) for entry in entries])


def format_config(config: ModelConfig) -> bytes:
    """The body of ``GET /v2/models/{m}/config``."""
    return dumps(write_config(config))
