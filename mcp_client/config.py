"""Settings, each with a default that needs no thought. Plain data; ``MCPClient`` takes them as arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .errors import ConfigurationError

if TYPE_CHECKING:
    from .cache.ttl import TTLPolicy


EdgePolicy = Literal["fallback", "prefer", "race", "only"]


@dataclass(frozen=True, slots=True)
class Cache:
    """The L4 cache: memory, and behind it, if you name them, a folder on disk and a store that a fleet shares.

    ``max_bytes`` counts arrays truly. ``policy``: which entry goes when there is no room: ``lru-k``; ``s3-fifo``, better for
    clicks on ever new things and for loops; or ``adaptive``, which follows whichever of the two would have done better.
    ``k``: references that LRU-K remembers (1 is plain LRU). ``correlated_s``: references closer than this count as one (the
    correlated-reference period; bursts of one session should not make a key look popular). ``retained_s``: how long the
    history of an evicted key is kept (the retained-information period; 200 s is the paper's own suggestion, section 2.1.2).

    ``ttl_s``: how long an answer is fresh when neither the call, nor the server, nor ``ttl_policy`` says.
    ``stale_while_revalidate_s``: how much longer it is handed out (source ``stale``) while a new one is fetched.
    ``stale_if_error_s``: how much longer it is handed out if neither a server nor the edge can answer. A server's own
    ``Cache-Control`` goes before both. ``not_found_s``: how long "no such model" is believed.

    ``directory``: the folder of the disk tier (extra ``disk``), of ``disk_bytes`` at most, for all processes of this machine.
    ``shared_url``: ``redis://…`` of the shared tier (extra ``redis``). Behind memory, an answer is served only to clients with
    the same credential, or the same ``tenant`` if that is set; those of ``public_models`` to all.

    ``normalisers``: model → function that makes near-identical inputs equal (``mcp_client.cache.normalise``).
    """

    max_bytes: int = 256 * 1024 * 1024
    max_entries: int = 1_000_000
    policy: Literal["lru-k", "s3-fifo", "adaptive"] = "lru-k"
    k: int = 2
    correlated_s: float = 0.0
    retained_s: float = 200.0
    ttl_s: float = 300.0
    ttl_policy: TTLPolicy | None = None
    stale_while_revalidate_s: float = 0.0
    stale_if_error_s: float = 0.0
    not_found_s: float = 5.0
    directory: str | os.PathLike[str] | None = None
    disk_bytes: int = 1024 * 1024 * 1024
    shared_url: str | None = None
    tenant: str | None = None
    public_models: Collection[str] = ()
    normalisers: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _positive(self, "max_bytes", "max_entries", "k", "ttl_s", "disk_bytes")
        for name in (
            "stale_while_revalidate_s",
            "stale_if_error_s",
            "not_found_s",
            "correlated_s",
            "retained_s",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigurationError(f"Cache({name}=…) must be ≥ 0; got {getattr(self, name)!r}")
        if self.policy not in ("lru-k", "s3-fifo", "adaptive"):
            raise ConfigurationError(f"Cache(policy=…) is lru-k, s3-fifo or adaptive; got {self.policy!r}")
        if isinstance(self.public_models, str):
            raise ConfigurationError(
                f"Cache(public_models=…) is a list of model ids; got {self.public_models!r}"
            )

    def __repr__(self) -> str:  # a store's URL may hold its password
        tiers = [name for name, there in (("disk", self.directory), ("shared", self.shared_url)) if there]
        return f"Cache(max_bytes={self.max_bytes}, policy={self.policy!r}, k={self.k}, ttl_s={self.ttl_s}, tiers={tiers})"


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Learned prefetch. It acts on requests that carry a session and a path.

    ``max_overfetch``: prefetches issued per demanded request, at most, over any window of ``window`` demanded requests.
    ``threshold``: the price of a millisecond of the server's time, in milliseconds that are saved if the answer is asked for. As
    an answer saves about what it costs, a candidate less likely than this is not fetched; one that its route calls important
    (``importance=2.0``) may be half as likely. ``ms_per_mib``: the price of a MiB of the answer, in milliseconds of server time.
    ``metered``: nothing is fetched ahead while the connection is (``True``, or a function that says).
    ``per_step``: prefetches after one step; ``max_in_flight``: under way at once. Both at most.
    ``book_bytes``: memory for the inputs of requests seen before, so that they can be asked again.
    """

    max_overfetch: float = 0.5
    window: int = 1000
    threshold: float = 0.2
    per_step: int = 3
    max_in_flight: int = 2
    order: int = 5
    book_bytes: int = 64 * 1024 * 1024
    ms_per_mib: float = 10.0
    metered: bool | Callable[[], bool] = False

    def __post_init__(self) -> None:
        _positive(self, "window", "per_step", "max_in_flight", "order", "book_bytes")
        if self.max_overfetch < 0 or not 0 <= self.threshold <= 1:
            raise ConfigurationError("max_overfetch must be ≥ 0 and threshold between 0 and 1")
        if not self.ms_per_mib >= 0:
            raise ConfigurationError(f"Prefetch(ms_per_mib=…) must be ≥ 0; got {self.ms_per_mib!r}")
        if not isinstance(self.metered, bool) and not callable(self.metered):
            raise ConfigurationError(
                f"Prefetch(metered=…) is True, False, or a function that says which; got {self.metered!r}"
            )


@dataclass(frozen=True, slots=True)
class Retry:
    """Retries of what is safe to retry, under the call's one deadline.

    The pause before attempt n is drawn from 0 to ``base_s`` × 2ⁿ, at most ``max_s`` ("full jitter", AWS Architecture Blog,
    "Exponential Backoff And Jitter"). ``budget``: retries per request over time; 0.2 keeps a failing server's extra load at 20 %.

    ``hedge``: an inference that has no answer after the 95th percentile of the model's latest 200 is asked a second time, of
    another endpoint if there is one, within the same budget; the first answer counts and the other request is cancelled. Only
    demanded ones, and never a step of a sequence. In the sync client every inference then takes a thread of its own (50 µs).
    """

    attempts: int = 3
    base_s: float = 0.05
    max_s: float = 2.0
    budget: float = 0.2
    hedge: bool = False

    def __post_init__(self) -> None:
        _positive(self, "attempts")


@dataclass(frozen=True, slots=True)
class Edge:
    """ONNX models on this machine (extra ``edge``), and when they answer. A plain folder is ``Edge(folder)``.

    ``policy``: ``fallback`` asks a server, and the edge where none answers in time; ``prefer`` runs the model here, and asks a
    server where that can't be done (no such model, a failure, measured to be too slow for the deadline); ``race`` does both at
    once, the first answer counts and the other is called off; ``only`` never asks a server. ``models``: those of single models.

    ``agreement``: the share of answers that are computed both ways, in the background, to compare them: a hook gets a ``Notice``
    of kind ``agreement``, ``stats()`` counts, and a difference above ``tolerance`` (of the largest value of an output; 0.01 at
    least for 16-bit floats) is a warning in the log.

    ``device``: ``cpu``, ``cuda:0``, … or ``auto``, the best that is there. ``threads``: for one call (default: the cores that
    this process may use). ``memory_bytes``: what weights and tensors may take on the CPU, of all models of the process together.
    """

    folder: str | os.PathLike[str] = ""
    policy: EdgePolicy = "fallback"
    models: Mapping[str, EdgePolicy] = field(default_factory=dict)
    agreement: float = 0.0
    tolerance: float = 1e-3
    device: str = "cpu"
    threads: int | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        for policy in (self.policy, *self.models.values()):
            if policy not in ("fallback", "prefer", "race", "only"):
                raise ConfigurationError(f"an edge policy is fallback, prefer, race or only; got {policy!r}")
        if not 0 <= self.agreement <= 1:
            raise ConfigurationError(f"Edge(agreement=…) is a share between 0 and 1; got {self.agreement!r}")
        given = [name for name in ("threads", "memory_bytes") if getattr(self, name) is not None]
        _positive(self, "tolerance", *given)


@dataclass(frozen=True, slots=True)
class TLS:
    """How servers are trusted, and how this client proves who it is. Changed files count for the connections opened from then on.

    ``ca``: PEM file (or folder) of the authorities to trust instead of the system's. ``cert``, ``key``: this client's own
    certificate chain and key, for mutual TLS (``key`` may be in ``cert``'s file). ``min_version``: "1.2" or "1.3".
    ``spiffe_id``: the URI that the server's certificate must name; it takes the place of the check of the host's name.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    min_version: Literal["1.2", "1.3"] = "1.2"
    spiffe_id: str | None = None

    def __post_init__(self) -> None:
        if self.min_version not in ("1.2", "1.3"):
            raise ConfigurationError(f'TLS(min_version=…) is "1.2" or "1.3"; got {self.min_version!r}')
        if self.key is not None and self.cert is None:
            raise ConfigurationError("TLS(key=…) needs the certificate that it belongs to: TLS(cert=…)")
        if self.spiffe_id is not None and not self.spiffe_id.startswith("spiffe://"):
            raise ConfigurationError(f"TLS(spiffe_id=…) starts with spiffe://; got {self.spiffe_id!r}")


@dataclass(frozen=True, slots=True)
class Telemetry:
    """Where events go (a Profile API) and how; the fleet's profile and TTL policy come from there.

    No tensor data is ever sent; session ids are hashed before they are stored.

    ``interval_s``: between uploads. ``spool_dir``: where events wait (default: ``telemetry`` in the state folder); the spool
    there is one per ``url``, for all processes, so two applications with API keys of their own on one machine need a folder each.
    ``max_spool_bytes``: on disk at most, the oldest events go first. ``max_batch``: events per request. ``sample``: the share of
    sessions that is reported, each as a whole. ``redact``: sees every event as it would leave the machine (a dict, session
    already hashed) and returns it changed, or ``None`` to drop it.

    With ``grpc://host:port`` profiles and TTL policies are pushed as they change (extra ``grpc``); over HTTP the prefetcher asks
    every 10 minutes. ``http_url``: the same Profile API over HTTP, for where gRPC does not get through or is not installed.
    """

    url: str
    api_key: str | None = None
    interval_s: float = 30.0
    spool_dir: Path | None = None
    max_spool_bytes: int = 64 * 1024 * 1024
    max_batch: int = 5000
    sample: float = 1.0
    redact: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    http_url: str | None = None

    def __post_init__(self) -> None:
        _positive(self, "interval_s", "max_spool_bytes", "max_batch")
        if not 0 <= self.sample <= 1:
            raise ConfigurationError(f"Telemetry(sample=…) is a share between 0 and 1; got {self.sample!r}")
        if not self.url.startswith(("http://", "https://", "grpc://", "grpcs://")):
            raise ConfigurationError(
                f"Telemetry(url=…) must start with http://, https://, grpc:// or grpcs://; got {self.url!r}"
            )
        if self.http_url is not None and not self.http_url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"Telemetry(http_url=…) must start with http:// or https://; got {self.http_url!r}"
            )

    def __repr__(self) -> str:  # a repr ends up in logs: no key in it
        return f"Telemetry(url={self.url!r}, api_key={'***' if self.api_key else None}, interval_s={self.interval_s})"


def state_dir() -> Path:
    """Where the SDK keeps what must outlive the process: ``MCP_STATE_DIR``, else the XDG state folder."""
    if chosen := os.environ.get("MCP_STATE_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mcp_client"


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ConfigurationError(f"{type(config).__name__}({name}=…) must be a number > 0; got {value!r}")
