"""What the sync and the async client share: settings, the engine, and everything that needs no waiting."""

from __future__ import annotations

import copy
import math
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import urlsplit

from blake3 import blake3

from . import call_options
from .cache.memory import CacheStats, MemoryCache
from .cache.tiers import TieredCache, open_cache
from .cache.ttl import TTLPolicy
from .config import TLS, Cache, Edge, Prefetch, Retry, Telemetry
from .effects import CacheOption, Call, Endpoint, Flow, ProtocolName
from .endpoints import Endpoints, Site
from .errors import ClientClosedError, ConfigurationError, InvalidInputError, MCPError
from .flow import Engine, fingerprint_of
from .inputs import as_inputs
from .prefetch.decisions import Decisions, Outcome
from .prefetch.handle import PrefetchHandle
from .prefetch.prefetcher import Job, Life, Prefetcher
from .prefetch.scheduler import PrefetchStats
from .protocols import ClientCodec
from .request import NO_PARAMETERS, Outputs, Parameter, Request
from .resilience.retry import RetryPolicy
from .result import InferResult
from .telemetry.observer import Notice, Observer
from .tensors import read_only
from .transports.credential import Credential

if TYPE_CHECKING:
    from .edge.runtime import EdgeRuntime
    from .edge.sync import SyncReport
    from .prefetch.prefetcher import FetchProfile
    from .prefetch.profile import Profile
    from .telemetry.uploader import TelemetryPipe

_PROTOCOLS = ("auto", "mcp", "oip")
_MOST_RENEWALS = 4  # at once: they are for nobody in particular
_MAX_RESPONSE_BYTES = 2**31 - 1  # gRPC's own limit for one message; a larger answer is a mistake or an attack


