"""What the routes share: reading a body up to a limit, lower-case headers, JSON answers."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mcp_client.errors import ServerError

from .service import Service


def service_of(request: Request) -> Service:
    """The service behind the application that the request came to."""
    service: Service = request.app.state.service
    return service


def lower_headers(request: Request) -> dict[str, str]:
    """The request's headers; names are lower case."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in request.scope["headers"]}


def json_answer(body: bytes, headers: dict[str, str] | None = None) -> Response:
    """A 200 with a JSON body."""
    return Response(body, headers=headers, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """The whole body; ``ServerError`` 413 over the limit, 415 where it is compressed."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", ""):
        raise ServerError.of(
            415,
            f"Content-Encoding {encoding[:40]!r} is not read here; send the body as it is",
            code="unsupported_encoding",
        )
    limit: int = request.app.state.max_body_bytes
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(int(announced), limit)
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(size, limit)
            chunks.append(chunk)
    except ClientDisconnect:
        # Nobody is left to read this answer; it is counted.
        raise ServerError.of(400, "the connection broke within the body", code="disconnected") from None
    return b"".join(chunks)


def _too_large(size: int, limit: int) -> ServerError:
    return ServerError.of(
        413, f"the body has {size} bytes or more; this server takes at most {limit}", code="body_too_large"
    )
