"""What the routes share: reading a body up to a limit, lower-case headers, JSON answers."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mcp_client.errors import ServerError
from mcp_client.transports.compression import ALGORITHMS, TooLargeError, UnpackError, pack, unpack

from .service import Reply, Service


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
    """The whole body, unpacked; ``ServerError`` 413 over the limit, 415 where it is compressed in a way not read here."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "", *ALGORITHMS):
        raise ServerError.of(
            415,
            f"Content-Encoding {encoding[:40]!r} is not read here, only {' and '.join(ALGORITHMS)}",
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
    body = b"".join(chunks)
    if encoding not in ALGORITHMS:
        return body
    try:
        return await asyncio.to_thread(unpack, body, encoding, limit)
    except TooLargeError:
        raise _too_large(limit + 1, limit) from None
    except UnpackError as error:
        raise ServerError.of(
            400, f"the {encoding} body is damaged: {error}", code="malformed_request"
        ) from error


async def inference_answer(request: Request, reply: Reply) -> Response:
    """A finished answer, compressed where the client asked for it."""
    algorithm = asked_for(request.headers.get("accept-encoding", ""))
    if algorithm is None:
        return Response(reply.body, headers=reply.headers)
    body = await asyncio.to_thread(pack, reply.body, algorithm)
    return Response(body, headers={**reply.headers, "Content-Encoding": algorithm, "Vary": "Accept-Encoding"})


def asked_for(accept_encoding: str) -> str | None:
    """The first of our algorithms that is named with a weight above 0 (RFC 9110 12.5.3); ``*`` asks for nothing in particular."""
    for part in accept_encoding.lower().split(","):
        name, _, weight = part.partition(";")
        if name.strip() in ALGORITHMS and weight.replace(" ", "") not in (
            "q=0",
            "q=0.0",
            "q=0.00",
            "q=0.000",
        ):
            return name.strip()
    return None


def _too_large(size: int, limit: int) -> ServerError:
    return ServerError.of(
        413, f"the body has {size} bytes or more; this server takes at most {limit}", code="body_too_large"
    )
