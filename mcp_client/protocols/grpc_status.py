"""gRPC's status codes as the HTTP statuses that errors.py speaks, and the error that an answer's status means."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ServerError
from . import WireResponse
from .http_common import retry_after

# google/rpc/code.proto lists most of these pairs.
STATUS_OF: Mapping[str, int] = {
    "OK": 200,
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
    "UNAUTHENTICATED": 401,
}
# Where a server puts its own word for an error, and where the transport puts gRPC's.
ERROR_CODE = "x-mcp-error-code"
GRPC_STATUS = "grpc-status"

_CODE_OF: Mapping[int, str] = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def status_code(status: int) -> str:
    """The name of the gRPC code for an HTTP status of errors.py."""
    return _CODE_OF.get(status, "INVALID_ARGUMENT" if 400 <= status < 500 else "INTERNAL")


def status_told(error: str) -> int:
    """A stream's error is text alone; Triton begins it with the code: ``[StatusCode.INVALID_ARGUMENT] …``."""
    code = error.partition("]")[0].removeprefix("[").removeprefix("StatusCode.").strip()
    return STATUS_OF.get(code, 500)


def require_success(response: WireResponse) -> None:
    """Raise the error that a status other than OK means; its text is the body."""
    if response.status == 200:
        return
    headers = response.headers
    code = headers.get(ERROR_CODE, "") or headers.get(GRPC_STATUS, "")
    message = bytes(response.body).decode("utf-8", "replace").strip()
    pushback = headers.get("grpc-retry-pushback-ms", "")  # gRFC A6
    wait = float(pushback) / 1e3 if pushback.isascii() and pushback.isdigit() and len(pushback) < 10 else None
    raise ServerError.of(
        response.status,
        message[:1000] or f"the server answered {code or response.status} and said nothing more",
        code=code,
        retry_after_s=wait if wait is not None else retry_after(headers, now=0.0),
    )
