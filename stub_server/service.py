"""One inference from body to body: faults, deadline, parsing, checking, running, writing; the work is done in
threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from mcp_client.classification import classified
from mcp_client.errors import InvalidInputError, MCPError, ServerError
from mcp_client.protocols import Buffer
from mcp_client.protocols.http_common import Context, read_context, response_hash
from mcp_client.request import Request
from mcp_client.result import Answer

from .faults import Faults
from .metrics import Metrics
from .models import Loaded, Models
from .shared_memory import SharedMemory
from .validate import fitted

Format = Callable[[Answer], tuple[Mapping[str, str], Sequence[Buffer]]]


class Parsed(NamedTuple):
    """A request and how its answer is written. ``short``: its one tensor has no name yet (MCP's short
    form)."""

    request: Request
    format: Format
    short: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished answer: headers and body."""

    headers: dict[str, str]
    body: bytes


class Service:
    """Runs inferences on ``threads`` threads. ``cache_control`` goes on every answer that may be kept at
    all."""

    def __init__(
        self,
        models: Models,
        faults: Faults,
        metrics: Metrics,
        *,
        threads: int,
        cache_control: str = "private",
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.memory = SharedMemory()
        self._faults = faults
        self._cache_control = cache_control
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="mcp-server")

    def close(self) -> None:
        """Drop what waits; what runs now ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def statistics(self, name: str = "", version: str = "") -> list[dict[str, Any]]:
        """The OIP's ``model_stats``: of one version, of the ready ones of a model, or of all that are ready."""
        found = []
        for model in [name] if name else self.models.ready():
            for each in [version] if version else self.models.describe(model).versions:
                metadata = self.models.get(model, each).metadata
                found.append(self.metrics.statistics(metadata.name, metadata.version))
        return found

    async def infer(self, protocol: str, headers: Mapping[str, str], parse: Callable[[], Parsed]) -> Reply:
        """Answer one inference, or raise the ``ServerError`` to answer with."""
        arrived = time.monotonic()
        context = read_context(headers)
        self.metrics.arrived(context.purpose)
        work = _Work(self, protocol, context, arrived)
        try:
            if self._faults.strikes():
                raise ServerError.of(503, "an injected fault (--error-rate)", code="injected_fault")
            await work.wait(self._faults.latency_ms / 1e3)
            submitted = time.monotonic()
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._pool, work.run, parse, submitted, self._cache_control)
        except ServerError as error:
            work.failed(error.code)
            raise
        except Exception:
            work.failed("internal")
            raise


class _Work:
    """What is known of one inference while it is answered."""

    def __init__(self, service: Service, protocol: str, context: Context, arrived: float) -> None:
        self._models, self._metrics = service.models, service.metrics
        self._protocol, self._purpose, self._arrived = protocol, context.purpose, arrived
        self._deadline = _deadline(arrived, context.deadline_ms)
        self._loaded: Loaded | None = None

    async def wait(self, seconds: float) -> None:
        """The injected latency, cut short by the deadline."""
        if seconds > 0:
            left = self._deadline - time.monotonic()
            await asyncio.sleep(min(seconds, max(0.0, left)))
            if (
                seconds >= left
            ):  # an event loop wakes up a little early: the clock may not have reached the deadline
                raise self._too_late()

    def run(self, parse: Callable[[], Parsed], submitted: float, cache_control: str) -> Reply:
        """In a thread: everything that takes processor time."""
        queue_s = time.monotonic() - submitted
        parsed = parse()
        loaded = self._loaded = self._models.get(parsed.request.model, parsed.request.version)
        request = fitted(parsed.request, loaded.metadata, short=parsed.short)
        self._deadline = min(self._deadline, _deadline(self._arrived, request.timeout_ms))
        self._check_deadline()
        compute_s, answer = _compute(loaded, request)
        format_headers, parts = parsed.format(answer)
        body = b"".join(parts)
        metadata = loaded.metadata
        etag = response_hash([body], content_type=format_headers["Content-Type"], model_id=metadata.name)
        headers = {
            **format_headers,
            "X-Model-Id": metadata.name,
            "X-Model-Version": metadata.version,
            "X-Model-Digest": metadata.digest,
            "ETag": f'"{etag}"',
            "Cache-Control": cache_control if request.cacheable else "no-store",
            "Server-Timing": f"queue;dur={queue_s * 1e3:.3f}, compute;dur={compute_s * 1e3:.3f}",
        }
        self._metrics.succeeded(
            protocol=self._protocol,
            model=metadata.name,
            version=metadata.version,
            purpose=self._purpose,
            queue_s=queue_s,
            compute_s=compute_s,
        )
        return Reply(headers, body)

    def failed(self, code: str) -> None:
        metadata = self._loaded.metadata if self._loaded is not None else None
        self._metrics.failed(
            protocol=self._protocol,
            model=metadata.name if metadata is not None else "",
            version=metadata.version if metadata is not None else "",
            purpose=self._purpose,
            code=code,
            seconds=time.monotonic() - self._arrived,
        )

    def _check_deadline(self) -> None:
        if time.monotonic() >= self._deadline:
            raise self._too_late()

    def _too_late(self) -> ServerError:
        allowed = (self._deadline - self._arrived) * 1e3
        return ServerError.of(
            504, f"the deadline of {allowed:.0f} ms passed before the model ran", code="deadline_exceeded"
        )


def _deadline(arrived: float, timeout_ms: float | None) -> float:
    return float("inf") if timeout_ms is None else arrived + timeout_ms / 1e3


def _compute(loaded: Loaded, request: Request) -> tuple[float, Answer]:
    started = time.monotonic()
    try:
        outputs = loaded.model.run(request.inputs, request.outputs)
        if request.classes:
            outputs = classified(outputs, request.classes, loaded.model.labels)
    except InvalidInputError as error:
        raise ServerError.of(400, error.message, code="invalid_input") from error
    except MCPError as error:
        raise ServerError.of(500, error.message, code="inference_failed") from error
    answer = Answer.of(
        outputs, model=request.model, version=request.version, id=request.id, digest=loaded.metadata.digest
    )
    return time.monotonic() - started, answer
