"""A model's file over HTTP: its SHA-256 as the ETag, ranges, conditional requests."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from mcp_client.edge.model import file_stamp
from mcp_client.errors import EdgeError, ServerError, listed

from .models import Loaded


def file_answer(request: Request, loaded: Loaded, part: str) -> Response:
    """The file as it was loaded, whole, in part (206, 416) or not at all (304); 409 where it has changed
    since.

    ``part`` "" is the model itself; else one of the files it refers to (external data), by its name.
    """
    metadata = loaded.metadata
    file = loaded.files.get(part or loaded.model.path.name)
    if file is None:
        raise ServerError.of(
            404,
            f"model {metadata.name!r} has no file {part!r}; it has {listed(list(loaded.files))}",
            code="file_not_found",
        )
    try:
        changed = file_stamp(file.path) != file.stamp
    except EdgeError:
        changed = True
    if changed:
        raise ServerError.of(
            409,
            f"the file {file.path.name!r} of model {metadata.name!r} changed on disk after it was loaded; "
            f"POST /v2/repository/models/{metadata.name}/load serves the new one",
            code="model_changed",
        )
    etag = f'"{file.digest.removeprefix("sha256:")}"'
    headers = {
        "ETag": etag,
        "X-Model-Id": metadata.name,
        "X-Model-Version": metadata.version,
        "X-Model-Digest": metadata.digest,
        "Cache-Control": "no-cache",
    }
    if _matches(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers=headers)
    return FileResponse(
        file.path, headers=headers, media_type="application/octet-stream", stat_result=file.path.stat()
    )


def _matches(if_none_match: str, etag: str) -> bool:
    """RFC 9110 13.1.2: a list of ETags, compared weakly, or ``*``."""
    asked = [item.strip().removeprefix("W/") for item in if_none_match.split(",")]
    return etag in asked or asked == ["*"]
