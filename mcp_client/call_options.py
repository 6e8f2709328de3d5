"""The options of one call, checked before anything is sent."""

from __future__ import annotations

import re
from collections.abc import Mapping

from .errors import InvalidInputError
from .request import Outputs, Parameter

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 5.6.2
# What the protocols and transports write themselves. An inference's own id has an argument.
_RESERVED = frozenset(
    (
        *("host", "connection", "te", "upgrade", "trailer", "transfer-encoding"),
        *("content-length", "content-type", "content-encoding", "inference-header-content-length"),
        "x-request-id",
    )
)


def classes(outputs: Outputs) -> dict[str, int] | None:
    """Of which outputs how many classes are wanted; ``None`` where the tensors themselves are."""
    if isinstance(outputs, str) or not all(isinstance(name, str) for name in outputs):
        raise InvalidInputError(f"outputs must be a list of output names; got {outputs!r}")
    if not isinstance(outputs, Mapping):
        return None
    wanted: dict[str, int] = {}
    for name, count in outputs.items():
        if count is None:
            continue
        if type(count) is not int or not 0 < count < 2**31:
            raise InvalidInputError(
                f"outputs={{{name!r}: n}} asks for the n best classes, a whole number ≥ 1 (None: the tensor itself); "
                f"got {count!r}"
            )
        wanted[name] = count
    return wanted or None


def parameters(
    given: Mapping[str, Parameter], priority: int | None
) -> tuple[Mapping[str, Parameter], int | None, float | None]:
    """The parameters that travel as they are, and those that have a place of their own: priority, timeout in milliseconds."""
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, (str, int, float, bool)):
            raise InvalidInputError(
                f"parameters must map names to strings, numbers or booleans; got {name!r}: {value!r}"
            )
    if "priority" not in given and "timeout" not in given:
        return given, priority, None
    rest = dict(given)
    asked, timeout = rest.pop("priority", None), rest.pop("timeout", None)
    for name, number in (("priority", asked), ("timeout", timeout)):
        if number is not None and (type(number) is not int or not 0 <= number < 2**63):
            raise InvalidInputError(f"parameter {name!r} must be a whole number ≥ 0; got {number!r}")
    if priority is None and type(asked) is int:
        priority = asked
    return rest, priority, timeout / 1000 if type(timeout) is int and timeout else None


def check_priority(priority: int) -> None:
    if type(priority) is not int or not 0 <= priority < 2**63:
        raise InvalidInputError(f"priority must be a whole number ≥ 0; got {priority!r}")


def check_headers(headers: Mapping[str, str]) -> None:
    """Names and values that every transport can carry."""
    if not isinstance(headers, Mapping):
        raise InvalidInputError(f"headers must be a dict of names and values; got {type(headers).__name__}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise InvalidInputError(f"{name!r} is no name for a header")
        lower = name.lower()
        if lower in _RESERVED or lower.startswith(("grpc-", "x-mcp-")) or lower.endswith("-bin"):
            raise InvalidInputError(
                f"header {name!r} is written by the client itself (request_id=, session=, path= and timeout= are for what it "
                "says), or has a meaning in gRPC"
            )
        if not isinstance(value, str) or not (value.isascii() and value.isprintable()):
            raise InvalidInputError(
                f"header {name!r} must be printable ASCII (percent-encode anything else); got {type(value).__name__}"
            )
