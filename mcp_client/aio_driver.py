"""The driver that does what a flow asks for with asyncio; ``drivers.py``, for threads, needs no asyncio at all."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import Future
from typing import Any, TypeVar

from .drivers import addresses, both_failed, check, good, nobody_in_time, unknown_host, wait_too_long, winner
from .effects import (
    Close,
    Contest,
    Contested,
    Effect,
    Flight,
    Flow,
    Landing,
    Race,
    Raced,
    Resolve,
    Run,
    Send,
    Sleep,
    Wait,
)
from .errors import DeadlineExceededError
from .resilience.hedge import Cancellation

T = TypeVar("T")


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
            check(effect.deadline)
            try:
                async with asyncio.timeout(effect.deadline - time.monotonic()):
                    return await asyncio.to_thread(effect.work)
            except TimeoutError:
                raise DeadlineExceededError("the local model did not answer before the deadline") from None
            finally:  # a thread can't be cancelled: what it runs is told to stop, if it still does
                if effect.halt is not None:
                    effect.halt.cancel()
        case Sleep():
            await asyncio.sleep(effect.seconds)
            return None
        case Resolve():
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(effect.deadline - time.monotonic()):
                    return addresses(
                        await loop.getaddrinfo(effect.host, effect.port, type=socket.SOCK_STREAM)
                    )
            except OSError as error:  # TimeoutError is one
                raise unknown_host(effect, error) from error
        case Close():
            await effect.endpoint.transport.close()
            return None
        case Race():
            return await _arace(effect)
        case Contest():
            return await _acontest(effect)


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
        raise wait_too_long() from None


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
        while pending and not (outcomes and good(outcomes[-1][1])):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            outcomes += [(running[task], task.exception() or task.result()) for task in done]
            outcomes.sort(key=lambda outcome: good(outcome[1]))
        return winner(race, outcomes)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _acontest(contest: Contest) -> Contested:
    halt = Cancellation()
    flow = asyncio.ensure_future(arun(contest.flow))
    work = asyncio.ensure_future(asyncio.to_thread(contest.work, halt))
    try:
        pending: set[asyncio.Future[Any]] = {flow, work}
        while pending:
            left = max(0.0, contest.deadline - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise nobody_in_time()
            for task in (flow, work):  # the server's answer first, where both are there
                if task in done and task.exception() is None:
                    return Contested(task.result(), "flow" if task is flow else "work")
        server, edge = flow.exception(), work.exception()
        assert server is not None
        assert edge is not None
        raise both_failed(server, edge)
    finally:
        halt.cancel()
        flow.cancel()
        work.cancel()
        await asyncio.gather(flow, work, return_exceptions=True)
