"""Rankers in the database: trained on an application's events, versioned with their metrics, promoted only if better."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mcp_client.errors import ProtocolError
from mcp_client.prefetch.ranker import Ranker

from .schema import events, rankers
from .sessions import LOST
from .store import Store

if TYPE_CHECKING:
    from .training import Metrics, Step

# The newest events that are learned from: what bounds memory and minutes.
MOST_EVENTS = 500_000


@dataclass(frozen=True, slots=True)
class Training:
    """What a run brought. ``rival``: the held-out log loss of what was in service (a ranker, or statistics alone)."""

    version: int
    promoted: bool
    rival: float
    metrics: Metrics


def train_and_keep(store: Store, app: int, *, most_events: int = MOST_EVENTS) -> Training:
    """Train on the application's newest events; put the ranker into service if it beats what is there on held-out sessions."""
    from .training import evaluate, train

    trained = train(sessions_of(store, app, most_events))
    metrics = dict(trained.metrics)
    rival = float(metrics["statistics"]["log_loss"])
    with store.read() as db:
        blob = in_service(db, app)
    if blob:
        with contextlib.suppress(ProtocolError):  # trained on the features of an earlier release: no rival
            metrics["in_service"] = evaluate(Ranker(blob, runtime=False).score(trained.rows), trained.labels)
            rival = min(rival, float(metrics["in_service"]["log_loss"]))
    promoted = float(metrics["ranker"]["log_loss"]) < rival
    r = rankers.c
    with store.write() as db:
        version = int(db.execute(sa.select(sa.func.max(r.version)).where(r.app == app)).scalar() or 0) + 1
        db.execute(
            rankers.insert().values(
                app=app,
                version=version,
                trained_at=store.clock(),
                promoted=int(promoted),
                metrics=orjson.dumps(metrics).decode(),
                onnx=trained.onnx if promoted else b"",
            )
        )
    return Training(version, promoted, rival, metrics)


def in_service(db: Connection, app: int) -> bytes:
    """The ranker promoted last, or b""."""
    r = rankers.c
    newest = sa.select(r.onnx).where(r.app == app, r.promoted == 1).order_by(r.version.desc()).limit(1)
    return bytes(db.execute(newest).scalar() or b"")


def version_in_service(db: Connection, app: int) -> int:
    """The number of the ranker in service, 0 if there is none."""
    r = rankers.c
    return int(
        db.execute(sa.select(sa.func.max(r.version)).where(r.app == app, r.promoted == 1)).scalar() or 0
    )


def sessions_of(store: Store, app: int, most_events: int = MOST_EVENTS) -> list[list[Step]]:
    """The demanded steps of the newest events, by session, in the order in which sessions ended."""
    e = events.c
    wanted = (
        sa.select(e.session, e.t, e.path, e.route)
        .where(e.app + 0 == app, e.session != "", e.path != "", e.outcome.not_in(LOST))
        .order_by(e.id.desc())
        .limit(most_events)
    )
    with store.read() as db:
        rows = db.execute(wanted).fetchall()
    sessions: dict[str, list[Step]] = {}
    for session, t, path, route in rows:  # newest first, so those that ended last come first
        sessions.setdefault(session, []).append((t, path, route))
    return [steps[::-1] for steps in reversed(sessions.values())]