class BaseClient(ABC):
    """What both clients share: settings, the engine, and everything that needs no waiting."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        protocol: ProtocolName = "auto",
        model: str | None = None,
        timeout: float = 30.0,
        retry: Retry | None = None,
        cache: Cache | None = Cache(),
        prefetch: Prefetch | None = Prefetch(),
        telemetry: str | Telemetry | None = None,
        edge: str | os.PathLike[str] | Edge | None = None,
        api_key: str | os.PathLike[str] | Callable[[], str] | None = None,
        tls: TLS | None = None,
        headers: Mapping[str, str] | None = None,
        http_client: Any = None,
        max_response_bytes: int = _MAX_RESPONSE_BYTES,
        compression: Literal["gzip", "deflate"] | None = None,
        hooks: Callable[[Notice], None] | None = None,
        otel: bool = False,
    ) -> None:
        if protocol not in _PROTOCOLS:
            raise ConfigurationError(f"protocol must be one of {', '.join(_PROTOCOLS)}; got {protocol!r}")
        self._timeout = _seconds("timeout", timeout)
        self._closed = False
        self._renewing: set[bytes] = set()  # keys of the stale entries being renewed
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or not all(isinstance(each, str) for each in urls):
            raise ConfigurationError(f"url is a URL or a list of them; got {url!r}")
        edge_only = urls[0].startswith("edge:")
        if edge_only:
            if len(urls) > 1:
                raise ConfigurationError("'edge:' means no server at all; use edge='models/' beside URLs")
            folder = urls[0].removeprefix("edge:")
            if folder:
                edge = replace(edge, folder=folder) if isinstance(edge, Edge) else folder
        self._headers = dict(headers or {})
        self._tls = tls
        self._credential = Credential(api_key) if api_key else None
        if compression not in (None, "gzip", "deflate"):
            raise ConfigurationError(f'compression is "gzip", "deflate" or None; got {compression!r}')
        asks = compression is not None and "accept-encoding" not in {name.lower() for name in self._headers}
        options = {
            "headers": {**self._headers, "Accept-Encoding": compression} if asks else self._headers,
            "compression": compression,
            "tls": tls,
            "credential": self._credential,
            "max_response_bytes": max_response_bytes,
            "client": http_client,
        }
        sites = [self._site(each, protocol, options) for each in ([] if edge_only else dict.fromkeys(urls))]
        settings = edge if isinstance(edge, Edge) else Edge(edge or "")
        if (edge is not None or edge_only) and not os.fspath(settings.folder):
            raise ConfigurationError(
                "the edge needs the folder of its models: 'edge:models/', edge='models/'"
            )
        self._edge = _edge_runtime(settings) if edge is not None else None
        config = Telemetry(telemetry) if isinstance(telemetry, str) else telemetry
        self._telemetry: TelemetryPipe | None = None
        fetch_profile: FetchProfile | None = None
        if config is not None:
            self._telemetry, fetch_profile = _profile_api(config, self)
        self._prefetcher: Prefetcher | None = None
        self._cache = open_cache(cache, _credentials(self._headers, api_key)) if cache is not None else None
        if prefetch is not None and self._cache is not None:
            self._prefetcher = Prefetcher(
                prefetch,
                issue=self._issue,
                life=self._life,
                fingerprint=fingerprint_of,
                report=self._report_prefetch,
                fetch_profile=fetch_profile,
            )
        self._engine = Engine(
            endpoints=Endpoints(sites),
            cache=self._cache,
            settings=cache or Cache(),
            refresh=self._refresh,
            retry=RetryPolicy(retry or Retry()),
            prefetcher=self._prefetcher,
            events=self._telemetry,
            observer=_observer(hooks, otel),
            edge=self._edge,
            edge_settings=settings,
            spawn=self._spawn,
            default_model=model or "",
        )
        _clients.add(self)

    @classmethod
    def from_env(cls, **options: Any) -> Self:
        """A client set up by the environment; ``options`` win over it.

        ``MCP_URL`` (required), ``MCP_PROTOCOL``, ``MCP_MODEL``, ``MCP_TIMEOUT`` (seconds), ``MCP_API_KEY``,
        ``MCP_PROFILE_URL`` (Profile API: telemetry and profiles), ``MCP_EDGE`` (folder of models),
        ``MCP_CACHE_BYTES`` (0 turns the cache off).
        """
        env = os.environ
        settings: dict[str, Any] = {}
        if "MCP_URL" in env:
            settings["url"] = env["MCP_URL"]
        names = {"protocol": "MCP_PROTOCOL", "model": "MCP_MODEL", "api_key": "MCP_API_KEY"}
        names |= {"telemetry": "MCP_PROFILE_URL", "edge": "MCP_EDGE"}
        settings |= {option: env[name] for option, name in names.items() if env.get(name)}
        if env.get("MCP_TIMEOUT"):
            settings["timeout"] = _number("MCP_TIMEOUT", env["MCP_TIMEOUT"])
        if env.get("MCP_CACHE_BYTES"):
            size = int(_number("MCP_CACHE_BYTES", env["MCP_CACHE_BYTES"]))
            settings["cache"] = Cache(max_bytes=size) if size else None
        settings |= options
        if "url" not in settings:
            raise ConfigurationError(
                "MCP_URL is not set; it names the inference server, for example http://127.0.0.1:8080"
            )
        return cls(**settings)

    @property
    def cache(self) -> MemoryCache:
        """The L4 cache: ``invalidate(model=…, path=…, session=…)``, ``clear()``, ``stats()``, ``export(file)``, ``warm(file)``.

        With a disk or shared tier these reach it too, and so may block.
        """
        if self._cache is None:
            raise ConfigurationError("this client was made with cache=None")
        return self._cache

    @property
    def ttl_policy(self) -> TTLPolicy:
        """How long answers are fresh, by model id. Assign another (``TTLPolicy.parse(json)``) at any time."""
        return self._engine.freshness.policy

    @ttl_policy.setter
    def ttl_policy(self, policy: TTLPolicy) -> None:
        self._engine.freshness.policy = policy

    def route(
        self,
        template: str,
        *,
        model: str | None = None,
        version: str | None = None,
        outputs: Outputs | None = None,
        parameters: Mapping[str, Parameter] | None = None,
        importance: float = 1.0,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Register a builder that makes the inputs for any path of a template, so that pages never seen can be fetched.

        ``@client.route("/doc/{id}/page/{n:int}", model="ocr")`` over ``def page(id: str, n: int)``, which returns what
        ``infer`` takes, or ``None`` where there is no such page. It is called in a background thread too. ``importance``: how
        much a millisecond that is saved here counts when prefetch chooses; 2.0 is twice as much as elsewhere.
        """

        def register(builder: Callable[..., Any]) -> Callable[..., Any]:
            if self._prefetcher is None:
                raise ConfigurationError(
                    "routes need the cache and prefetch, which this client was made without"
                )
            self._prefetcher.add_route(
                template,
                builder,
                model=model,
                version=version,
                outputs=outputs,
                parameters=parameters,
                importance=importance,
            )
            return builder

        return register

    @property
    def prefetcher(self) -> Prefetching:
        """Learned prefetch at work: ``explain()``, ``stats()``."""
        if self._prefetcher is None:
            raise ConfigurationError("this client was made without the cache or without prefetch")
        return Prefetching(self._prefetcher)

    def stats(self) -> dict[str, Any]:
        """What happened since the client was made: answers by source, cache, prefetch and telemetry figures."""
        stats: dict[str, Any] = {
            "sources": self._engine.sources(),
            "hedges": dict(self._engine.servers.hedges),
        }
        if self._cache is not None:
            cache: CacheStats = self._cache.stats()
            stats["cache"] = cache
        if self._prefetcher is not None:
            stats["prefetch"] = self._prefetcher.stats()
        if self._engine.local is not None:
            stats["edge"] = self._engine.local.stats()
        if self._telemetry is not None:
            stats["telemetry"] = self._telemetry.stats()
        return stats

    # --- for the two subclasses ---

    @abstractmethod
    def _transport(self, url: str, **options: Any) -> Any: ...

    def _site(self, url: str, protocol: ProtocolName, options: dict[str, Any]) -> Site:
        def make(address: str | None) -> Endpoint:
            chosen = {"address": address} if address is not None else {}
            transport = self._transport(url, **options, **chosen)
            shown: str = transport.url if address is None else f"{transport.url} ({address})"
            return Endpoint(url=shown, transport=transport, protocol=protocol, codec=_codec(url, protocol))

        return Site.of(url, make, resolve=options["client"] is None)

    @abstractmethod
    def _issue(self, job: Job) -> None: ...

    @abstractmethod
    def _in_background(self, call: Call) -> None: ...

    @abstractmethod
    def _spawn(self, flow: Callable[[], Flow[None]]) -> None:
        """Run a flow beside the calls; whatever becomes of it is its own affair."""

    def _refresh(self, call: Call) -> None:
        """Renew a stale entry for nobody in particular, a few at once; one that finds no room waits for the next hit.

        The inputs are copied: they are the caller's again when it returns.
        """
        renewing = self._renewing
        if call.key in renewing or len(renewing) >= _MOST_RENEWALS:
            return
        renewing.add(call.key)
        started = time.monotonic()
        assert call.inputs is not None
        self._in_background(
            replace(
                call,
                inputs={name: read_only(array) for name, array in call.inputs.items()},
                background=True,
                started=started,
                deadline=started + self._timeout,
                id=self._engine.new_id(),
                attempts=0,
                endpoint="",
            )
        )

    def _call(
        self,
        inputs: Any,
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
    ) -> Call:
        started = time.monotonic()
        if self._closed:
            raise ClientClosedError(
                "the client is closed; make a new one, or keep this one open while it is used"
            )
        if inputs is None:
            built = (
                self._prefetcher.build(path) if self._prefetcher is not None and path is not None else None
            )
            if built is None:
                raise InvalidInputError(
                    "inputs is None and no route makes them from the path; pass inputs, or register a route for "
                    f"{path!r}"
                    if path is not None
                    else "inputs is None; pass an array, a nested list, or a dict of them"
                )
            inputs = built.value
            model, version = model or built.model, version or built.version
            outputs, parameters = outputs or built.outputs, parameters or built.parameters
        classes: dict[str, int] | None = None
        if outputs is not None:
            classes = call_options.classes(outputs)
        server_timeout_ms: float | None = None
        if parameters is not None:
            parameters, priority, server_timeout_ms = call_options.parameters(parameters, priority)
        if priority is not None:
            call_options.check_priority(priority)
        if headers is not None:
            call_options.check_headers(headers)
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidInputError(f"request_id must be a non-empty string; got {request_id!r}")
        if type(cache) is int:
            cache = float(cache)
        if not (
            cache is True or cache is False or cache == "refresh" or (type(cache) is float and cache > 0)
        ):
            raise InvalidInputError(
                f"cache must be True, False, 'refresh' or a TTL in seconds; got {cache!r}"
            )
        seconds = self._timeout if timeout is None else _seconds("timeout", timeout)
        call = Call(  # by position: by name it takes half as long again, and every hit does it
            inputs,
            model or "",
            version or "",
            tuple(outputs) if outputs is not None else (),
            parameters if parameters is not None else NO_PARAMETERS,
            session or "",
            path or "",
            priority,
            cache,
            fallback,
            started,
            started + seconds,
            request_id or self._engine.new_id(),
        )
        if classes is not None or headers is not None or server_timeout_ms is not None:
            call.classes, call.headers, call.server_timeout_ms = classes, headers, server_timeout_ms
        return call

    def _by_hand(
        self,
        handle: PrefetchHandle,
        inputs: Any,
        model: str | None,
        version: str | None,
        outputs: Outputs | None,
        parameters: Mapping[str, Parameter] | None,
        session: str | None,
        path: str | None,
        priority: int | None,
        timeout: float | None,
        headers: Mapping[str, str] | None,
    ) -> None:
        if self._prefetcher is None:
            raise ConfigurationError(
                "prefetch() needs the cache and prefetch, which this client was made without"
            )
        # The arrays are the caller's again when prefetch() has returned.
        call = self._call(
            copy.deepcopy(inputs),
            model,
            version,
            outputs,
            parameters,
            session,
            path,
            priority,
            timeout,
            headers=headers,
        )
        if not call.cacheable:
            raise InvalidInputError("a step of a sequence can't be prefetched: its answer is never cached")
        job = Job(None, model, version, session=session or "", path=path or "", call=call)
        self._prefetcher.by_hand(job, handle)

    def _prefetch_call(self, job: Job) -> Call:
        call: Call
        if job.call is not None:
            call = job.call
        else:
            call = self._call(
                job.value, job.model, job.version, job.outputs, job.parameters, job.session, job.path
            )
            if job.renews:
                call.cache = "refresh"
        call.job = job
        return call

    def _report_prefetch(self, job: Job, key: bytes, outcome: Outcome) -> None:
        self._engine.report_prefetch(job, key, outcome)

    def _prefetched(self, job: Job, call: Call | None, error: BaseException | None) -> None:
        """A job's end, whatever it was."""
        assert self._prefetcher is not None
        self._prefetcher.finished(
            job,
            error if isinstance(error, MCPError) else None,
            sent=call is not None and call.attempts > 0,
            cancelled=error is not None and not isinstance(error, MCPError),
        )

    def _close_shared(self) -> None:
        if self._telemetry is not None:
            self._telemetry.close()
        if self._edge is not None:
            self._edge.close()
        if isinstance(self._cache, TieredCache):
            self._cache.close()

    def _life(self, key: bytes) -> Life | None:
        """When the fresh answer in the cache was stored and when it expires; of one on its way: never."""
        now = time.monotonic()
        if self._engine.in_flight(key):
            return Life(now, math.inf)
        entry = self.cache.peek(key, now)
        return (
            Life(entry.stored_at, entry.fresh_until)
            if entry is not None and now < entry.fresh_until
            else None
        )

    def _locks(self) -> list[threading.Lock]:
        """Every lock that another thread may hold while this one forks."""
        locks = [self._engine._lock, *self._engine.servers.locks()]
        locks += [self._cache._lock] if self._cache is not None else []
        locks += self._engine.local.locks() if self._engine.local is not None else []
        locks += self._prefetcher.locks() if self._prefetcher is not None else []
        return locks

    def _after_fork(self) -> None:
        self._renewing = set()
        self._engine.reset()
        self._engine.endpoints.reset()
        if self._engine.local is not None:
            self._engine.local.reset()
        if self._prefetcher is not None:
            self._prefetcher.reset()


