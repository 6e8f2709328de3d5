"""Two short drivers that do what a flow asks for: one with threads, one with asyncio. Neither decides anything."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from .effects import Close, Effect, Flight, Flow, Landing, Race, Raced, Resolve, Run, Send, Sleep, Wait
from .errors import ConnectionFailedError, DeadlineExceededError
from .resilience.hedge import Cancellation, cancelling

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
        case Race():
            return _race(effect)


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
        case Race():
            return await _arace(effect)


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


def _race(race: Race) -> Raced:
    """Each exchange in a thread of its own; the loser's connection is closed under it."""
    ended: SimpleQueue[tuple[Send, Any]] = SimpleQueue()

    def start(send: Send) -> Cancellation:
        cancellation = Cancellation()

        def work() -> None:
            cancelling.set(cancellation)
            try:
                outcome = send.endpoint.transport.send(send.wire, send.deadline)
            except BaseException as error:
                outcome = error
            ended.put((send, outcome))

        threading.Thread(target=work, name="mcp-hedge", daemon=True).start()
        return cancellation

    running = [start(race.first)]
    outcomes: list[tuple[Send, Any]] = []
    try:
        try:
            outcomes.append(ended.get(timeout=race.after_s))
        except Empty:
            second = race.second()
            if second is not None:
                running.append(start(second))
            outcomes.append(ended.get())
        while len(outcomes) < len(running) and not _good(outcomes[-1][1]):
            outcomes.append(ended.get())
        return _winner(race, outcomes)
    finally:
        for cancellation in running:
            cancellation.cancel()


async def _arace(race: Race) -> Raced:
    def start(send: Send) -> asyncio.Task[Any]:
        return asyncio.ensure_future(send.endpoint.transport.send(send.wire, send.deadline))

    running = {start(race.first): race.first}
    outcomes: list[tuple[Send, Any]] = []
    try:
        done, _ = await asyncio.wait(running, timeout=race.after_s)
        second = race.second() if not done else None
        if second is not None:
            running[start(second)] = second
        pending = set(running)
        while pending and not (outcomes and _good(outcomes[-1][1])):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [(running[task], task.exception() or task.result()) for task in done]
            outcomes.sort(key=lambda outcome: _good(outcome[1]))
        return _winner(race, outcomes)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _good(outcome: Any) -> bool:
    return not isinstance(outcome, BaseException) and outcome.status < 500 and outcome.status != 429


def _winner(race: Race, outcomes: list[tuple[Send, Any]]) -> Raced:
    """The good answer, else the first request's outcome."""
    send, outcome = next(
        (each for each in outcomes if _good(each[1])),
        next((each for each in outcomes if each[0] is race.first), outcomes[-1]),
    )
    if isinstance(outcome, BaseException):
        raise outcome
    return Raced(outcome, send)


def _addresses(found: list[tuple[Any, ...]]) -> list[str]:
    """Those of the first one's family: the other family's are other ways to the same servers."""
    return list(dict.fromkeys(address[0] for family, _, _, _, address in found if family == found[0][0]))


def _unknown_host(effect: Resolve, error: OSError) -> ConnectionFailedError:
    return ConnectionFailedError(f"the host name {effect.host!r} could not be resolved: {error}")
