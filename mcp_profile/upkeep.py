"""Upkeep of the database: raw events age out, what is learned from them stays; and a copy of the events for other tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson
import sqlalchemy as sa

from .building import today
from .forgetting import FORGOTTEN
from .schema import batches, events, mined, path_sums, transitions
from .store import Store

_DAY_S = 86_400.0
# Deleted in one transaction: other writers wait no longer than this takes.
_CHUNK = 10_000
# A batch's id is kept longer than its events: a client may come back after months offline with a batch we have.
_BATCHES_DAYS = 400.0


def retire(store: Store, days: float) -> int:
    """Delete the events older than ``days`` that are mined; how many. Events dated into the future count as old.

    What is learned from them stays, but for what has faded to next to nothing (forgetting.py).
    """
    now = store.clock()
    e = events.c
    deleted = 0
    with store.read() as db:
        watermarks = db.execute(sa.select(mined.c.app, mined.c.watermark)).all()
    for app, watermark in watermarks:
        old = sa.or_(e.t < now - days * _DAY_S, e.t > now + _DAY_S)
        some = sa.select(e.id).where(e.app + 0 == app, e.id <= watermark, old).limit(_CHUNK)
        while True:
            with store.write() as db:
                gone = db.execute(events.delete().where(e.id.in_(some))).rowcount
            deleted += gone
            if gone < _CHUNK:
                break
    _forget(store)
    with store.write() as db:
        db.execute(batches.delete().where(batches.c.received_at < now - max(days, _BATCHES_DAYS) * _DAY_S))
    return deleted


def _forget(store: Store) -> None:
    with store.read() as db:
        stands = db.execute(sa.select(mined)).all()
    for stand in stands:
        least = FORGOTTEN * today(stand)
        with store.write() as db:
            for table, n in ((transitions, transitions.c.n), (path_sums, path_sums.c.asked)):
                db.execute(table.delete().where(table.c.app == stand.app, n < least))


def export(store: Store, app: int, out: BinaryIO) -> int:
    """Write an application's events, in the order of arrival, as lines of JSON; how many."""
    written = 0
    for rows in _events(store, app):
        out.writelines(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
        written += len(rows)
    return written


def _events(store: Store, app: int) -> Iterator[list[dict[str, Any]]]:
    e = events.c
    columns = [column for column in events.columns if column.name != "app"]
    names = [str(column.name) for column in columns]  # orjson takes no subclass of str for a key
    last = 0
    while True:
        wanted = sa.select(*columns).where(e.app + 0 == app, e.id > last).order_by(e.id).limit(_CHUNK)
        with store.read() as db:
            rows = [dict(zip(names, row, strict=True)) for row in db.execute(wanted)]
        if not rows:
            return
        last = rows[-1]["id"]
        yield rows