class Prefetching:
    """``client.prefetcher``: what prefetch does, and why."""

    def __init__(self, prefetcher: Prefetcher) -> None:
        self._prefetcher = prefetcher

    def explain(self, path: str | None = None) -> Decisions:
        """The latest 256 decisions, oldest first (``path``: only those about it): what was fetched ahead or not, and why."""
        found = self._prefetcher.explain()
        return Decisions(each for each in found if each.path == path) if path is not None else found

    def stats(self) -> PrefetchStats:
        """How many were issued, used, wasted."""
        return self._prefetcher.stats()


class BaseSession:
    """An id, and the last paths asked for under it."""

    def __init__(self, client: BaseClient, id: str) -> None:
        if not isinstance(id, str) or not id:
            raise InvalidInputError(f"a session id must be a non-empty string; got {id!r}")
        self.id = id
        self._client = client
        self._path: deque[str] = deque(maxlen=32)

    @property
    def path(self) -> tuple[str, ...]:
        """The last steps of the session, oldest first (at most 32)."""
        return tuple(self._path)

    def _step(self, path: str | None) -> str | None:
        if path is not None:
            self._path.append(path)
        return path

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, {len(self._path)} steps)"


class BaseEdge:
    def __init__(self, client: BaseClient) -> None:
        if client._edge is None:
            raise ConfigurationError("this client has no edge; make it with edge='models/'")
        self._client = client
        self._runtime = client._edge

    def models(self) -> list[str]:
        """The models on this machine."""
        return self._runtime.models()

    def refused(self) -> dict[tuple[str, str], str]:
        """(model, version) → why it is not used though it is there: it could not be loaded, or failed its smoke input."""
        return self._runtime.refused()

    def _infer_many(
        self, inputs: Sequence[Any], model: str | None, version: str | None, timeout: float | None
    ) -> list[InferResult]:
        client = self._client
        calls = [client._call(each, model, version, timeout=timeout) for each in inputs]
        if not calls:
            return []
        name = model or client._engine._default_model
        found = self._runtime.metadata(name, version or "")
        requests = [
            Request(found.name, as_inputs(call.value, found.inputs), version=call.version, id=call.id)
            for call in calls
        ]
        answers = self._runtime.run_many(requests, deadline=calls[0].deadline)
        took = (time.monotonic() - calls[0].started) * 1e3
        return [
            InferResult(answer, source="edge", latency_ms=took, request_id=call.id)
            for call, answer in zip(calls, answers, strict=True)
        ]

    def _sync(
        self,
        models: Sequence[str] | None,
        source: str | os.PathLike[str] | None,
        public_key: str | os.PathLike[str] | None,
        max_bytes: int | None,
        progress: Callable[..., None] | None,
    ) -> SyncReport:
        from ._httpx import httpx
        from .edge.sync import sync
        from .transports.httpx_client import bearer_auth
        from .transports.tls import TlsContexts

        client = self._client
        sites = [site.url for site in client._engine.endpoints.sites]
        if source is None:
            if not sites:
                raise ConfigurationError("this client has no server to sync models from; name a source=")
            source = next((url for url in sites if url.startswith("http")), None)
            if source is None:
                raise ConfigurationError(
                    f"models are downloaded over HTTP; {sites[0]} can't be synced from; name a source="
                )
        source = os.fspath(source)
        options: dict[str, Any] = {
            "verify": TlsContexts(client._tls).current() if client._tls is not None else True
        }
        if urlsplit(source)[:2] in [
            urlsplit(url)[:2] for url in sites
        ]:  # credentials are for the client's own servers
            options |= {"headers": client._headers, "auth": bearer_auth(client._credential)}
        with httpx.Client(timeout=client._timeout, **options) as http:
            report = sync(
                self._runtime.repository,
                source,
                http=http,
                models=models,
                progress=progress,
                public_key=public_key,
                max_bytes=max_bytes,
            )
        self._runtime.refresh()
        refused = {
            model: why
            for (model, version), why in self.refused().items()
            if report.downloaded.get(model) == version
        }
        return replace(report, refused=refused)


