"""Two short drivers that do what a flow asks for: one with threads, one with asyncio. Neither decides anything."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import Future
from typing import Any, TypeVar

from .effects import Close, Effect, Flight, Flow, Landing, Resolve, Run, Send, Sleep, Wait
from .errors import ConnectionFailedError, DeadlineExceededError

T = TypeVar("T")


def run(flow: Flow[T]) -> T:
    """Run a flow to its end in this thread.

    Whatever interrupts an effect, a Ctrl-C included, is thrown into the flow at the point where it waits, so that its
    ``finally`` clauses put things right.
    """
    try:
        effect = next(flow)
        while True:
            try:
                outcome = _perform(effect)
            except BaseException as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(outcome)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _perform(effect: Effect) -> Any:
    match effect:
        case Send():
            return effect.endpoint.transport.send(effect.wire, effect.deadline)
        case Wait():
            try:
                return effect.flight.landing.result(max(0.0, effect.deadline - time.monotonic()))
            except TimeoutError:
                raise _wait_too_long() from None
        case Run():
            _check(effect.deadline)
            return effect.work()
        case Sleep():
            time.sleep(effect.seconds)
            return None
        case Resolve():
            try:
                return _addresses(socket.getaddrinfo(effect.host, effect.port, type=socket.SOCK_STREAM))
            except OSError as error:
                raise _unknown_host(effect, error) from error
        case Close():
            effect.endpoint.transport.close()
            return None


async def arun(flow: Flow[T]) -> T:
    """Run a flow to its end in this task. A cancelled task cancels the exchange under way."""
    try:
        effect = next(flow)
        while True:
            try:
                outcome = await _aperform(effect)
            except BaseException as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(outcome)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _aperform(effect: Effect) -> Any:
    match effect:
        case Send():
            return await effect.endpoint.transport.send(effect.wire, effect.deadline)
        case Wait():
            return await _landing(effect.flight, effect.deadline)
        case Run():
            _check(effect.deadline)
            try:
                async with asyncio.timeout(effect.deadline - time.monotonic()):
                    return await asyncio.to_thread(effect.work)
            except TimeoutError:
                raise DeadlineExceededError("the local model did not answer before the deadline") from None
        case Sleep():
            await asyncio.sleep(effect.seconds)
            return None
        case Resolve():
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(effect.deadline - time.monotonic()):
                    return _addresses(
                        await loop.getaddrinfo(effect.host, effect.port, type=socket.SOCK_STREAM)
                    )
            except OSError as error:  # TimeoutError is one
                raise _unknown_host(effect, error) from error
        case Close():
            await effect.endpoint.transport.close()
            return None


async def _landing(flight: Flight, deadline: float) -> Landing:
    """Wait without owning: cancelling this task must not cancel the flight that others wait for."""
    loop = asyncio.get_running_loop()
    landed: asyncio.Future[Landing] = loop.create_future()

    def land(landing: Landing) -> None:
        if not landed.done():
            landed.set_result(landing)

    def tell(future: Future[Landing]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(land, future.result())

    flight.landing.add_done_callback(tell)
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            return await landed
    except TimeoutError:
        raise _wait_too_long() from None


def _check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise DeadlineExceededError("the deadline passed before the local model could be run")


def _wait_too_long() -> DeadlineExceededError:
    return DeadlineExceededError(
        "an equal request was already under way, and no answer came before the deadline"
    )


def _addresses(found: list[tuple[Any, ...]]) -> list[str]:
    """Those of the first one's family: the other family's are other ways to the same servers."""
    return list(dict.fromkeys(address[0] for family, _, _, _, address in found if family == found[0][0]))


def _unknown_host(effect: Resolve, error: OSError) -> ConnectionFailedError:
    return ConnectionFailedError(f"the host name {effect.host!r} could not be resolved: {error}")
