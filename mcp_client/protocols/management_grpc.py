"""The management calls of the Open Inference Protocol v2 over gRPC: the client's side, and what mcp-server writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.message import Message

from ..errors import InvalidInputError, NotOfferedError, ServerError
from ..management import IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from . import WireRequest, WireResponse
from . import oip_pb2 as pb
from .grpc_status import STATUS_OF, require_success
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
from .protobuf_bytes import parse

SERVICE = "inference.GRPCInferenceService"


class OipGrpcManagement:
    """The part of ``OipGrpcCodec`` that is not about inference."""

    def server(self) -> WireRequest:
        """Asks what the server is and which extensions it has."""
        return ask("ServerMetadata", pb.ServerMetadataRequest())

    def decode_server(self, response: WireResponse) -> ServerInfo:
        require_offered(response, "server metadata")
        return read_server(
            plain(parse(pb.ServerMetadataResponse, bytes(response.body), "the server's metadata"))
        )

    def live(self) -> WireRequest:
        return ask("ServerLive", pb.ServerLiveRequest())

    def decode_live(self, response: WireResponse) -> bool:
        return response.status == 200 and bool(
            parse(pb.ServerLiveResponse, bytes(response.body), "the answer").live
        )

    def ready(self) -> WireRequest:
        return ask("ServerReady", pb.ServerReadyRequest())

    def decode_ready(self, response: WireResponse) -> bool:
        return response.status == 200 and bool(
            parse(pb.ServerReadyResponse, bytes(response.body), "the answer").ready
        )

    def model_ready(self, model: str, version: str) -> WireRequest:
        return ask("ModelReady", pb.ModelReadyRequest(name=named(model), version=version))

    def decode_model_ready(self, response: WireResponse) -> bool:
        return response.status == 200 and bool(
            parse(pb.ModelReadyResponse, bytes(response.body), "the answer").ready
        )

    def models(self) -> WireRequest:
        return ask("RepositoryIndex", pb.RepositoryIndexRequest(ready=True))

    def decode_models(self, response: WireResponse) -> list[str]:
        if response.status == STATUS_OF["UNIMPLEMENTED"]:
            raise NotOfferedError(
                "the server has no repository index (RepositoryIndex is Triton's extension), so its models can't be "
                "listed; name the one you want with model=…",
                status=response.status,
                code="UNIMPLEMENTED",
            )
        return ready_names(self.decode_index(response))

    def models_otherwise(self, response: WireResponse) -> None:
        return None

    def decode_models_otherwise(self, response: WireResponse) -> list[str]:
        return self.decode_models(response)

    def index(self) -> WireRequest:
        return ask("RepositoryIndex", pb.RepositoryIndexRequest())

    def decode_index(self, response: WireResponse) -> list[IndexEntry]:
        require_offered(response, "repository index")
        told = parse(pb.RepositoryIndexResponse, bytes(response.body), "the repository index")
        return read_index(plain(told)["models"])

    def statistics(self, model: str, version: str) -> WireRequest:
        return ask("ModelStatistics", pb.ModelStatisticsRequest(name=model, version=version))

    def decode_statistics(self, response: WireResponse) -> list[ModelStatistics]:
        try:
            require_offered(response, "model statistics")
        except ServerError as error:
            raise statistics_error(error) from None
        return read_statistics(
            plain(parse(pb.ModelStatisticsResponse, bytes(response.body), "the model statistics"))
        )

    def config(self, model: str, version: str) -> WireRequest:
        return ask("ModelConfig", pb.ModelConfigRequest(name=named(model), version=version))

    def decode_config(self, response: WireResponse) -> ModelConfig:
        require_offered(response, "model configuration")
        told = parse(pb.ModelConfigResponse, bytes(response.body), "the model's configuration")
        return read_config(plain(told.config))

    def load(
        self, model: str, config: str | Mapping[str, Any] | None, files: Mapping[str, bytes]
    ) -> WireRequest:
        message = pb.RepositoryModelLoadRequest(model_name=named(model))
        if config is not None:
            message.parameters["config"].string_param = config_text(config)
        for path, content in files.items():
            message.parameters[file_parameter(path)].bytes_param = content
        return ask("RepositoryModelLoad", message, repeatable=False)

    def decode_load(self, response: WireResponse) -> None:
        require_offered(response, "loading of models")

    def unload(self, model: str, dependents: bool) -> WireRequest:
        message = pb.RepositoryModelUnloadRequest(model_name=named(model))
        if dependents:
            message.parameters["unload_dependents"].bool_param = True
        return ask("RepositoryModelUnload", message, repeatable=False)

    def decode_unload(self, response: WireResponse) -> None:
        require_offered(response, "unloading of models")


def method(name: str) -> str:
    """The full name of a method of the service, as gRPC's channel takes it."""
    return f"/{SERVICE}/{name}"


def ask(name: str, message: Message, *, repeatable: bool = True) -> WireRequest:
    return WireRequest("POST", method(name), body=(message.SerializeToString(),), repeatable=repeatable)


def named(model: str) -> str:
    if not model:
        raise InvalidInputError("the Open Inference Protocol needs the model's name; pass model=…")
    return model


def require_offered(response: WireResponse, what: str) -> None:
    if response.status == STATUS_OF["UNIMPLEMENTED"]:
        said = bytes(response.body).decode("utf-8", "replace").strip()[:200]
        raise NotOfferedError(
            f"this server does not offer the {what} (it answered UNIMPLEMENTED{': ' if said else ''}{said})",
            status=response.status,
            code="UNIMPLEMENTED",
        )
    require_success(response)


def plain(message: Any) -> dict[str, Any]:
    """A message as the JSON that Triton's HTTP writes of it: enum names, numbers as numbers, lists even where empty.

    (protobuf's own ``MessageToDict`` writes 64-bit numbers as text.)
    """
    document: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if value:
                document[field.name] = {
                    key: _plain_value(field.message_type.fields_by_name["value"], value[key]) for key in value
                }
        elif hasattr(value, "append") or hasattr(value, "add"):
            document[field.name] = [_plain_value(field, each) for each in value]
        elif field.message_type is not None:
            if message.HasField(field.name):
                document[field.name] = plain(value)
        elif value or field.containing_oneof is None or message.HasField(field.name):
            document[field.name] = _plain_value(field, value)
    return document


def _plain_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known is not None else str(value)
    return value


# --- the server's side --------------------------------------------------------------------------------------


def format_index(entries: Iterable[IndexEntry]) -> bytes:
    message = pb.RepositoryIndexResponse()
    for entry in entries:
        message.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
    return bytes(message.SerializeToString())


def format_config(config: ModelConfig) -> bytes:
    from google.protobuf.json_format import ParseDict

    told = ParseDict(write_config(config), pb.ModelConfig(), ignore_unknown_fields=True)
    return bytes(pb.ModelConfigResponse(config=told).SerializeToString())