def _codec(url: str, protocol: ProtocolName) -> ClientCodec | None:
    """What the URL's scheme says is spoken there; ``None``: to be found out on first use."""
    if not url.startswith("grpc"):
        return None
    if protocol == "mcp":
        raise ConfigurationError("MCP's own protocol has no gRPC form; leave protocol out, or use http://")
    from .protocols.oip_grpc import OipGrpcCodec

    return OipGrpcCodec()


def _credentials(headers: Mapping[str, str], api_key: Any) -> bytes:
    """What stands for whoever this client is to the server: of the headers that say so, 32 bytes; none, b"".

    A key that changes stands for nobody in particular: what is kept under it is for this client alone.
    """
    if api_key and not isinstance(api_key, str):
        return os.urandom(32)
    if api_key:
        headers = {**headers, "Authorization": f"Bearer {api_key}"}
    telling = {"authorization", "proxy-authorization", "cookie", "x-api-key", "api-key", "x-auth-token"}
    said = sorted((name.lower(), value) for name, value in headers.items() if name.lower() in telling)
    return blake3(repr(said).encode()).digest() if said else b""


def _observer(hooks: Callable[[Notice], None] | None, otel: bool) -> Observer | None:
    if hooks is None and not otel:
        return None
    if not otel:
        return Observer(hooks, None)
    from .telemetry.otel import OpenTelemetry

    return Observer(hooks, OpenTelemetry())


