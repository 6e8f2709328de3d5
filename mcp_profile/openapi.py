"""What the API's own OpenAPI document says beyond what FastAPI finds out: bodies, answers, errors, and who may ask."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from .ingest import MAX_EVENTS, OUTCOMES, SOURCES

MSGPACK = "application/vnd.mcp.profile+msgpack"

_JSON = "application/json"
_ERRORS = {
    400: "The body is not what its headers say",
    401: "No valid API key",
    403: "The API key lacks the scope, or an open server was asked by another name than loopback",
    413: "Too large; `limits` says what is taken",
    415: "Another content type or encoding than this takes",
    422: "Parameters or body are not what is expected",
    429: "More events than the application may send; `Retry-After` says when to come again",
    503: "The database failed; `Retry-After` says when to come again",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "request_id"],
            "properties": {name: {"type": "string"} for name in ("code", "message", "request_id")},
        }
    },
}
_NUMBER = {"type": "number", "minimum": 0}
_TEXT = {"type": "string", "pattern": r"^[^\x00-\x1f\x7f]*$"}
_COUNT = {"type": "integer", "minimum": 0}
_EVENT = {
    "type": "object",
    "required": ["t", "source"],
    "properties": {
        "seq": _COUNT | {"maximum": (1 << 63) - 1},
        "t": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e11},
        "session": _TEXT | {"maxLength": 128},
        "path": _TEXT | {"maxLength": 512},
        "route": _TEXT | {"maxLength": 512},
        "fp": _TEXT | {"maxLength": 64},
        "model": _TEXT | {"maxLength": 256},
        "source": {"enum": sorted(SOURCES)},
        "latency_ms": _NUMBER | {"exclusiveMaximum": 1e12},
        "bytes": _COUNT | {"maximum": (1 << 63) - 1},
        "prefetch_id": _TEXT | {"maxLength": 64},
        "outcome": {"enum": sorted(OUTCOMES)},
    },
}
_NAME = _TEXT | {"minLength": 1, "maxLength": 64}
BATCH = {
    "type": "object",
    "required": ["batch_id", "client_id", "events"],
    "properties": {
        "batch_id": _NAME,
        "client_id": _NAME,
        "sdk": _TEXT | {"type": ["string", "null"]},
        "sent_at": {"type": ["string", "null"]},
        # Anything is taken as an event: what is none is rejected by its index, and the rest of the batch is kept.
        "events": {
            "type": "array",
            "items": {"anyOf": [_EVENT, {}]},
            "description": f"At most {MAX_EVENTS}; more are answered with 413",
        },
    },
}
_REJECTED = {
    "type": "object",
    "required": ["index", "error"],
    "properties": {"index": _COUNT, "error": {"type": "string"}},
}
TAKEN = {
    "type": "object",
    "required": ["accepted", "duplicates"],
    "properties": {
        "accepted": _COUNT,
        "duplicates": _COUNT,
        "rejected": {"type": "array", "items": _REJECTED},
    },
}
_RULE = {
    "type": "object",
    "required": ["prefix", "ttl_s"],
    "properties": {"prefix": {"type": "string"}, "ttl_s": _NUMBER, "max_ttl_s": _NUMBER},
}
POLICY_BODY = {
    "type": "object",
    "properties": {
        "rules": {"type": "array", "items": _RULE},
        "default_ttl_s": {"type": ["number", "null"], "minimum": 0},
    },
}
POLICY = POLICY_BODY | {
    "required": ["version", "rules", "default_ttl_s"],
    "properties": {"version": _COUNT, **POLICY_BODY["properties"]},  # type: ignore[dict-item]
}


def _object(**properties: str) -> dict[str, Any]:
    kinds = {name: {"type": kind} for name, kind in properties.items()}
    return {"type": "object", "required": list(kinds), "properties": kinds}


PROFILE = _object(
    format="integer", version="string", order="integer", paths="object", routes="object", keys="object"
)
PATHS = _object(paths="array")
GRAPH = _object(session="string", nodes="array", edges="array")
STATS = _object(events="integer", batches="integer", sources="object", hours="array", profile="object")
STATUS = _object(status="string")


def described(
    schema: dict[str, Any] | None,
    *errors: int,
    status: int = 200,
    body: dict[str, Any] | None = None,
    unchanged: bool = False,
    also: str = "",
    kind: str = _JSON,
    key: bool = True,
) -> dict[str, Any]:
    """Arguments for a route: what it answers (``schema`` in ``kind``, and in ``also``), the errors, the ``body`` it takes.

    ``unchanged``: 304 is an answer. ``key``: asks for an API key where the server does.
    """
    content: dict[str, Any] = {kind: {"schema": schema} if schema else {}}
    if also:
        content[also] = {}
    answers: dict[int | str, Any] = {status: {"description": "Successful", "content": content}}
    if unchanged:
        answers[304] = {"description": "Not modified: it is what If-None-Match names"}
    for number in sorted({*errors, 403, 422, 503} | ({401} if key else set())):
        answers[number] = {"description": _ERRORS[number], "content": {_JSON: {"schema": _ERROR}}}
    extra: dict[str, Any] = {"security": [{"key": []}]} if key else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {_JSON: {"schema": body}}}
    return {"status_code": status, "responses": answers, "openapi_extra": extra}


def with_security(app: FastAPI) -> None:
    """Say in the document what a key is."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        document = made()
        document.setdefault("components", {})["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"}
        }
        return document

    app.openapi = openapi  # type: ignore[method-assign]
