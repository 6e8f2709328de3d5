"""A client's tie to its Profile API: events go there; the fleet's profile and its TTL policy come from there."""

from __future__ import annotations

from collections.abc import Callable

from ..cache.ttl import TTLPolicy
from ..config import Telemetry
from ..errors import NotFoundError
from ..prefetch.profile import Profile
from .api import ProfileAPI, open_api
from .uploader import TelemetryPipe

FetchProfile = Callable[[str | None], tuple[Profile | None, str]]


def connect(
    config: Telemetry, on_profile: Callable[[Profile], None], on_policy: Callable[[TTLPolicy], None]
) -> tuple[TelemetryPipe, FetchProfile | None]:
    """What takes the client's events; and what asks for the profile (and the policy), unless both come by themselves."""
    api = open_api(config)
    if isinstance(api, ProfileAPI):
        return TelemetryPipe(config), _asking(api, on_policy)
    from .watch import Watcher

    pipe = TelemetryPipe(config, api=api, watcher=Watcher(api, on_profile=on_profile, on_policy=on_policy))
    return pipe, None if pipe.enabled else api.profile


def _asking(api: ProfileAPI, on_policy: Callable[[TTLPolicy], None]) -> FetchProfile:
    version = 0

    def fetch(etag: str | None) -> tuple[Profile | None, str]:
        nonlocal version
        profile = api.profile(etag)
        try:
            policy = api.ttl_policy(version)
        except NotFoundError:  # a Profile API from before there were any
            policy = None
        if policy is not None:
            version = policy.version
            on_policy(policy)
        return profile

    return fetch
