"""The public face for applications that use threads: ``MCPClient``, its sessions, its edge. Thin: the work is in ``flow.py``."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from . import operations
from .base import BaseClient, BaseEdge, BaseSession
from .drivers import run
from .effects import CacheOption, Call, Flow
from .errors import MCPError
from .management import IndexEntry, ModelConfig, ModelStatistics, ServerInfo
from .prefetch.handle import PrefetchHandle
from .prefetch.prefetcher import Job
from .request import Outputs, Parameter
from .result import InferResult
from .sharing import leave
from .streaming import open_stream
from .tensors import ModelMetadata

if TYPE_CHECKING:
    from .edge.sync import SyncReport
    from .transports.compression import Compressing
    from .transports.grpc import GrpcTransport
    from .transports.http import HttpTransport


log = logging.getLogger("mcp_client")


class MCPClient(BaseClient):
    """A client for applications that use threads. Safe to share between threads; usable in a child after ``fork``.

    ``url``: ``http://host:port``, ``https://host:port``, ``grpc://host:port``, ``grpcs://host:port``,
    ``unix:///path`` (HTTP over a Unix socket), ``grpc+unix:///path``, or ``edge:FOLDER`` to
    run ONNX models here with no server at all. A list of URLs is several endpoints of the same models; so is a host name with
    several addresses, which is resolved again every 30 s and when a connection fails.

    ``protocol``: ``auto`` finds out on first use whether the server speaks MCP's ``/v1/infer`` or the Open Inference
    Protocol. ``model``: the default model. ``timeout``: seconds for a whole call, retries included. ``cache=None`` sends
    every call to the server. ``telemetry``: the URL of a Profile API; events go there and the learned profile comes from
    there; ``None`` sends nothing. ``edge``: a folder of ONNX models to fall back to when no server answers in time,
    or ``Edge(…)`` with another policy.
    ``api_key``: a bearer token; a ``Path`` is read again when the file changes, a function is called again after a 401. ``tls``:
    how servers are trusted and what this client shows them. ``hooks`` gets a ``Notice`` when a request starts and ends; ``otel``:
    OpenTelemetry spans and durations (extra ``otel``).
    ``compression``: ``"gzip"`` or ``"deflate"`` for the inferences' requests, and for the answers where the server does it.
    ``http_client``: your own ``httpx.Client`` (proxies, auth, TLS, transports), which you close yourself.
    """

    def _transport(
        self, url: str, *, compression: str | None = None, **options: Any
    ) -> HttpTransport | GrpcTransport | Compressing:
        if url.startswith("grpc"):
            from .transports.grpc import GrpcTransport

            return GrpcTransport(url, compression=compression, **options)
        from .transports.http import HttpTransport  # late: an edge client needs no HTTP library

        transport = HttpTransport(url, **options)
        if compression is None:
            return transport
        from .transports.compression import Compressing

        return Compressing(transport, compression)

    def infer(
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
        """Run a model on ``inputs``: an array, a nested list, a scalar, or a dict of them by input name.

        Names, datatypes and shapes are checked against the model's metadata before anything is sent. ``session`` and
        ``path`` say who asks for which step; prefetch learns from them. ``cache``: ``True``; ``False`` (ask the
        server, keep nothing); ``"refresh"`` (ask the server, keep the answer); or a TTL in seconds. ``fallback=False``
        rules out the edge. ``inputs`` may be left out where a route makes them from ``path``.

        ``outputs``: the names of those wanted, in the order of the result (default: all); as a dict, name → how many of the
        best classes are wanted instead of the tensor (``None``: the tensor), which ``result.classes(name)`` reads.
        ``parameters`` go to the server as they are; of the Open Inference Protocol's own ones ``sequence_id`` (with
        ``sequence_start`` and ``sequence_end``) makes this a step of a sequence, which is never cached nor sent twice, and
        ``timeout`` (microseconds) is what the server is told instead of what is left of the call's own. ``headers``: of this
        request alone, over gRPC as metadata. ``request_id``: instead of one made here.

        Raises ``InvalidInputError`` (nothing was sent), ``ServerError`` and its kinds, ``ConnectionFailedError``,
        ``DeadlineExceededError``, ``ProtocolError``, ``EdgeError``: all are ``MCPError``.
        """
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
        result = self._engine.hit(call)
        return result if result is not None else run(self._engine.infer(call))

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
    ) -> PrefetchHandle:
        """Fetch an answer ahead of its ``infer``, whose arguments these are; where a route makes the inputs,
        ``client.prefetch(path="/doc/7/page/2")`` will do. Returns at once; what is wrong with them is the handle's ``error``.

        It is sent as soon as no demanded request of this client is under way, and not at all while the server asks for less.
        It is not weighed against the budget, but counts in it: prefetches that the client thinks of itself make room.
        """
        handle = PrefetchHandle()
        self._by_hand(
            handle, inputs, model, version, outputs, parameters, session, path, priority, timeout, headers
        )
        return handle

    def stream(
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
    ) -> Iterator[InferResult]:
        """Run a model that may answer with any number of responses (decoupled models), and hand them out as they come.

        Needs ``grpc://``. Never cached and never retried; ``timeout`` is for the whole stream. Leaving the loop early, or
        closing the iterator, cancels it on the server. Arguments and errors as for ``infer``.
        """
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
        stream = run(open_stream(self._engine, call))
        with stream.accounted(), closing(stream.transport.stream(stream.wire, stream.deadline)) as responses:
            for response in responses:
                result = stream.result(response)
                if result is not None:
                    yield result

    def session(self, id: str) -> Session:
        """A session: its requests carry its id, and each one's path is a step that prefetch learns from."""
        return Session(self, id)

    def metadata(self, model: str | None = None, version: str | None = None) -> ModelMetadata:
        """The model's inputs and outputs."""
        return run(operations.metadata(self._engine, self._call((), model, version)))

    def models(self) -> list[str]:
        """The names of the server's models; without a server, of the edge's."""
        if not self._engine.endpoints and self._edge is not None:
            return self._edge.models()
        return run(operations.models(self._engine, self._call(())))

    def ready(self, timeout: float = 1.0, *, model: str | None = None, version: str | None = None) -> bool:
        """Whether a server answers that it is ready, or that ``model`` is."""
        return run(operations.ready(self._engine, self._call((), model, version, timeout=timeout)))

    def live(self, timeout: float = 1.0) -> bool:
        """Whether a server answers at all."""
        return run(operations.live(self._engine, self._call((), timeout=timeout)))

    def server(self) -> ServerInfo:
        """What the server is: name, version, extensions."""
        return run(operations.server(self._engine, self._call(())))

    def index(self) -> list[IndexEntry]:
        """Every model version that the server has, ready or not, and why not."""
        return run(operations.index(self._engine, self._call(())))

    def config(self, model: str | None = None, version: str | None = None) -> ModelConfig:
        """How the server is set up to run the model."""
        return run(operations.config(self._engine, self._call((), model, version)))

    def statistics(self, model: str | None = None, version: str | None = None) -> list[ModelStatistics]:
        """Counts and times of the model's versions (default: of all models), for each of the endpoints."""
        return run(operations.statistics(self._engine, self._call((), model, version)))

    def load(
        self,
        model: str,
        *,
        config: str | Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Have every endpoint load the model, again if it is loaded; what is cached of it is dropped.

        ``config``: a configuration to use instead of the repository's (Triton's, as JSON or a dict). ``files``: the model's
        files instead of the repository's, by path: ``{"1/model.onnx": content}``; Triton then wants ``config`` too.
        """
        call = self._call((), model, timeout=timeout)
        run(operations.load(self._engine, call, config, files or {}))

    def unload(self, model: str, *, dependents: bool = False, timeout: float | None = None) -> None:
        """Have every endpoint serve the model no more; ``dependents``: those too that an ensemble brought along."""
        run(operations.unload(self._engine, self._call((), model, timeout=timeout), dependents))

    @property
    def edge(self) -> EdgeFolder:
        """The models on this machine: ``sync()``, ``models()``."""
        return EdgeFolder(self)

    def flush(self, timeout: float = 10.0) -> bool:
        """Send the telemetry recorded so far; whether the Profile API has it all."""
        return self._telemetry.flush(timeout) if self._telemetry is not None else True

    def close(self) -> None:
        """Stop prefetching, hand telemetry over (what can't be sent stays on disk for the next start), close connections."""
        if self._closed:
            return
        self._closed = True
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._close_shared()
        run(leave(self._engine.endpoints))
        for endpoint in self._engine.endpoints:
            endpoint.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _issue(self, job: Job) -> None:
        """Fetch ahead, in one of the prefetcher's worker threads."""
        assert self._prefetcher is not None
        self._prefetcher.in_worker(lambda: self._run_job(job))

    def _in_background(self, call: Call) -> None:
        """Renew a stale entry in a thread of its own."""

        def work() -> None:
            try:
                run(self._engine.infer(call))
            except MCPError as error:
                log.debug("a stale entry could not be renewed: %s", error)
            finally:
                self._renewing.discard(call.key)

        try:
            threading.Thread(target=work, name="mcp-renew", daemon=True).start()
        except RuntimeError as error:  # no more threads: the next hit tries again
            self._renewing.discard(call.key)
            log.debug("a stale entry could not be renewed: %s", error)

    def _spawn(self, flow: Callable[[], Flow[None]]) -> None:
        def work() -> None:
            try:
                run(flow())
            except Exception as error:
                log.debug("work in the background failed: %s", error)

        threading.Thread(target=work, name="mcp-background", daemon=True).start()

    def _run_job(self, job: Job) -> None:
        assert self._prefetcher is not None
        if not self._closed and self._prefetcher.hold_back(job):
            return
        call: Call | None = None
        error: BaseException | None = None
        try:
            call = self._prefetch_call(job)
            if self._engine.hit(call) is None:
                run(self._engine.infer(call))
        except BaseException as caught:
            error = caught
            if not isinstance(caught, MCPError):
                raise
        finally:
            self._prefetched(job, call, error)


class Session(BaseSession):
    """``client.session("user-42")``: ``infer`` as the client's, with the session filled in."""

    def infer(self, inputs: Any = None, *, path: str | None = None, **options: Any) -> InferResult:
        return cast(MCPClient, self._client).infer(inputs, session=self.id, path=self._step(path), **options)

    def prefetch(self, inputs: Any = None, **options: Any) -> PrefetchHandle:
        """As the client's."""
        return cast(MCPClient, self._client).prefetch(inputs, session=self.id, **options)


class EdgeFolder(BaseEdge):
    """The models on this machine, and how they get there."""

    def infer_many(
        self,
        inputs: Sequence[Any],
        *,
        model: str | None = None,
        version: str | None = None,
        timeout: float | None = None,
    ) -> list[InferResult]:
        """Run a model here on each of ``inputs`` (what ``infer`` takes), in as few runs as it allows; neither cache nor server is
        asked. A bad one fails them all. Errors as ``infer``'s.
        """
        return self._infer_many(inputs, model, version, timeout)

    def sync(
        self,
        models: Sequence[str] | None = None,
        *,
        source: str | os.PathLike[str] | None = None,
        public_key: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        progress: Callable[..., None] | None = None,
    ) -> SyncReport:
        """Fetch what is new or changed on the server (``models``: only these), checked by SHA-256, and switch to it.

        ``source``: another ``mcp-server``, an ``.onnx`` file or a ``.json`` manifest at any URL, or a folder; the client's
        credentials go to its own servers alone. ``public_key``: an Ed25519 key's PEM file: what it did not sign is not used
        (extra ``sign``). ``max_bytes``: the budget on disk. ``progress(what, bytes_done, bytes_total)``. The report says
        what came, what failed and why, and what came but is not used (``refused``).
        """
        return self._sync(models, source, public_key, max_bytes, progress)
