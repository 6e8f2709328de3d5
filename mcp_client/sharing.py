"""One exchange of an inference, its tensors in shared memory where client and server share a machine, else in the message.

Nothing has to be set up: the first large tensor to a local address tries to register a region; a server that can't (another
machine behind a forwarded port, another container, another user, no such extension) is sent everything in messages from then on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .effects import Endpoint, Flow, Send
from .errors import MCPError, ServerError
from .protocols import ClientCodec, Shared, WireRequest
from .request import Request
from .result import Answer
from .tensors import Array, ModelMetadata
from .transports.ipc import Arena, Lease

log = logging.getLogger("mcp_client")

_ALREADY_THERE = 409


def ask_once(
    endpoint: Endpoint, codec: ClientCodec, request: Request, metadata: ModelMetadata | None, deadline: float
) -> Flow[Answer]:
    """Ask once; the answer is the caller's own, wherever it came through."""
    arena: Arena | None = getattr(endpoint.transport, "arena", None)
    if arena is None or not arena.enabled or not hasattr(codec, "infer_shared"):
        response = yield Send(endpoint, _once(codec.infer(request, metadata), request), deadline)
        return codec.decode_infer(response, request)
    question = _question(request)
    sizes = arena.sizes_of(question)
    answer: Answer | None = None
    lease = _lease(arena, request, sizes)
    if lease is not None:
        answer = yield from _shared(arena, lease, endpoint, codec, request, deadline)
    if answer is None:
        response = yield Send(endpoint, _once(codec.infer(request, metadata), request), deadline)
        answer = codec.decode_infer(response, request)
    # The first answer tells how much room the next equal request has to keep for its outputs.
    found = {name: array.nbytes if _worth_it(array, arena) else 0 for name, array in answer.outputs.items()}
    if found != sizes and (sizes or any(found.values())):
        arena.learn_sizes(question, found)
    return answer


def leave(endpoints: Iterable[Endpoint]) -> Flow[None]:
    """Tell the servers that the regions are no more, so that they let go of them."""
    for endpoint in endpoints:
        arena: Arena | None = getattr(endpoint.transport, "arena", None)
        codec: Any = endpoint.codec
        if arena is None or codec is None:
            continue
        for name in arena.registered():
            try:
                yield Send(endpoint, codec.unregister(name), time.monotonic() + 1.0)
            except MCPError:
                break  # a server that is gone has let go


def _once(wire: WireRequest, request: Request) -> WireRequest:
    """A step of a server-side sequence must not be sent again behind our back."""
    return wire if request.cacheable else replace(wire, repeatable=False)


def _worth_it(array: Array, arena: Arena) -> bool:
    return array.nbytes >= arena.threshold and array.dtype.kind != "O"


def _question(request: Request) -> object:
    """What the sizes of the outputs depend on, as a rule."""
    return (
        request.model,
        request.version,
        request.outputs,
        tuple(request.classes.items()),
        tuple((name, array.shape) for name, array in request.inputs.items()),
    )


def _lease(arena: Arena, request: Request, sizes: Any) -> Lease | None:
    inputs = {name: array for name, array in request.inputs.items() if _worth_it(array, arena)}
    if not inputs and not any(sizes.values()):
        return None
    try:
        return arena.lease(inputs, sizes)
    except OSError as error:
        log.info("no shared memory to be had (%s); tensors travel in messages", error)
        return None


def _shared(
    arena: Arena, lease: Lease, endpoint: Endpoint, codec: Any, request: Request, deadline: float
) -> Flow[Answer | None]:
    """``None`` if the server can't do it, which it says before anything was computed."""
    region = lease.region
    shared = Shared(region.name, lease.inputs, lease.outputs, lease.read)
    try:
        if not region.registered:
            response = yield Send(endpoint, codec.register(region.name, region.size), deadline)
            if response.status not in (200, _ALREADY_THERE):
                log.info("%s takes no shared memory (%s)", endpoint.url, response.status)
                arena.enabled = False
                arena.discard(lease)
                return None
            region.registered = True
        response = yield Send(endpoint, _once(codec.infer_shared(request, shared), request), deadline)
    except BaseException:
        arena.discard(lease)  # the server may still be at it
        raise
    try:
        answer: Answer = codec.decode_shared(response, request, shared)
        return answer
    except ServerError as error:
        if "memory" not in error.message.lower() and "region" not in error.message.lower():
            raise
        log.info("%s: %s; this request goes as a message", endpoint.url, error.message)
        arena.forget(_question(request))  # the server was restarted, or an output has grown
        return None
    finally:
        arena.give_back(lease)
