"""The HTTP application: what every route shares, and the routes of both protocols put together."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mcp_client.errors import ServerError
from mcp_client.protocols import mcp_v1, oip_http

from . import routes_mcp, routes_oip
from .metrics import Metrics
from .service import Service

log = logging.getLogger("stub_server")

_CODES = {404: "route_not_found", 405: "method_not_allowed"}


def make_app(service: Service, *, max_body_bytes: int) -> ASGIApp:
    """The application; ``service`` is the caller's to close."""

    async def metrics(request: Request) -> Response:
        text, content_type = service.metrics.exposition()
        return Response(text, media_type=content_type)

    app = Starlette(
        routes=[*routes_mcp.ROUTES, *routes_oip.ROUTES, Route("/metrics", metrics)],
        exception_handlers={
            ServerError: _answer_error,
            HTTPException: _answer_http_error,
            Exception: _answer_bug,
        },
    )
    app.state.service = service
    app.state.max_body_bytes = max_body_bytes
    return _Observed(app, service.metrics)  # around all of it, the answer to a bug included


class _Observed:
    """Gives every answer its request id, and counts it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = request_id[:200] or uuid.uuid4().hex.encode()
        scope.setdefault("state", {})["request_id"] = request_id.decode("latin-1")

        async def observed(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(raw=message["headers"])["x-request-id"] = scope["state"]["request_id"]
                endpoint = scope.get("endpoint")
                self._metrics.request(getattr(endpoint, "__name__", "none"), message["status"])
            await send(message)

        await self._app(scope, receive, observed)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServerError)
    return _envelope(request, error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = str(error.detail)
    if error.status_code in _CODES:
        message = f"{HTTPStatus(error.status_code).phrase}: {request.method} {request.url.path}"
    told = ServerError.of(error.status_code, message, code=_CODES.get(error.status_code, "http_error"))
    return _envelope(request, told, error.headers)


async def _answer_bug(request: Request, error: Exception) -> Response:
    log.error("request %s failed", request.state.request_id, exc_info=error)
    return _envelope(request, ServerError.of(500, "the server failed; its log says why", code="internal"))


def _envelope(request: Request, error: ServerError, headers: Mapping[str, str] | None = None) -> Response:
    protocol: Any = oip_http if request.url.path.startswith("/v2") else mcp_v1
    body = protocol.format_error(error, request.state.request_id)
    answer_headers = {**(headers or {}), "Cache-Control": "no-store"}
    if error.status == 413:
        answer_headers["Connection"] = "close"  # the rest of the body is not read
    return Response(body, error.status, answer_headers, media_type="application/json")
