"""The gRPC side of the Profile API: ``Report`` and ``Watch`` of mcp_client/protocols/profile.proto, in a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import orjson
from sqlalchemy.exc import OperationalError

from mcp_client.errors import ConfigurationError, MissingExtraError
from mcp_client.protocols import grpc_status

from . import policies
from .access import Access
from .errors import APIError
from .ingest import MAX_UNPACKED_BYTES, check
from .intake import Intake
from .service import DEFAULT_PROFILE_BYTES, MAX_PROFILE_BYTES, Profiles
from .store import Store

try:
    import grpc
    import grpc.aio

    from mcp_client.protocols import profile_pb2 as pb
except ImportError as missing:
    raise MissingExtraError("grpc", missing.name or "grpcio", "--grpc-port") from missing

log = logging.getLogger("mcp_profile")

SERVICE = "mcp.profile.v1.Profile"
# How often the database is asked whether anything has changed, for all who watch together.
_LOOK_S = 1.0
_PROFILE_EVERY_S = 60.0
_LEAST_PROFILE_EVERY_S = 1.0
# More calls at once are refused: each that watches holds a little memory, and a profile while it is sent.
_MOST_CALLS = 5000
_STOP_S = 1.0
_EVENT_FIELDS = tuple(field.name for field in pb.Event.DESCRIPTOR.fields)


class GrpcServer:
    """Serves from ``start`` to ``stop``. ``port`` 0 takes a free one, which ``port`` then says."""

    def __init__(
        self, host: str, port: int, store: Store, profiles: Profiles, access: Access, intake: Intake
    ) -> None:
        self.port = port
        self._host = f"[{host}]" if ":" in host else host
        self._service = _Service(store, profiles, access, intake)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp-profile-grpc", daemon=True)
        self._server: Any = None

    def start(self) -> None:
        """``ConfigurationError`` if the port can't be had."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Running calls get a second, streams are ended. Idempotent."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        server = grpc.aio.server(
            options=[("grpc.max_receive_message_length", MAX_UNPACKED_BYTES), ("grpc.so_reuseport", 0)],
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        handlers = {
            "Report": grpc.stream_unary_rpc_method_handler(
                self._service.report, pb.ReportRequest.FromString, pb.ReportResponse.SerializeToString
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self._service.watch, pb.WatchRequest.FromString, pb.WatchResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        try:
            self.port = server.add_insecure_port(f"{self._host}:{self.port}")
        except RuntimeError as error:
            raise ConfigurationError(f"can't listen on {self._host}:{self.port} for gRPC: {error}") from error
        await server.start()
        self._server = server

    async def _stop(self) -> None:
        self._service.close()
        if self._server is not None:
            await self._server.stop(_STOP_S)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Service:
    """The two methods. The database is asked in threads; everything else happens in the server's event loop."""

    def __init__(self, store: Store, profiles: Profiles, access: Access, intake: Intake) -> None:
        self._store = store
        self._profiles = profiles
        self._access = access
        self._intake = intake
        self._watched: dict[
            int, tuple[Any, set[asyncio.Event]]
        ] = {}  # application → how it was last seen, who waits
        self._looking: asyncio.Task[None] | None = None

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def report(self, requests: AsyncIterator[Any], context: Any) -> Any:
        answer = pb.ReportResponse()
        async with _errors(context):
            app = await asyncio.to_thread(self._access.application, _authorization(context), "ingest")
            async for request in requests:
                accepted, duplicates, rejected = await asyncio.to_thread(self._take, app, request)
                answer.batches.add(
                    batch_id=request.batch_id,
                    accepted=accepted,
                    duplicates=duplicates,
                    rejected=[
                        pb.ReportResponse.Rejected(index=index, error=error) for index, error in rejected
                    ],
                )
        return answer

    def _take(self, app: int, request: Any) -> tuple[int, int, list[tuple[int, str]]]:
        events = [{name: getattr(event, name) for name in _EVENT_FIELDS} for event in request.events]
        data = {
            "batch_id": request.batch_id,
            "client_id": request.client_id,
            "sdk": request.sdk,
            "events": events,
        }
        return self._intake.take(app, check(data))

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """What the caller does not have, now and whenever it changes: a policy within a second, a profile at most so often."""
        etag, version = request.profile_etag, request.policy_version
        max_bytes = min(max(request.max_bytes or DEFAULT_PROFILE_BYTES, 4096), MAX_PROFILE_BYTES)
        every = max(request.min_interval_s or _PROFILE_EVERY_S, _LEAST_PROFILE_EVERY_S)
        due = 0.0
        async with _errors(context):
            app = await self._allowed(context)
            with self._waiting(app) as changed:
                while True:
                    changed.clear()
                    policy = await asyncio.to_thread(policies.current, self._store, app)
                    if policy["version"] != version:
                        version = policy["version"]
                        yield pb.WatchResponse(policy={"version": version, "json": orjson.dumps(policy)})
                    wait: float | None = max(0.0, due - time.monotonic())
                    if not wait:
                        rendered = await asyncio.to_thread(self._profiles.rendered, app, max_bytes)
                        if rendered.json_etag != etag:
                            etag = rendered.json_etag
                            due = time.monotonic() + every
                            yield pb.WatchResponse(profile={"etag": etag, "json": rendered.json})
                        # Mining rests between its runs; then nothing would wake us.
                        behind = await asyncio.to_thread(self._profiles.behind, app)
                        wait = max(due - time.monotonic(), _LOOK_S) if behind else None
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(changed.wait(), wait)
                    await self._allowed(context)  # the key may have been revoked

    async def _allowed(self, context: Any) -> int:
        return await asyncio.to_thread(self._access.application, _authorization(context), "read")

    @contextlib.contextmanager
    def _waiting(self, app: int) -> Any:
        """An event that is set whenever something of the application changes (and once for nothing)."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look())
        changed = asyncio.Event()
        self._watched.setdefault(app, (None, set()))[1].add(changed)
        try:
            yield changed
        finally:
            waiters = self._watched[app][1]
            waiters.discard(changed)
            if not waiters:
                del self._watched[app]

    async def _look(self) -> None:
        while self._watched:
            await asyncio.sleep(_LOOK_S)
            for app in list(self._watched):
                try:
                    seen = await asyncio.to_thread(self._state, app)
                except OperationalError as error:
                    log.warning("the database can't be asked whether anything has changed: %s", error.orig)
                    continue
                before, waiters = self._watched.get(app, (None, set()))
                if waiters and seen != before:
                    self._watched[app] = (seen, waiters)
                    for changed in waiters:
                        changed.set()

    def _state(self, app: int) -> tuple[object, ...]:
        return (
            self._store.last_event(app),
            policies.version(self._store, app),
            self._profiles.state(app),
        )


@contextlib.asynccontextmanager
async def _errors(context: Any) -> AsyncIterator[None]:
    """Our errors as gRPC has them."""
    try:
        yield
    except APIError as error:
        told = error
    except OperationalError as error:
        log.error("the database failed: %s", error.orig)
        told = APIError(503, "database_unavailable", f"the database failed: {error.orig}; try again")
    except (grpc.aio.AbortError, asyncio.CancelledError, GeneratorExit):
        raise
    except Exception as error:
        log.exception("a gRPC call failed", exc_info=error)
        told = APIError(500, "internal", "the Profile API failed; its log has the details")
    else:
        return
    trailing = [(grpc_status.ERROR_CODE, told.code)]
    if "Retry-After" in told.headers:
        trailing.append(("retry-after", told.headers["Retry-After"]))
    await context.abort(grpc.StatusCode[grpc_status.status_code(told.status)], told.message, tuple(trailing))


def _authorization(context: Any) -> str | None:
    return next(
        (value for name, value in context.invocation_metadata() or () if name == "authorization"), None
    )
