"""MCP 2026 inference over HTTP (PROTOCOL.md section 1): the client's codec, and the server's side as plain
functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import ProtocolError, ServerError
from ..request import Request
from ..result import Answer
from ..tensors import Array, ModelMetadata, ShapeError
from . import WireRequest, WireResponse
from .documents import (
    check_answer,
    in_order,
    least,
    read_count,
    read_specs,
    read_versions,
    text_of,
    write_specs,
)
from .http_common import (
    check_parameters,
    freshness,
    name_in_path,
    read_context,
    read_parameters,
    request_headers,
    require_success,
)
from .json_tensors import (
    datatype_named,
    dumps,
    loads_object,
    shape_by_nesting,
    shape_of,
    tensor_from_json,
    tensor_to_json,
)

_JSON = {"Content-Type": "application/json"}


class McpV1Codec:
    """The client's side. Requests are always in the full form."""

    name = "mcp"

    def infer(self, request: Request, metadata: ModelMetadata | None) -> WireRequest:
        body: dict[str, Any] = {
            "model": request.model,
            "inputs": {
                name: tensor_to_json(array, what=f"input {name!r}", b64=True)
                for name, array in request.inputs.items()
            },
        }
        if request.version:
            body["version"] = request.version
        if request.id:
            body["id"] = request.id
        if request.outputs:
            body["outputs"] = [
                {"name": name, "classification": request.classes[name]} if name in request.classes else name
                for name in request.outputs
            ]
        if request.parameters:
            body["parameters"] = check_parameters(request.parameters)
        if request.priority is not None:
            body["priority"] = request.priority
        if request.timeout_ms is not None:
            body["timeout_ms"] = request.timeout_ms
        return WireRequest("POST", "/v1/infer", {**_JSON, **request_headers(request)}, (dumps(body),))

    def decode_infer(self, response: WireResponse, request: Request) -> Answer:
        require_success(response)
        document = loads_object(response.body, "the response")
        tensors = document.get("outputs")
        if not isinstance(tensors, dict):
            raise ProtocolError('the response has no "outputs" object')
        outputs = {name: _tensor(tensor, f"output {name!r}") for name, tensor in tensors.items()}
        model, version = text_of(document, "model"), text_of(document, "version")
        check_answer(outputs, request, came_id=text_of(document, "id"))
        return Answer.of(
            in_order(outputs, request),
            model=model or request.model,
            version=version,
            id=request.id,
            digest=response.headers.get("x-model-digest", ""),
            **freshness(response.headers),
        )

    def metadata(self, model: str, version: str) -> WireRequest:
        query = f"?version={name_in_path(version, 'version')}" if version else ""
        return WireRequest("GET", f"/v1/models/{name_in_path(model, 'model')}{query}")

    def decode_metadata(self, response: WireResponse) -> ModelMetadata:
        require_success(response)
        document = loads_object(response.body, "the model's metadata")
        name = text_of(document, "id")
        if not name:
            raise ProtocolError('the model\'s metadata has no "id"')
        known = {"id", "version", "versions", "platform", "digest", "inputs", "outputs"}
        return ModelMetadata(
            name=name,
            inputs=read_specs(document.get("inputs"), "input"),
            outputs=read_specs(document.get("outputs"), "output"),
            version=text_of(document, "version"),
            versions=read_versions(document.get("versions")),
            platform=text_of(document, "platform"),
            digest=text_of(document, "digest"),
            extra={key: value for key, value in document.items() if key not in known},
        )

    def models(self) -> WireRequest:
        return WireRequest("GET", "/v1/models")

    def decode_models(self, response: WireResponse) -> list[str]:
        require_success(response)
        models = loads_object(response.body, "the list of models").get("models")
        if not isinstance(models, list) or not all(
            isinstance(m, dict) and isinstance(m.get("id"), str) for m in models
        ):
            raise ProtocolError('the list of models must be {"models": [{"id": "…"}, …]}')
        return list(dict.fromkeys(model["id"] for model in models))

    def models_otherwise(self, response: WireResponse) -> None:
        return None

    def decode_models_otherwise(self, response: WireResponse) -> list[str]:
        return self.decode_models(response)

    def ready(self) -> WireRequest:
        return WireRequest("GET", "/v1/health/ready")

    def decode_ready(self, response: WireResponse) -> bool:
        return response.status == 200

    def live(self) -> WireRequest:
        return WireRequest("GET", "/v1/health/live")

    def decode_live(self, response: WireResponse) -> bool:
        return response.status == 200

    def model_ready(self, model: str, version: str) -> WireRequest:
        """A model that can be described can run: one that can't is answered with 404 or 503."""
        return self.metadata(model, version)

    def decode_model_ready(self, response: WireResponse) -> bool:
        return response.status == 200


