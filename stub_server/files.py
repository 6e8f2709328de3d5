"""A model's file over HTTP: its SHA-256 as the ETag, ranges, conditional requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from mcp_client.errors import ServerError

from .models import Loaded, stamp_of


def file_answer(request: Request, loaded: Loaded) -> Response:
    """The file as it was loaded, whole, in part (206, 416) or not at all (304); 409 where it has changed
    since."""
    try:
        changed = stamp_of(loaded.path) != loaded.stamp
    except FileNotFoundError:
        changed = True
    name = loaded.metadata.name
    if changed:
        raise ServerError.of(
            409,
            f"the file of model {name!r} changed on disk after it was loaded; "
            f"POST /v2/repository/models/{name}/load serves the new one",
            code="model_changed",
        )
    etag = f'"{loaded.metadata.digest.removeprefix("sha256:")}"'
    headers = {
        "ETag": etag,
        "X-Model-Id": name,
        "X-Model-Version": loaded.metadata.version,
        "X-Model-Digest": loaded.metadata.digest,
        "Cache-Control": "no-cache",
    }
    if _matches(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers=headers)
    return FileResponse(
        loaded.path, headers=headers, media_type="application/octet-stream", stat_result=loaded.path.stat()
    )


def _matches(if_none_match: str, etag: str) -> bool:
    """RFC 9110 13.1.2: a list of ETags, compared weakly, or ``*``."""
    asked = [item.strip().removeprefix("W/") for item in if_none_match.split(",")]
    return etag in asked or asked == ["*"]
