"""What a flow works with: the effects that it asks its driver for, and the call, the endpoint and the flight as data."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .cache.memory import Entry
from .errors import MCPError
from .prefetch.prefetcher import Job
from .protocols import ClientCodec, WireRequest, WireResponse
from .request import NO_CLASSES, NO_HEADERS, Parameter, Purpose, Request
from .resilience.breaker import CircuitBreaker
from .resilience.hedge import Cancellation
from .resilience.load import Load
from .telemetry.observer import Attempt
from .tensors import Array

T = TypeVar("T")
CacheOption = bool | float | Literal["refresh"]
ProtocolName = Literal["auto", "mcp", "oip"]


# --- effects: what a flow asks of its driver ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Exchange ``wire`` with the endpoint's server by ``deadline``; the outcome is a ``WireResponse``."""

    endpoint: Endpoint
    wire: WireRequest
    deadline: float


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for another call's flight to land; the outcome is its ``Landing``."""

    flight: Flight
    deadline: float


@dataclass(frozen=True, slots=True)
class Run:
    """Run a function that computes or reads files on this machine; the outcome is what it returns.

    ``halt`` is cancelled where nobody waits for it any longer.
    """

    work: Callable[[], Any]
    deadline: float
    halt: Cancellation | None = None


@dataclass(frozen=True, slots=True)
class Resolve:
    """Look a host name up; the outcome is the list of its addresses, of the family that the system prefers."""

    host: str
    port: int
    deadline: float


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connections of an endpoint that is no more."""

    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class Race:
    """``Send`` ``first``; if it has no answer after ``after_s``, what ``second`` gives too. The loser is cancelled.

    The outcome is a ``Raced``. An overloaded or failing server's answer wins only where the other one has failed as well.
    """

    first: Send
    second: Callable[[], Send | None]
    after_s: float


@dataclass(frozen=True, slots=True)
class Raced:
    response: WireResponse
    by: Send


@dataclass(frozen=True, slots=True)
class Contest:
    """Run a flow and a function of this machine at once; the first to succeed counts, the other is called off.

    The outcome is a ``Contested``. Where both fail, the flow's error is raised with a note of the other one's.
    """

    flow: Flow[Any]
    work: Callable[[Cancellation], Any]
    deadline: float


@dataclass(frozen=True, slots=True)
class Contested:
    value: Any
    by: Literal["flow", "work"]


Effect = Contest | Send | Sleep | Wait | Run | Resolve | Close | Race
Flow = Generator[Effect, Any, T]


# --- state --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server: how to reach it, what it speaks once that is known, and how well it does."""

    url: str
    transport: Any  # HttpTransport or AsyncHttpTransport: only the driver uses it
    protocol: ProtocolName
    codec: ClientCodec | None = None
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    load: Load = field(default_factory=Load)
    aside_until: float = 0.0  # it said that it is not ready, or asked for less
    check_at: float = 0.0  # when its readiness is asked for again


@dataclass(frozen=True, slots=True)
class Landing:
    """How a flight ended: with an answer; with an error that every caller would get; or neither: ask again yourself."""

    value: Any = None
    error: MCPError | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Flight:
    """One question under way, and those who wait for it."""

    purpose: Purpose
    landing: Future[Landing] = field(default_factory=Future)


@dataclass(slots=True)
class Call:
    """One ``infer``: what the user said, then what became of it. Owned by the thread or task that runs its flow."""

    value: Any
    model: str
    version: str
    outputs: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    session: str
    path: str
    priority: int | None
    cache: CacheOption
    fallback: bool
    started: float
    deadline: float
    id: str
    job: Job | None = None  # the prefetch that this is, if it is one
    background: bool = False  # fetched for nobody in particular: a stale entry is renewed
    prefetch_id: str = ""
    # set by the flow
    inputs: dict[str, Array] | None = None
    model_name: str = ""
    key: bytes = b""
    stale: Entry | None = None  # what to fall back to if no server answers
    attempts: int = 0
    server_s: float = 0.0  # how long a server took to answer, if one did
    answer_bytes: int = 0
    endpoint: str = ""
    observed: bool = False  # the observer was told of its start
    trace: Mapping[str, str] | None = None
    span: Any = None  # OpenTelemetry's, of the whole call; each attempt's is below it
    attempt: Attempt | None = None
    # rarely used
    classes: Mapping[str, int] | None = None
    headers: Mapping[str, str] | None = None
    server_timeout_ms: float | None = None  # what the server is told instead of what is left of the deadline

    @property
    def purpose(self) -> Purpose:
        return "prefetch" if self.job is not None or self.background else "demand"

    @property
    def cacheable(self) -> bool:
        """Whether an equal request must give an equal answer: not a step of a server-side sequence."""
        return "sequence_id" not in self.parameters

    def request(self) -> Request:
        """As plain data. Not made before it is needed: a cache hit needs none."""
        assert self.inputs is not None
        return Request(
            model=self.model_name,
            inputs=self.inputs,
            version=self.version,
            outputs=self.outputs,
            parameters=self.parameters,
            id=self.id,
            session=self.session,
            path=self.path,
            priority=self.priority,
            timeout_ms=max(1.0, (self.deadline - time.monotonic()) * 1e3)
            if self.server_timeout_ms is None
            else self.server_timeout_ms,
            purpose=self.purpose,
            trace=self.trace,
            classes=self.classes or NO_CLASSES,
            headers=self.headers or NO_HEADERS,
        )
