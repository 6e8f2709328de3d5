"""The routes of MCP 2026 inference (PROTOCOL.md section 1)."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mcp_client.errors import ServerError
from mcp_client.protocols import mcp_v1
from mcp_client.result import Answer

from .files import file_answer
from .http_bodies import inference_answer, json_answer, lower_headers, read_body, service_of
from .service import Format, Parsed

_JSON = {"Content-Type": "application/json"}


async def mcp_infer(request: Request) -> Response:
    body, headers = await read_body(request), lower_headers(request)

    def parse() -> Parsed:
        incoming = mcp_v1.parse_infer(body, headers)
        return Parsed(incoming.request, _format(incoming.short), incoming.short)

    reply = await service_of(request).infer("mcp", headers, parse)
    return await inference_answer(request, reply)


def _format(short: bool) -> Format:
    def format_answer(answer: Answer) -> tuple[dict[str, str], list[bytes]]:
        return _JSON, [mcp_v1.format_infer(answer, short=short)]

    return format_answer


async def mcp_live(request: Request) -> Response:
    return json_answer(b'{"live":true}')


async def mcp_ready(request: Request) -> Response:
    if not service_of(request).models.ready():
        raise ServerError.of(503, "no model is ready", code="not_ready")
    return json_answer(b'{"ready":true}')


async def mcp_models(request: Request) -> Response:
    models = service_of(request).models
    return json_answer(mcp_v1.format_models(models.describe(name) for name in models.ready()))


async def mcp_model(request: Request) -> Response:
    metadata = service_of(request).models.describe(*_asked(request))
    return json_answer(mcp_v1.format_metadata(metadata), {"X-Model-Digest": metadata.digest})


async def mcp_model_file(request: Request) -> Response:
    loaded = service_of(request).models.get(*_asked(request))
    return file_answer(request, loaded, request.query_params.get("name", ""))


def _asked(request: Request) -> tuple[str, str]:
    return request.path_params["id"], request.query_params.get("version", "")


ROUTES = [
    Route("/v1/infer", mcp_infer, methods=["POST"]),
    Route("/v1/health/live", mcp_live),
    Route("/v1/health/ready", mcp_ready),
    Route("/v1/models", mcp_models),
    Route("/v1/models/{id}", mcp_model),
    Route("/v1/models/{id}/file", mcp_model_file),
]
