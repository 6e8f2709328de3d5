"""The driver that does what a flow asks for with threads; its twin for asyncio is ``aio_driver.py``. Neither decides anything."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Literal, TypeVar

from .effects import Close, Contest, Contested, Effect, Flow, Race, Raced, Resolve, Run, Send, Sleep, Wait
from .errors import ConnectionFailedError, DeadlineExceededError
from .resilience.hedge import CalledOffError, Cancellation, cancelling

T = TypeVar("T")


def run(flow: Flow[T], calling_off: Cancellation | None = None) -> T:
    """Run a flow to its end in this thread.

    Whatever interrupts an effect, a Ctrl-C included, is thrown into the flow at the point where it waits, so that its
    ``finally`` clauses put things right. ``calling_off``: what may break off its effects from another thread.
    """
    try:
        effect = next(flow)
        while True:
            try:
                outcome = _perform(effect)
            except BaseException as error:
                called_off = calling_off is not None and calling_off.cancelled
                effect = flow.throw(CalledOffError() if called_off else error)
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
                raise wait_too_long() from None
        case Run():
            check(effect.deadline)
            return effect.work()
        case Sleep():
            _sleep(effect.seconds)
            return None
        case Resolve():
            try:
                return addresses(socket.getaddrinfo(effect.host, effect.port, type=socket.SOCK_STREAM))
            except OSError as error:
                raise unknown_host(effect, error) from error
        case Close():
            effect.endpoint.transport.close()
            return None
        case Race():
            return _race(effect)
        case Contest():
            return _contest(effect)


def _sleep(seconds: float) -> None:
    cancellation = cancelling.get()
    if cancellation is None:
        time.sleep(seconds)
        return
    called_off = threading.Event()
    cancellation.attach(called_off.set)
    if called_off.wait(seconds):
        raise CalledOffError


def check(deadline: float) -> None:
    if time.monotonic() >= deadline:
        raise DeadlineExceededError("the deadline passed before the local model could be run")


def wait_too_long() -> DeadlineExceededError:
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
    outer = cancelling.get()
    if outer is not None:  # the race is itself one side of a contest
        outer.attach(lambda: _cancel_all(running))
    outcomes: list[tuple[Send, Any]] = []
    try:
        try:
            outcomes.append(ended.get(timeout=race.after_s))
        except Empty:
            second = race.second()
            if second is not None:
                running.append(start(second))
            outcomes.append(ended.get())
        while len(outcomes) < len(running) and not good(outcomes[-1][1]):
            outcomes.append(ended.get())
        return winner(race, outcomes)
    finally:
        _cancel_all(running)


def _cancel_all(cancellations: list[Cancellation]) -> None:
    for cancellation in cancellations:
        cancellation.cancel()


def _contest(contest: Contest) -> Contested:
    """Each side in a thread of its own: the local model can be called off only between two nodes, and nobody waits for that."""
    ended: SimpleQueue[tuple[Literal["flow", "work"], bool, Any]] = SimpleQueue()

    def start(side: Literal["flow", "work"], compete: Callable[[Cancellation], Any]) -> Cancellation:
        cancellation = Cancellation()

        def work() -> None:
            cancelling.set(cancellation)
            try:
                ended.put((side, True, compete(cancellation)))
            except BaseException as error:
                ended.put((side, False, error))

        threading.Thread(target=work, name=f"mcp-contest-{side}", daemon=True).start()
        return cancellation

    sides: list[Cancellation] = []
    try:
        sides.append(start("work", contest.work))
        sides.append(start("flow", lambda cancellation: run(contest.flow, cancellation)))
        errors: dict[str, BaseException] = {}
        while len(errors) < len(sides):
            try:
                side, won, outcome = ended.get(timeout=max(0.0, contest.deadline - time.monotonic()))
            except Empty:
                raise nobody_in_time() from None
            if won:
                return Contested(outcome, side)
            errors[side] = outcome
        raise both_failed(errors["flow"], errors["work"])
    finally:
        _cancel_all(sides)


def nobody_in_time() -> DeadlineExceededError:
    return DeadlineExceededError("neither a server nor the local model answered before the deadline")


def both_failed(server: BaseException, edge: BaseException) -> BaseException:
    server.add_note(f"The edge could not answer either: {edge}")
    return server


def good(outcome: Any) -> bool:
    return not isinstance(outcome, BaseException) and outcome.status < 500 and outcome.status != 429


def winner(race: Race, outcomes: list[tuple[Send, Any]]) -> Raced:
    """The good answer, else the first request's outcome."""
    send, outcome = next(
        (each for each in outcomes if good(each[1])),
        next((each for each in outcomes if each[0] is race.first), outcomes[-1]),
    )
    if isinstance(outcome, BaseException):
        raise outcome
    return Raced(outcome, send)


def addresses(found: list[tuple[Any, ...]]) -> list[str]:
    """Those of the first one's family: the other family's are other ways to the same servers."""
    return list(dict.fromkeys(address[0] for family, _, _, _, address in found if family == found[0][0]))


def unknown_host(effect: Resolve, error: OSError) -> ConnectionFailedError:
    return ConnectionFailedError(f"the host name {effect.host!r} could not be resolved: {error}")
