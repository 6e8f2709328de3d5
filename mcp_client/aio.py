"""The public face for asyncio: the same as ``client.py``, awaited."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from . import operations
from .aio_driver import arun
from .base import BaseClient, BaseEdge, BaseSession
from .effects import CacheOption, Call, Flow
from .errors import DeadlineExceededError, MCPError
from .management import IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from .prefetch.handle import Ending, PrefetchHandle
from .prefetch.prefetcher import Job
from .request import Outputs, Parameter
from .result import InferResult
from .sharing import leave
from .streaming import open_stream
from .tensors import ModelMetadata

if TYPE_CHECKING:
    from .edge.sync import SyncReport
    from .transports.compression import AsyncCompressing
    from .transports.grpc import AsyncGrpcTransport
    from .transports.http import AsyncHttpTransport


log = logging.getLogger("mcp_client")


class AsyncPrefetchHandle(PrefetchHandle):
    """The same for asyncio."""

    async def wait(self, timeout: float | None = None) -> Ending:  # type: ignore[override]
        """Wait for the end, as ``PrefetchHandle.wait``."""
        try:
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(self._ending)), timeout)
        except TimeoutError:
            raise DeadlineExceededError(f"the prefetch has not ended within {timeout} s") from None


class AsyncMCPClient(BaseClient):
    """The same for asyncio: ``await client.infer(…)``. Usable from several event loops, one after another or at once."""

    _loop: asyncio.AbstractEventLoop | None = None  # where prefetches run: that of the last call

    @cached_property
    def _tasks(self) -> set[asyncio.Task[None]]:
        return set()

    def _transport(
        self, url: str, *, compression: str | None = None, **options: Any
    ) -> AsyncHttpTransport | AsyncGrpcTransport | AsyncCompressing:
        if url.startswith("grpc"):
            from .transports.grpc import AsyncGrpcTransport

            return AsyncGrpcTransport(url, compression=compression, **options)
        from .transports.http import AsyncHttpTransport  # late: an edge client needs no HTTP library

        transport = AsyncHttpTransport(url, **options)
        if compression is None:
            return transport
        from .transports.compression import AsyncCompressing

        return AsyncCompressing(transport, compression)

    async def infer(
        self,
        inputs: Any = None,
        *,
        model: str | None = None,
        version: str | None = None,
        outputs: Outputs | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        session: str | None = None,
        path: str | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        cache: CacheOption = True,
        fallback: bool = True,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> InferResult:
        """As ``MCPClient.infer``. Cancelling the task cancels the exchange on the wire."""
        call = self._call(
            inputs,
            model,
            version,
            outputs,
            parameters,
            session,
            path,
            priority,
            timeout,
            cache,
            fallback,
            headers,
            request_id,
        )
        self._loop = asyncio.get_running_loop()
        result = self._engine.hit(call)
        return result if result is not None else await arun(self._engine.infer(call))

    def prefetch(
        self,
        inputs: Any = None,
        *,
        model: str | None = None,
        version: str | None = None,
        outputs: Outputs | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        session: str | None = None,
        path: str | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncPrefetchHandle:
        """As ``MCPClient.prefetch``: not awaited, it returns at once. Call it where an event loop runs."""
        self._loop = asyncio.get_running_loop()
        handle = AsyncPrefetchHandle()
        self._by_hand(
            handle, inputs, model, version, outputs, parameters, session, path, priority, timeout, headers
        )
        return handle

    async def stream(
        self,
        inputs: Any,
        *,
        model: str | None = None,
        version: str | None = None,
        outputs: Outputs | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        session: str | None = None,
        path: str | None = None,
        priority: int | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> AsyncIterator[InferResult]:
        """As ``MCPClient.stream``, with ``async for``. (Leave an iterator early with ``contextlib.aclosing``.)"""
        call = self._call(
            inputs,
            model,
            version,
            outputs,
            parameters,
            session,
            path,
            priority,
            timeout,
            cache=False,
            headers=headers,
            request_id=request_id,
        )
        stream = await arun(open_stream(self._engine, call))
        with stream.accounted():
            async with aclosing(stream.transport.stream(stream.wire, stream.deadline)) as responses:
                async for response in responses:
                    result = stream.result(response)
                    if result is not None:
                        yield result

    def session(self, id: str) -> AsyncSession:
        """A session: its requests carry its id, and each one's path is a step that prefetch learns from."""
        return AsyncSession(self, id)

    async def metadata(self, model: str | None = None, version: str | None = None) -> ModelMetadata:
        """The model's inputs and outputs."""
        return await arun(operations.metadata(self._engine, self._call((), model, version)))

    async def models(self) -> list[str]:
        """The names of the server's models; without a server, of the edge's."""
        if not self._engine.endpoints and self._edge is not None:
            return self._edge.models()
        return await arun(operations.models(self._engine, self._call(())))

    async def ready(
        self, timeout: float = 1.0, *, model: str | None = None, version: str | None = None
    ) -> bool:
        """Whether a server answers that it is ready, or that ``model`` is."""
        return await arun(operations.ready(self._engine, self._call((), model, version, timeout=timeout)))

    async def live(self, timeout: float = 1.0) -> bool:
        """Whether a server answers at all."""
        return await arun(operations.live(self._engine, self._call((), timeout=timeout)))

    async def server(self) -> ServerInfo:
        """What the server is: name, version, extensions."""
        return await arun(operations.server(self._engine, self._call(())))

    async def index(self) -> list[IndexEntry]:
        """Every model version that the server has, ready or not, and why not."""
        return await arun(operations.index(self._engine, self._call(())))

    async def config(self, model: str | None = None, version: str | None = None) -> ModelConfig:
        """How the server is set up to run the model."""
        return await arun(operations.config(self._engine, self._call((), model, version)))

    async def statistics(self, model: str | None = None, version: str | None = None) -> list[ModelStatistics]:
        """Counts and times of the model's versions (default: of all models), for each of the endpoints."""
        return await arun(operations.statistics(self._engine, self._call((), model, version)))

    async def load(
        self,
        model: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """As ``MCPClient.load``."""
        call = self._call((), model, timeout=timeout)
        await arun(operations.load(self._engine, call, config, files or {}))

    async def unload(self, model: str, *, dependents: bool = False, timeout: float | None = None) -> None:
        """Have every endpoint serve the model no more; ``dependents``: those too that an ensemble brought along."""
        await arun(operations.unload(self._engine, self._call((), model, timeout=timeout), dependents))

    @property
    def edge(self) -> AsyncEdgeFolder:
        """The models on this machine: ``await sync()``, ``models()``."""
        return AsyncEdgeFolder(self)

    async def flush(self, timeout: float = 10.0) -> bool:
        """Send the telemetry recorded so far; whether the Profile API has it all."""
        return (
            await asyncio.to_thread(self._telemetry.flush, timeout) if self._telemetry is not None else True
        )

    async def close(self) -> None:
        """As ``MCPClient.close``."""
        if self._closed:
            return
        self._closed = True
        if self._prefetcher is not None:
            await asyncio.to_thread(self._prefetcher.close)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._close_shared)
        await arun(leave(self._engine.endpoints))
        for endpoint in self._engine.endpoints:
            await endpoint.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _issue(self, job: Job) -> None:
        """Fetch ahead, in a task of the application's own event loop."""
        assert self._prefetcher is not None
        loop = self._loop
        try:
            if loop is None or self._closed:
                raise RuntimeError("no event loop to prefetch in")
            loop.call_soon_threadsafe(self._start_job, job)
        except RuntimeError:  # the loop was closed: the application has ended, or goes on in another one
            self._prefetcher.finished(job, None, sent=False, cancelled=True)

    def _start_job(self, job: Job) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() and job.handle is not None:  # perhaps before it began
                job.handle.end("cancelled")

        self._start(self._run_job(job)).add_done_callback(ended)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _in_background(self, call: Call) -> None:
        # A task that is cancelled before it began runs no finally: the callback comes in any case.
        self._start(self._renew(call)).add_done_callback(lambda _: self._renewing.discard(call.key))

    def _spawn(self, flow: Callable[[], Flow[None]]) -> None:
        self._start(self._beside(flow))

    async def _beside(self, flow: Callable[[], Flow[None]]) -> None:
        try:
            await arun(flow())
        except Exception as error:
            log.debug("work in the background failed: %s", error)

    async def _renew(self, call: Call) -> None:
        try:
            await arun(self._engine.infer(call))
        except MCPError as error:
            log.debug("a stale entry could not be renewed: %s", error)

    async def _run_job(self, job: Job) -> None:
        assert self._prefetcher is not None
        if not self._closed and self._prefetcher.hold_back(job):
            return
        call: Call | None = None
        error: BaseException | None = None
        try:
            call = self._prefetch_call(job)
            if self._engine.hit(call) is None:
                await arun(self._engine.infer(call))
        except BaseException as caught:
            error = caught
            if not isinstance(caught, MCPError):
                raise
        finally:
            self._prefetched(job, call, error)


class AsyncSession(BaseSession):
    """The same for asyncio."""

    async def infer(self, inputs: Any = None, *, path: str | None = None, **options: Any) -> InferResult:
        client = cast(AsyncMCPClient, self._client)
        return await client.infer(inputs, session=self.id, path=self._step(path), **options)

    def prefetch(self, inputs: Any = None, **options: Any) -> AsyncPrefetchHandle:
        """As the client's."""
        return cast(AsyncMCPClient, self._client).prefetch(inputs, session=self.id, **options)


class AsyncEdgeFolder(BaseEdge):
    """The same for asyncio."""

    async def infer_many(
        self,
        inputs: Sequence[Any],
        *,
        model: str | None = None,
        version: str | None = None,
        timeout: float | None = None,
    ) -> list[InferResult]:
        """As ``EdgeFolder.infer_many``, in a thread."""
        return await asyncio.to_thread(self._infer_many, inputs, model, version, timeout)

    async def sync(
        self,
        models: Sequence[str] | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        public_key: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        progress: Callable[..., None] | None = None,
    ) -> SyncReport:
        """As ``EdgeFolder.sync``."""
        return await asyncio.to_thread(self._sync, models, source, public_key, max_bytes, progress)
