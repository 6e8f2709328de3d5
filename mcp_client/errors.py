"""Every error the SDK raises: what was expected, what came, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar


class MCPError(Exception):
    """Base of all errors. A request that reached the flow also says which request, endpoint and attempt failed."""

    request_id: str = ""
    endpoint: str = ""
    attempts: int = 0

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def at(self, *, request_id: str = "", endpoint: str = "", attempts: int = 0) -> MCPError:
        """Attach where this happened (kept where already set) and return the error, ready to raise."""
        self.request_id = self.request_id or request_id
        self.endpoint = self.endpoint or endpoint
        self.attempts = self.attempts or attempts
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are copied (each caller of a shared flight gets its own) and cross process pools: whatever arguments a
        # subclass was made with, its state is what counts.
        return _remade, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        where = [
            f"request {self.request_id}" if self.request_id else "",
            f"endpoint {self.endpoint}" if self.endpoint else "",
            f"attempt {self.attempts}" if self.attempts else "",
        ]
        told = ", ".join(part for part in where if part)
        return f"{self.message} [{told}]" if told else self.message


def _remade(kind: type[MCPError], args: tuple[Any, ...], state: dict[str, Any]) -> MCPError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidInputError(MCPError, ValueError):
    """The call can't be sent as it is: a wrong name, rank, shape, datatype or option."""


class ConfigurationError(MCPError, ValueError):
    """The client was set up wrongly: a bad URL, an unknown option, a missing extra."""


class MissingExtraError(ConfigurationError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""

    # What an ImportError names is the module that was looked for.
    _PACKAGES: ClassVar = {"google": "protobuf", "grpc": "grpcio"}

    def __init__(self, extra: str, module: str, purpose: str) -> None:
        package = self._PACKAGES.get(module.partition(".")[0], module)
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'mcp2026[{extra}]'")


class ProtocolError(MCPError):
    """The server's bytes are not what its protocol says: truncated, malformed, or a shape that does not fit its data."""


class ConnectionFailedError(MCPError, ConnectionError):
    """No server could be reached, or the connection broke before an answer came.

    ``nothing_sent``: not even a connection was made, so the server can't have done anything.
    """

    nothing_sent: bool = False


class DeadlineExceededError(MCPError, TimeoutError):
    """The call's deadline passed, retries included."""


class CircuitOpenError(ConnectionFailedError):
    """The endpoint failed repeatedly and is being left alone; nothing was sent."""

    nothing_sent = True


class ClientClosedError(MCPError, RuntimeError):
    """The client was used after close()."""


class EdgeError(MCPError):
    """The local ONNX model can't answer: no such model, or the runtime failed."""


class IntegrityError(EdgeError):
    """A model file's SHA-256 is not the announced one; the file was not used."""


class ServerError(MCPError):
    """The server answered with an error status.

    ``status`` is the HTTP status (gRPC codes are mapped to it), ``code`` the server's own word for the error
    (for example ``shape_mismatch``), ``retry_after_s`` the seconds it asked us to wait, if it did.
    """

    def __init__(
        self, message: str, *, status: int, code: str = "", retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s

    @classmethod
    def of(
        cls, status: int, message: str, *, code: str = "", retry_after_s: float | None = None
    ) -> ServerError:
        """The subclass that fits ``status``."""
        kind = _BY_STATUS.get(status, cls)
        return kind(message, status=status, code=code, retry_after_s=retry_after_s)


class RequestRejectedError(ServerError):
    """400, 409, 413, 415 or 422: the server says that the request itself is wrong; sending it again will not help."""


class AuthenticationError(ServerError):
    """401 or 403: the credential is missing, wrong or not allowed to do this."""


class NotFoundError(ServerError):
    """404: no such model, version or route."""


class NotOfferedError(ServerError):
    """The server does not have this call at all (an extension it lacks), or the protocol spoken with it has not."""


class OverloadedError(ServerError):
    """429 or 503: the server asks for less; ``retry_after_s`` says for how long, if it said so."""


class ServerTimeoutError(ServerError):
    """408 or 504: the server, or a proxy before it, gave up waiting."""


_BY_STATUS: dict[int, type[ServerError]] = {
    400: RequestRejectedError,
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    408: ServerTimeoutError,
    409: RequestRejectedError,
    413: RequestRejectedError,
    415: RequestRejectedError,
    422: RequestRejectedError,
    429: OverloadedError,
    503: OverloadedError,
    504: ServerTimeoutError,
}


def listed(names: Sequence[str], *, most: int = 20) -> str:
    """``'a', 'b' and 3 more``: names for an error message, never an endless one."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown or "none"
