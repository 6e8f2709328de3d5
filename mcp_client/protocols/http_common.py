"""What every HTTP protocol shares: headers of a request, error bodies of any server, Retry-After,
Cache-Control, the ETag.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple, TypedDict
from urllib.parse import quote, unquote

from ..errors import InvalidInputError, ProtocolError, ServerError
from ..request import Parameter, Purpose, Request
from . import WireResponse
from .json_tensors import loads

_LONGEST_MESSAGE = 1000
_PLAIN = re.compile(r"[A-Za-z0-9_.~/-]*").fullmatch
_HEADER_SAFE = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != "%")


def request_headers(request: Request) -> dict[str, str]:
    """The MCP headers of an inference; session and path are percent-encoded where a header can't carry
    them.
    """
    headers: dict[str, str] = {"X-MCP-Purpose": request.purpose}
    if request.trace:
        headers.update(request.trace)
    if request.id:
        headers["X-Request-Id"] = _in_header(request.id)
    if request.session:
        headers["X-MCP-Session"] = _in_header(request.session)
    if request.path:
        headers["X-MCP-Path"] = _in_header(request.path)
    if request.timeout_ms is not None:
        headers["X-MCP-Deadline-Ms"] = str(max(1, int(request.timeout_ms)))
    if request.headers:
        named = {name.lower() for name in request.headers}
        headers = {name: value for name, value in headers.items() if name.lower() not in named}
        headers.update(request.headers)
    return headers


def _in_header(text: str) -> str:
    return text if _PLAIN(text) else quote(text, safe=_HEADER_SAFE)


class Context(NamedTuple):
    """What the server reads from the headers of an inference; ``deadline_ms`` is what the caller still waits
    for.
    """

    request_id: str
    session: str
    path: str
    purpose: Purpose
    deadline_ms: float | None


def read_context(headers: Mapping[str, str]) -> Context:
    """The server's side of ``request_headers``. Header names are lower case."""
    purpose = headers.get("x-mcp-purpose", "demand")
    if purpose not in ("demand", "prefetch"):
        raise ServerError.of(
            400, f"X-MCP-Purpose must be demand or prefetch; got {purpose[:40]!r}", code="malformed_request"
        )
    deadline = headers.get("x-mcp-deadline-ms", "")
    try:
        deadline_ms = float(deadline) if deadline else None
    except ValueError:
        deadline_ms = -1.0
    if deadline_ms is not None and not 0 <= deadline_ms < float("inf"):
        raise ServerError.of(
            400,
            f"X-MCP-Deadline-Ms must be milliseconds ≥ 0; got {deadline[:40]!r}",
            code="malformed_request",
        )
    return Context(
        request_id=unquote(headers.get("x-request-id", "")),
        session=unquote(headers.get("x-mcp-session", "")),
        path=unquote(headers.get("x-mcp-path", "")),
        purpose="prefetch" if purpose == "prefetch" else "demand",
        deadline_ms=deadline_ms,
    )


