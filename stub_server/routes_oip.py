"""The routes of the Open Inference Protocol v2 (PROTOCOL.md section 2), as far as they mean something for
ONNX models."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mcp_client.errors import ProtocolError, ServerError
from mcp_client.protocols import management_http, oip_http
from mcp_client.protocols.json_tensors import dumps, loads_object

from .http_bodies import inference_answer, json_answer, lower_headers, read_body, service_of
from .override import read_override
from .service import Parsed

SERVER_NAME = "mcp-server"
SERVER_VERSION = "2026"


async def oip_infer(request: Request) -> Response:
    body, headers = await read_body(request), lower_headers(request)
    model, version = _asked(request)

    memory = service_of(request).memory

    def parse() -> Parsed:
        incoming = oip_http.parse_infer(body, headers, model=model, version=version, read=memory.read)
        return Parsed(incoming.request, lambda answer: oip_http.format_infer(answer, incoming, memory.write))

    reply = await service_of(request).infer("oip", headers, parse)
    return await inference_answer(request, reply)


async def oip_server(request: Request) -> Response:
    return json_answer(oip_http.format_server(SERVER_NAME, SERVER_VERSION))


async def oip_live(request: Request) -> Response:
    return json_answer(b'{"live":true}')


async def oip_ready(request: Request) -> Response:
    if not service_of(request).models.ready():
        raise ServerError.of(503, "no model is ready", code="not_ready")
    return json_answer(b'{"ready":true}')


async def oip_model(request: Request) -> Response:
    metadata = service_of(request).models.describe(*_asked(request))
    return json_answer(oip_http.format_metadata(metadata), {"X-Model-Digest": metadata.digest})


async def oip_model_ready(request: Request) -> Response:
    metadata = service_of(request).models.describe(*_asked(request))
    return json_answer(dumps({"name": metadata.name, "ready": True}))


async def oip_model_stats(request: Request) -> Response:
    return json_answer(dumps({"model_stats": service_of(request).statistics(*_asked(request))}))


async def oip_all_stats(request: Request) -> Response:
    return json_answer(dumps({"model_stats": service_of(request).statistics()}))


async def oip_model_config(request: Request) -> Response:
    return json_answer(management_http.format_config(service_of(request).models.config(*_asked(request))))


async def oip_index(request: Request) -> Response:
    only_ready = (await _document(request)).get("ready") is True
    entries = service_of(request).models.index()
    return json_answer(
        management_http.format_index(e for e in entries if e.state == "READY" or not only_ready)
    )


async def oip_load(request: Request) -> Response:
    name = request.path_params["m"]
    models = service_of(request).models
    override = read_override((await _document(request)).get("parameters"))
    await asyncio.get_running_loop().run_in_executor(None, models.load, name, override)
    models.get(name)  # raises why it could not be loaded
    return json_answer(b"{}")


async def oip_unload(request: Request) -> Response:
    service_of(request).models.unload(request.path_params["m"])
    return json_answer(b"{}")


async def oip_memory_status(request: Request) -> Response:
    regions = service_of(request).memory.status(request.path_params.get("region", ""))
    return json_answer(
        dumps([{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.size} for r in regions])
    )


async def oip_memory_register(request: Request) -> Response:
    asked = await _document(request)
    key, offset, size = asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
    if not (isinstance(key, str) and type(offset) is int and type(size) is int and offset >= 0):
        raise ServerError.of(
            400, 'expected {"key": "/…", "offset": 0, "byte_size": n}', code="malformed_request"
        )
    service_of(request).memory.register(request.path_params["region"], key, offset, size)
    return json_answer(b"{}")


async def oip_memory_unregister(request: Request) -> Response:
    service_of(request).memory.unregister(request.path_params.get("region", ""))
    return json_answer(b"{}")


async def _document(request: Request) -> dict[str, Any]:
    """The body as JSON, which may be left out."""
    body = await read_body(request)
    try:
        return loads_object(body, "the body") if body.strip() else {}
    except ProtocolError as error:
        raise ServerError.of(400, error.message, code="malformed_request") from error


def _asked(request: Request) -> tuple[str, str]:
    return request.path_params["m"], request.path_params.get("v", "")


_MODEL = "/v2/models/{m}"
_VERSION = "/v2/models/{m}/versions/{v}"
_MEMORY = "/v2/systemsharedmemory"
_REGION = "/v2/systemsharedmemory/region/{region}"
ROUTES = [
    Route("/v2", oip_server),
    Route("/v2/health/live", oip_live),
    Route("/v2/health/ready", oip_ready),
    Route("/v2/models/stats", oip_all_stats),  # as in Triton: a model of this name can't be described
    *(Route(path, oip_model) for path in (_MODEL, _VERSION)),
    *(Route(f"{path}/ready", oip_model_ready) for path in (_MODEL, _VERSION)),
    *(Route(f"{path}/config", oip_model_config) for path in (_MODEL, _VERSION)),
    *(Route(f"{path}/stats", oip_model_stats) for path in (_MODEL, _VERSION)),
    *(Route(f"{path}/infer", oip_infer, methods=["POST"]) for path in (_MODEL, _VERSION)),
    *(Route(f"{path}/status", oip_memory_status) for path in (_MEMORY, _REGION)),
    Route(f"{_REGION}/register", oip_memory_register, methods=["POST"]),
    *(Route(f"{path}/unregister", oip_memory_unregister, methods=["POST"]) for path in (_MEMORY, _REGION)),
    Route("/v2/repository/index", oip_index, methods=["POST"]),
    Route("/v2/repository/models/{m}/load", oip_load, methods=["POST"]),
    Route("/v2/repository/models/{m}/unload", oip_unload, methods=["POST"]),
]