def _profile_api(config: Telemetry, client: BaseClient) -> tuple[TelemetryPipe, FetchProfile | None]:
    from .telemetry.fleet import connect  # late: most of what it imports, SQLite included, is for it alone

    told = weakref.ref(client)  # a thread that watches must not keep a client that nobody holds

    def on_profile(profile: Profile) -> None:
        if (one := told()) is not None and one._prefetcher is not None:
            one._prefetcher.load(profile)

    def on_policy(policy: TTLPolicy) -> None:
        if (one := told()) is not None:
            one.ttl_policy = policy

    return connect(config, on_profile, on_policy)


def _edge_runtime(settings: Edge) -> EdgeRuntime:
    from .edge.runtime import EdgeRuntime

    return EdgeRuntime(
        Path(settings.folder),
        device=settings.device,
        threads=settings.threads,
        memory_bytes=settings.memory_bytes,
    )


def _seconds(name: str, value: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ConfigurationError(f"{name} must be a number of seconds > 0; got {value!r}")
    return float(value)


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} must be a number; got {text!r}") from None


# --- fork: the child gets a client that works, with connections and threads of its own ---

_clients: weakref.WeakSet[BaseClient] = weakref.WeakSet()
_forking: list[threading.Lock] = []


def _before_fork() -> None:
    # Held across the fork, so that the child's copy of what they guard is whole.
    for client in tuple(_clients):
        for lock in client._locks():
            lock.acquire()
            _forking.append(lock)


def _release() -> None:
    while _forking:
        _forking.pop().release()


def _in_child() -> None:
    _release()
    for client in tuple(_clients):
        client._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_release, after_in_child=_in_child)