def _tensor(tensor: Any, what: str) -> Array:
    if not isinstance(tensor, dict) or "data" not in tensor:
        raise ProtocolError(f'{what} must be an object with "data"')
    data = tensor["data"]
    datatype = datatype_named(tensor.get("datatype", "FP32"), what)
    shape = shape_of(tensor["shape"] if "shape" in tensor else shape_by_nesting(data), what)
    return tensor_from_json(data, datatype, shape, what=what)


# --- the server's side --------------------------------------------------------------------------------------


class Incoming(NamedTuple):
    """A parsed ``POST /v1/infer``. ``short``: the short form, whose one input has the name "" until the model
    gives it.
    """

    request: Request
    short: bool


def parse_infer(body: bytes, headers: Mapping[str, str]) -> Incoming:
    """The request that a body and its headers (lower case) make; ``ServerError`` 400 if they make none."""
    context = read_context(headers)
    try:
        document = loads_object(body, "the body")
        short = "input" in document
        if short == ("inputs" in document):
            raise ProtocolError(
                'the body needs either "input" (one tensor) or "inputs" (an object of tensors)'
            )
        if short:
            tensor = {key: document[key] for key in ("shape", "datatype") if key in document}
            inputs = {"": _tensor({"data": document["input"], **tensor}, "input")}
        else:
            tensors = document["inputs"]
            if not isinstance(tensors, dict):
                raise ProtocolError('"inputs" must be an object of tensors')
            inputs = {name: _tensor(tensor, f"input {name!r}") for name, tensor in tensors.items()}
        outputs = document.get("outputs") or []
        if not isinstance(outputs, list):
            raise ProtocolError('"outputs" must be a list of names')
        wanted = dict(map(_wanted, outputs))
        request = Request(
            model=text_of(document, "model"),
            version=text_of(document, "version"),
            inputs=inputs,
            outputs=tuple(wanted),
            classes={name: count for name, count in wanted.items() if count},
            parameters=read_parameters(document.get("parameters")),
            id=text_of(document, "id") or context.request_id,
            session=context.session,
            path=context.path,
            priority=_number(document, "priority", int),
            timeout_ms=least(_number(document, "timeout_ms", float), context.deadline_ms),
            purpose=context.purpose,
        )
    except ProtocolError as error:
        code = "shape_mismatch" if isinstance(error, ShapeError) else "malformed_request"
        raise ServerError.of(400, error.message, code=code) from error
    return Incoming(request, short)


def _wanted(output: Any) -> tuple[str, int]:
    """An output's name, and how many classes of it are wanted: ``"name"``, or ``{"name": "…", "classification": n}``."""
    if isinstance(output, str):
        return output, 0
    if not isinstance(output, dict) or not isinstance(output.get("name"), str):
        raise ProtocolError('"outputs" must be a list of names, or of {"name": "…", "classification": n}')
    return output["name"], read_count(output, output["name"])


def _number(document: dict[str, Any], key: str, kind: type[Any]) -> Any:
    value = document.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or not 0 <= value < 2**63:
        raise ProtocolError(f"{key!r} must be a number ≥ 0; got {value!r}")
    return value


def format_infer(answer: Answer, *, short: bool) -> bytes:
    """The body of an answer; the short form holds the only output."""
    if short:
        (name, array), *_ = answer.outputs.items()
        tensor = tensor_to_json(array, what=f"output {name!r}", b64=True)
        document = {"output": tensor.pop("data"), **tensor, "model": answer.model, "version": answer.version}
    else:
        document = {
            "model": answer.model,
            "version": answer.version,
            "id": answer.id,
            "outputs": {
                name: tensor_to_json(array, what=f"output {name!r}", b64=True)
                for name, array in answer.outputs.items()
            },
        }
    return dumps(document)


def format_error(error: ServerError, request_id: str) -> bytes:
    """The error envelope of every MCP route."""
    return dumps({"error": {"code": error.code, "message": error.message, "request_id": request_id}})


def format_metadata(metadata: ModelMetadata) -> bytes:
    """The body of ``GET /v1/models/{id}``."""
    return dumps(
        {
            "id": metadata.name,
            "version": metadata.version,
            "versions": metadata.versions,
            "platform": metadata.platform,
            "digest": metadata.digest,
            "inputs": write_specs(metadata.inputs),
            "outputs": write_specs(metadata.outputs),
            **metadata.extra,
        }
    )


def format_models(models: Iterable[ModelMetadata]) -> bytes:
    """The body of ``GET /v1/models``."""
    return dumps(
        {
            "models": [
                {"id": m.name, "version": m.version, "versions": m.versions, "digest": m.digest}
                for m in models
            ]
        }
    )
