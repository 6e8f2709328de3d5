"""The errors of the Profile API, as PROTOCOL.md has them:

a fitting status, a code, a message that says what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class APIError(Exception):
    """``status`` and ``code`` go to the client with the message;

    ``extra`` joins the answer's body, ``headers`` its headers.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})

    def body(self, request_id: str) -> dict[str, Any]:
        error = {"code": self.code, "message": self.message, "request_id": request_id}
        return {"error": error, **self.extra}