def check_parameters(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """The parameters as JSON has them: finite, and within 64 bits."""
    for name, value in parameters.items():
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise InvalidInputError(
                f"parameter {name!r} is {value}, which JSON can't carry; pass it as a string"
            )
    return dict(parameters)


def read_parameters(value: Any) -> dict[str, Parameter]:
    """Parameters from the wire: an object of strings, numbers and booleans, or nothing."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(item, (str, int, float, bool)) for item in value.values()
    ):
        raise ProtocolError("parameters must be an object of strings, numbers and booleans")
    return value


def require_success(response: WireResponse) -> None:
    """Raise the error that a status other than 200 means."""
    if response.status != 200:
        raise server_error(response)


def server_error(response: WireResponse) -> ServerError:
    """An error answer of any server: MCP, Triton, MLServer, FastAPI and KServe, proxies with HTML, plain
    text, nothing.
    """
    message, code = _told(response)
    if not message:
        message = f"the server answered {_status_words(response.status)} and said nothing more"
        if 300 <= response.status < 400:
            target = response.headers.get("location", "another address")
            message = f"the server redirects to {target}; use that URL"
    return ServerError.of(
        response.status, message, code=code, retry_after_s=retry_after(response.headers, now=time.time())
    )


def _told(response: WireResponse) -> tuple[str, str]:
    """The message and code in the body, or two empty strings."""
    body = bytes(response.body)
    try:
        document = loads(body, "error")
    except ProtocolError:
        text = body.decode("utf-8", "replace")
        if "html" in response.headers.get("content-type", "") or text.lstrip()[:1] == "<":
            text = _text_of_html(text)
        return _short(text), ""
    code = ""
    if isinstance(document, dict):
        code = _word(document.get("code"))
        error = document.get("error", document.get("detail", document.get("message", document.get("title"))))
        if isinstance(error, dict):
            code = _word(error.get("code")) or _word(error.get("type")) or code
            error = error.get("message", error.get("detail", error))
        document = error
    if isinstance(document, list):
        return _short("; ".join(map(_validation_line, document))), code
    return _short(document if isinstance(document, str) else "" if document is None else repr(document)), code


def _validation_line(item: Any) -> str:
    """One of FastAPI's validation errors: ``{"loc": ["body", "inputs"], "msg": "field required", "type":
    …}``.
    """
    if isinstance(item, dict) and "msg" in item:
        loc = item.get("loc")
        where = ".".join(map(str, loc)) if isinstance(loc, list) else ""
        return f"{where}: {item['msg']}" if where else str(item["msg"])
    return str(item)


def _text_of_html(text: str) -> str:
    title = re.search(r"<title[^>]*>(.*?)</title", text, re.IGNORECASE | re.DOTALL)
    if title and title.group(1).strip():
        return title.group(1)
    return re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text, flags=re.IGNORECASE | re.DOTALL)


def _word(value: Any) -> str:
    return str(value)[:100] if isinstance(value, (str, int)) and not isinstance(value, bool) else ""


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def _status_words(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return str(status)


def retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds to wait by ``Retry-After`` (RFC 9110 10.2.3): a number, or a date, taken by the server's own
    clock if it sent ``Date``, else by ``now`` (Unix seconds). ``None`` if absent or unreadable.
    """
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(
        r"\d{1,10}(\.\d{1,9})?", value
    ):  # whole seconds by the standard; fractions are seen in the wild
        return float(value)
    when = _http_date(value)
    if when is None:
        return None
    date = _http_date(headers.get("date", ""))
    return max(0.0, when - (now if date is None else date))


def _http_date(value: str) -> float | None:
    from email.utils import (
        parsedate_to_datetime,
    )  # late: dates are rare, and it takes a tenth of our own imports

    try:
        return parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError, TypeError, IndexError):
        return None


class Freshness(TypedDict):
    """What ``Cache-Control`` says, as arguments of an ``Answer``; ``None`` where it says nothing."""

    max_age_s: float | None
    no_store: bool
    stale_while_revalidate_s: float | None
    stale_if_error_s: float | None


def freshness(headers: Mapping[str, str]) -> Freshness:
    """By ``Cache-Control`` and ``Age`` (RFC 9111) and its two extensions for stale answers (RFC 5861), read as a private cache.

    ``no-cache`` counts as ``no-store``: nothing here can revalidate. An unreadable ``max-age`` means stale
    (4.2.1). ``must-revalidate`` rules stale answers out (5.2.2.2).
    """
    result = Freshness(max_age_s=None, no_store=False, stale_while_revalidate_s=None, stale_if_error_s=None)
    if "cache-control" not in headers:  # most inference servers say nothing
        return result
    directives: dict[str, float] = {}
    for part in headers["cache-control"].lower().split(","):
        name, _, argument = part.strip().partition("=")
        name, argument = name.strip(), argument.strip().strip('"')
        if name in ("no-store", "no-cache"):
            return {**result, "no_store": True}
        seconds = float(argument) if re.fullmatch(r"\d{1,18}", argument) else 0.0
        directives[name] = min(seconds, directives.get(name, seconds))
    if "max-age" in directives:
        age = headers.get("age", "").strip()
        passed = float(age) if re.fullmatch(r"\d{1,18}", age) else 0.0
        result["max_age_s"] = max(0.0, directives["max-age"] - passed)
    stale_allowed = "must-revalidate" not in directives
    result["stale_while_revalidate_s"] = directives.get("stale-while-revalidate") if stale_allowed else 0.0
    result["stale_if_error_s"] = directives.get("stale-if-error") if stale_allowed else 0.0
    return result


def response_hash(parts: Iterable[bytes | memoryview], *, content_type: str, model_id: str) -> str:
    """The ETag of an inference: SHA-256 (hex) over the body, ``content-type`` and ``x-model-id``, a NUL
    between them.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    digest.update(b"\0" + content_type.encode() + b"\0" + model_id.encode())
    return digest.hexdigest()


@lru_cache(1024)  # quoting costs as much as all the rest of a small request
def name_in_path(name: str, what: str) -> str:
    """A model name or version as one segment of a URL."""
    if name in (".", ".."):  # percent-encoding does not help: URL libraries resolve dot segments all the same
        raise InvalidInputError(f"{what} can't be {name!r}")
    return quote(name, safe="")
