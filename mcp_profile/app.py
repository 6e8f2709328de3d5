"""The HTTP side of the Profile API (PROTOCOL.md section 4): routes, limits, errors, content negotiation."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, Histogram, generate_latest
from sqlalchemy.exc import OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse

from . import openapi as o
from .access import Access
from .errors import APIError
from .ingest import MAX_BODY_BYTES, parse, too_large, unpack
from .intake import Intake
from .openapi import MSGPACK, described, with_security
from .policies import current, put
from .service import DEFAULT_PROFILE_BYTES, MAX_PROFILE_BYTES, Profiles
from .store import Store

log = logging.getLogger("mcp_profile")

_CODES = {404: "not_found", 405: "method_not_allowed"}
_PORT = re.compile(r":\d+$")
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")


def create_app(store: Store, profiles: Profiles, access: Access, intake: Intake) -> FastAPI:
    """The application; ``access`` decides who may use it, ``intake`` takes events in."""
    app = FastAPI(title="MCP Profile API", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)
    with_security(app)
    registry = intake.registry
    seconds = Histogram("mcp_profile_request_seconds", "Time to answer", ["route"], registry=registry)

    def allowed(request: Request, scope: str) -> int:
        return access.application(request.headers.get("authorization"), scope)

    @app.middleware("http")
    async def frame(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Request id in and out, time taken; and no web page gets at an open server by a name of its own."""
        request.state.id = request.headers.get("x-request-id", "")[:128] or secrets.token_hex(8)
        started = time.perf_counter()
        host = _PORT.sub("", request.headers.get("host", ""))
        if host and host not in _LOOPBACK_HOSTS and await run_in_threadpool(access.is_open):
            error = APIError(
                403,
                "forbidden_host",
                f"an open server answers on {', '.join(_LOOPBACK_HOSTS)} only; got Host {host!r}",
            )
            return _answer(error, request.state.id)
        response = await call_next(request)
        response.headers["X-Request-Id"] = request.state.id
        route = request.scope.get("route")
        seconds.labels(getattr(route, "path", "other")).observe(time.perf_counter() - started)
        return response

    @app.exception_handler(APIError)
    async def api_error(request: Request, error: APIError) -> Response:
        return _answer(error, request.state.id)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code = _CODES.get(error.status_code, "error")
        headers = dict(error.headers or {})
        if error.status_code == 405:  # Starlette names the methods of one of the path's routes only
            same = [one for one in app.routes if getattr(one, "path", "") == request.url.path]
            headers["Allow"] = ", ".join(sorted({m for one in same for m in getattr(one, "methods", ())}))
        known = APIError(error.status_code, code, str(error.detail), headers=headers)
        return _answer(known, request.state.id)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        told = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return _answer(APIError(422, "invalid_request", told), request.state.id)

    @app.exception_handler(OperationalError)
    async def unavailable(request: Request, error: OperationalError) -> Response:
        log.error("request %s: the database failed: %s", request.state.id, error.orig)
        told = APIError(
            503,
            "database_unavailable",
            f"the database failed: {error.orig}; try again",
            headers={"Retry-After": "5"},
        )
        return _answer(told, request.state.id)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.exception("request %s failed", request.state.id, exc_info=error)
        return _answer(
            APIError(500, "internal", "the Profile API failed; its log has the details"), request.state.id
        )

    @app.post("/v1/telemetry", **described(o.TAKEN, 400, 413, 415, 429, status=202, body=o.BATCH))
    async def telemetry(request: Request) -> Response:
        """Take a batch of events in; a batch id seen before counts once."""
        app_id = await run_in_threadpool(allowed, request, "ingest")
        _require_json(request)
        body = await _body(request)
        encoding = request.headers.get("content-encoding", "")

        def take_in() -> tuple[int, int, list[tuple[int, str]]]:
            return intake.take(app_id, parse(unpack(body, encoding)))

        accepted, duplicates, rejected = await run_in_threadpool(take_in)
        answer: dict[str, Any] = {"accepted": accepted, "duplicates": duplicates}
        if rejected:
            answer["rejected"] = [{"index": index, "error": error} for index, error in rejected]
        return _json(answer, 202)

    @app.get("/v1/profile", **described(o.PROFILE, unchanged=True, also=MSGPACK))
    def profile(
        request: Request,
        accept: Annotated[str, Header()] = "application/json",
        if_none_match: Annotated[str, Header()] = "",
        max_bytes: Annotated[int, Query(ge=4096, le=MAX_PROFILE_BYTES)] = DEFAULT_PROFILE_BYTES,
    ) -> Response:
        """What has been learned, mined anew if there are new events;

        304 if it is what ``If-None-Match`` names.
        """
        app_id = allowed(request, "read")
        rendered = profiles.rendered(app_id, max_bytes)
        packed = MSGPACK in accept
        headers = {
            "ETag": rendered.msgpack_etag if packed else rendered.json_etag,
            "Vary": "Accept, Accept-Encoding",
            "Cache-Control": "no-cache",
        }
        if _matches(if_none_match, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        body, kind = (rendered.msgpack, MSGPACK) if packed else (rendered.json, "application/json")
        return Response(body, media_type=kind, headers=headers)

    @app.get("/v1/paths", **described(o.PATHS))
    def paths(
        request: Request,
        min_support: Annotated[int, Query(ge=1, le=1 << 31)] = 2,
        limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    ) -> Response:
        """Frequent sequences of steps that no longer sequence accounts for (closed), most frequent first."""
        return _json({"paths": profiles.frequent_paths(allowed(request, "read"), min_support, limit)})

    @app.get("/v1/graph", **described(o.GRAPH))
    def graph(
        request: Request,
        session: Annotated[str, Query(max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")] = "",
        limit: Annotated[int, Query(ge=1, le=10_000)] = 500,
    ) -> Response:
        """Steps and the transitions between them: of one session (its hashed id), or of all."""
        return _json(profiles.graph(allowed(request, "read"), session, limit))

    @app.get("/v1/ttl-policy", **described(o.POLICY, unchanged=True))
    def ttl_policy(request: Request, if_none_match: Annotated[str, Header()] = "") -> Response:
        """How long answers are fresh, by model id; version 0 is none. 304 if it is what ``If-None-Match`` names."""
        policy = current(store, allowed(request, "read"))
        headers = {"ETag": f'"{policy["version"]}"', "Cache-Control": "no-cache"}
        if _matches(if_none_match, headers["ETag"]):
            return Response(status_code=304, headers=headers)
        return Response(orjson.dumps(policy), media_type="application/json", headers=headers)

    @app.put("/v1/ttl-policy", **described(o.POLICY, 400, 413, 415, body=o.POLICY_BODY))
    async def put_ttl_policy(request: Request) -> Response:
        """Put another TTL policy into force, for all clients that watch at once; it gets the next version."""
        app_id = await run_in_threadpool(allowed, request, "admin")
        _require_json(request)
        body = await _body(request)
        return _json(await run_in_threadpool(put, store, app_id, body))

    @app.get("/v1/stats", **described(o.STATS))
    def stats(request: Request) -> Response:
        """Totals, by source and by hour, and where mining stands."""
        app_id = allowed(request, "read")
        return _json(store.stats(app_id) | {"profile": profiles.status(app_id)})

    @app.get("/healthz", **described(o.STATUS, key=False))
    def healthz() -> Response:
        """Whether the process runs."""
        return _json({"status": "ok"})

    @app.get("/readyz", **described(o.STATUS, key=False))
    def readyz() -> Response:
        """Whether the database answers."""
        store.ping()
        return _json({"status": "ready"})

    @app.get("/metrics", response_class=PlainTextResponse, **described(None, kind="text/plain"))
    def metrics(request: Request) -> Response:
        """Prometheus metrics."""
        allowed(request, "read")
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app


async def _body(request: Request) -> bytes:
    """The body, never more than the limit of it in memory."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise too_large(f"the body has {announced} bytes; at most {MAX_BODY_BYTES} are taken")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_large(f"the body has more than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _require_json(request: Request) -> None:
    # A browser sends a form or plain text to any address without asking; JSON it asks for first.
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise APIError(415, "unsupported_media_type", f"send Content-Type: application/json; got {kind!r}")


def _json(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status_code=status, media_type="application/json")


def _answer(error: APIError, request_id: str) -> Response:
    response = _json(error.body(request_id), error.status)
    response.headers.update(error.headers)
    response.headers["X-Request-Id"] = request_id
    return response


def _matches(if_none_match: str, etag: str) -> bool:
    """RFC 9110, section 13.1.2: weak comparison with any of a list, or ``*``."""
    return any(one.strip().removeprefix("W/") in ("*", etag) for one in if_none_match.split(","))
