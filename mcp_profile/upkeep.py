"""Upkeep of the database: raw events age out, what is learned from them stays; and a copy of the events for other tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson
import sqlalchemy as sa

from .schema import batches, events, mined
from .store import Store

_DAY_S = 86_400.0
# Deleted in one transaction: other writers wait no longer than this takes.
_CHUNK = 10_000
# A batch's id is kept longer than its events: a client may come back after months offline with a batch we have.
_BATCHES_DAYS = 400.0


def retire(store: Store, days: float) -> int:
    """Delete the events older than ``days`` that are mined; how many. Events dated into the future count as old."""
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
    with store.write() as db:
        db.execute(batches.delete().where(batches.c.received_at < now - max(days, _BATCHES_DAYS) * _DAY_S))
    return deleted


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
