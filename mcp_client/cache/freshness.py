"""How long an answer may be used: fresh, then stale while a new one is fetched, then only if no server answers."""

from __future__ import annotations

from ..config import Cache
from ..result import Answer
from ..tensors import nbytes_of
from .memory import Entry, session_tag
from .ttl import TTLPolicy


class Freshness:
    """The rules of PROTOCOL.md section 4 for TTLs, and of RFC 5861 for stale answers.

    ``policy`` may be replaced at any time, by one assignment. A server's own ``stale-while-revalidate`` and
    ``stale-if-error`` go before the settings; ``must-revalidate`` rules both out.
    """

    def __init__(self, settings: Cache) -> None:
        self.policy = settings.ttl_policy or TTLPolicy()
        self._settings = settings

    def entry(
        self, answer: Answer, *, call_ttl_s: float | None, now: float, path: str, session: str
    ) -> Entry | None:
        """An answer as it goes into the cache; ``None`` if it must not."""
        if answer.no_store:
            return None
        settings = self._settings
        ttl = self.policy.ttl_s(
            answer.model, call=call_ttl_s, server=answer.max_age_s, default=settings.ttl_s
        )
        if ttl <= 0:
            return None
        revalidate, on_error = answer.stale_while_revalidate_s, answer.stale_if_error_s
        fresh_until = now + ttl
        revalidate_until = fresh_until + (
            settings.stale_while_revalidate_s if revalidate is None else revalidate
        )
        error_until = fresh_until + (settings.stale_if_error_s if on_error is None else on_error)
        return Entry(
            answer=answer,
            stored_at=now,
            fresh_until=fresh_until,
            revalidate_until=revalidate_until,
            expires_at=max(revalidate_until, error_until),
            nbytes=nbytes_of(answer.outputs),
            path=path,
            session=session_tag(session),
        )
