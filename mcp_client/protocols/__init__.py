"""Codecs: requests and answers to bytes and back, without I/O. One module a protocol, each for both sides of the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..request import Request
from ..result import Answer
from ..tensors import ModelMetadata

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class WireRequest:
    """One exchange to make. ``body`` is sent part by part, so that tensors need no joining.

    Over gRPC ``path`` is the method's full name, ``headers`` its metadata and ``body`` the message. ``repeatable=False``: the
    server would notice if it came twice.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[Buffer] = ()
    repeatable: bool = True


@dataclass(frozen=True, slots=True)
class WireResponse:
    """What came back. Header names are lower case. gRPC's codes come as the HTTP statuses that mean the same."""

    status: int
    headers: Mapping[str, str]
    body: Buffer


@dataclass(frozen=True, slots=True)
class Shared:
    """The tensors of one request that lie in a region of shared memory: offset and size in bytes by name.

    ``outputs`` names every output that is wanted; ``None`` for one that comes in the message. ``read`` copies bytes out.
    """

    region: str
    inputs: Mapping[str, tuple[int, int]]
    outputs: Mapping[str, tuple[int, int] | None]
    read: Callable[[int, int], bytes]


class ClientCodec(Protocol):
    """The client's side of a protocol: every method is a pure function of its arguments.

    ``decode_*`` raise the fitting ``ServerError`` for an error status and ``ProtocolError`` for a malformed answer.
    """

    name: str

    def infer(self, request: Request, metadata: ModelMetadata | None) -> WireRequest: ...
    def decode_infer(self, response: WireResponse, request: Request) -> Answer: ...
    def metadata(self, model: str, version: str) -> WireRequest: ...
    def decode_metadata(self, response: WireResponse) -> ModelMetadata: ...
    def models(self) -> WireRequest: ...
    def decode_models(self, response: WireResponse) -> list[str]: ...
    def models_otherwise(self, response: WireResponse) -> WireRequest | None: ...
    def decode_models_otherwise(self, response: WireResponse) -> list[str]: ...
    def ready(self) -> WireRequest: ...
    def decode_ready(self, response: WireResponse) -> bool: ...
    def live(self) -> WireRequest: ...
    def decode_live(self, response: WireResponse) -> bool: ...
    def model_ready(self, model: str, version: str) -> WireRequest: ...
    def decode_model_ready(self, response: WireResponse) -> bool: ...


Json = dict[str, Any]
