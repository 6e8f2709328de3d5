"""The database: opens it, takes batches in once each, and answers what can be read from it without mining."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine

from mcp_client.errors import MissingExtraError, listed

from .forgetting import day_of
from .ingest import COLUMNS, Batch
from .migrations import bring_up_to_date
from .schema import applications, batches, clients, events, hourly
from .sessions import LOST

DEFAULT_APP = 1
_LOCKS = 0x6D6370  # the first half of our advisory locks' keys ("mcp"), the second is the application


_PATIENCE_S = 30.0  # for another process that writes to the same SQLite file


class Store:
    """One database, by SQLAlchemy URL (``sqlite:///path``, ``postgresql://…``).

    Safe to share between threads. An empty database gets its tables, an older one is upgraded without loss;
    ``ConfigurationError`` if a later release has upgraded it.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self.url = sa.make_url(url)
        if self.url.drivername == "postgresql":
            self.url = self.url.set(drivername="postgresql+psycopg")
        self.clock = clock
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._writing = threading.Lock()
        self._engine = self._connect()
        # Not an expression of SQLAlchemy: its executemany costs 10 µs an event, three times the rest.
        columns = ("app", "client", "day", *COLUMNS)
        mark = "?" if self.is_sqlite else "%s"
        self._insert_events = (
            f"INSERT INTO events ({', '.join(columns)}) VALUES ({', '.join([mark] * len(columns))})"
        )
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        with self.write() as db:
            self._one_at_a_time(db, 0)  # several processes may meet an empty or an older database
            bring_up_to_date(db)
            db.execute(
                self.insert(applications).values(id=DEFAULT_APP, name="default").on_conflict_do_nothing()
            )

    def close(self) -> None:
        self._engine.dispose()

    def ping(self) -> None:
        """Raise ``sqlalchemy.exc.OperationalError`` if the database does not answer."""
        with self.read() as db:
            db.execute(sa.text("SELECT 1"))

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        with self._engine.connect() as db:
            yield db

    @contextlib.contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction. SQLite has one writer: taking turns here is cheaper than finding out there."""
        with self._writing if self.is_sqlite else contextlib.nullcontext():
            options = {"mcp_begin": "BEGIN IMMEDIATE"}
            with self._engine.connect().execution_options(**options) as db, db.begin():
                yield db

    def upsert(
        self,
        db: Connection,
        table: sa.Table,
        rows: Sequence[tuple[Any, ...]],
        *,
        add: Sequence[str] = (),
        replace: Sequence[str] = (),
    ) -> None:
        """Insert rows (values in the order of the table's columns); where the primary key is taken, add or replace columns.

        As text, not as expressions of SQLAlchemy: its executemany costs 10 µs a row, three times the rest.
        """
        if not rows:
            return
        names = [column.name for column in table.columns]
        keys = [column.name for column in table.primary_key.columns]
        changes = [f"{name} = {table.name}.{name} + excluded.{name}" for name in add]
        changes += [f"{name} = excluded.{name}" for name in replace]
        mark = "?" if self.is_sqlite else "%s"
        db.exec_driver_sql(
            f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({', '.join([mark] * len(names))}) "
            f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {', '.join(changes)}",
            list(rows),
        )

    def insert(self, table: sa.Table) -> Any:
        """An INSERT that knows ``on_conflict_do_…`` (SQLite's and PostgreSQL's are spelled alike)."""
        return (sqlite if self.is_sqlite else postgresql).insert(table)

    def ingest(self, app: int, batch: Batch) -> tuple[int, int, list[tuple[int, str]]]:
        """Store a batch: how many events are accepted, how many were here before, and which are rejected.

        The batch's id and its events are one transaction: of two that come at once, one counts.
        """
        now = self.clock()
        rejected = orjson.dumps(batch.rejected).decode() if batch.rejected else ""
        with self.write() as db:
            self._one_at_a_time(db, app)
            client = self._client(db, app, batch, now)
            entry = {
                "app": app,
                "batch_id": batch.id,
                "client": client,
                "received_at": now,
                "events": len(batch.rows),
                "rejected": rejected,
            }
            new = self.insert(batches).values(entry).on_conflict_do_nothing().returning(batches.c.batch_id)
            if db.execute(new).first() is None:
                found = db.execute(
                    sa.select(batches.c.events, batches.c.rejected).where(
                        batches.c.app == app, batches.c.batch_id == batch.id
                    )
                ).one()
                return 0, int(found.events), [tuple(bad) for bad in orjson.loads(found.rejected or "[]")]
            if batch.rows:
                db.exec_driver_sql(
                    self._insert_events, [(app, client, day_of(now), *row) for row in batch.rows]
                )
                self._count(db, app, batch)
        return len(batch.rows), 0, batch.rejected

    def applications(self) -> list[int]:
        """The ids of all applications."""
        with self.read() as db:
            return list(db.execute(sa.select(applications.c.id).order_by(applications.c.id)).scalars())

    def application(self, name: str) -> int:
        """The id of an application; ``LookupError`` if there is none of that name."""
        with self.read() as db:
            found = db.execute(sa.select(applications.c.id).where(applications.c.name == name)).scalar()
            if found is None:
                names = db.execute(sa.select(applications.c.name).order_by(applications.c.id)).scalars().all()
                raise LookupError(f"no application {name!r}; there is {listed(names)}")
        return int(found)

    def last_event(self, app: int) -> int:
        """The id of the application's newest event, 0 if there is none."""
        newest = sa.select(events.c.id).where(events.c.app + 0 == app).order_by(events.c.id.desc()).limit(1)
        with self.read() as db:
            return int(db.execute(newest).scalar() or 0)

    def stats(self, app: int) -> dict[str, Any]:
        """Totals, and the same by source and by hour."""
        h = hourly.c
        sums = [sa.func.sum(h.events), sa.func.sum(h.latency_ms), sa.func.sum(h.bytes)]
        with self.read() as db:
            by_hour = db.execute(
                sa.select(h.hour, h.source, h.outcome, *sums)
                .where(h.app == app)
                .group_by(h.hour, h.source, h.outcome)
                .order_by(h.hour)
            ).all()
            clients_seen = db.execute(sa.select(sa.func.count()).where(clients.c.app == app)).scalar_one()
            batch_count = db.execute(sa.select(sa.func.count()).where(batches.c.app == app)).scalar_one()
        sources: dict[str, list[float]] = {}
        outcomes: dict[str, int] = {}
        hours: dict[int, dict[str, int]] = {}
        stored = 0
        for hour, source, outcome, events_sum, latency, bytes_sum in by_hour:
            n, nbytes = int(events_sum), int(bytes_sum)  # PostgreSQL sums whole numbers to decimals
            stored += n
            if outcome:
                outcomes[outcome] = outcomes.get(outcome, 0) + n
            if outcome in LOST:
                continue  # the fate of a prefetch, no request
            total = sources.setdefault(source, [0, 0.0, 0])
            total[0] += n
            total[1] += latency
            total[2] += nbytes
            hours.setdefault(hour, {})[source] = hours.setdefault(hour, {}).get(source, 0) + n
        demanded = sum(int(n) for n, _, _ in sources.values())
        near = sum(int(sources[name][0]) for name in ("cache", "prefetch", "stale") if name in sources)
        issued = sum(outcomes.values())
        return {
            "events": stored,
            "batches": batch_count,
            "clients": clients_seen,
            "demanded": demanded,
            "hit_ratio": near / demanded if demanded else 0.0,
            "sources": {
                name: {"events": int(n), "mean_latency_ms": latency / n, "bytes": int(nbytes)}
                for name, (n, latency, nbytes) in sorted(sources.items())
            },
            "prefetch": {
                "outcomes": outcomes,
                "precision": outcomes.get("used", 0) / issued if issued else 0.0,
                "overfetch": issued / demanded if demanded else 0.0,
            },
            "hours": [
                {"hour": hour * 3600, "sources": by_source} for hour, by_source in sorted(hours.items())
            ],
        }

    def _one_at_a_time(self, db: Connection, app: int) -> None:
        """Until the transaction ends, no other one of ``app`` gets past this. (On SQLite none does anyway.)

        Without it an event could become visible after one with a higher id was mined, and never be mined itself.
        """
        if not self.is_sqlite:
            db.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCKS, app)))

    def _client(self, db: Connection, app: int, batch: Batch, now: float) -> int:
        statement = self.insert(clients).values(
            app=app, client_id=batch.client_id, sdk=batch.sdk, first_seen=now, last_seen=now
        )
        statement = statement.on_conflict_do_update(
            index_elements=["app", "client_id"], set_={"last_seen": now, "sdk": batch.sdk}
        ).returning(clients.c.id)
        return int(db.execute(statement).scalar_one())

    def _count(self, db: Connection, app: int, batch: Batch) -> None:
        groups: dict[tuple[int, str, str], list[float]] = {}
        for _, t, _, _, _, _, _, source, latency_ms, nbytes, _, outcome in batch.rows:
            total = groups.setdefault((int(t // 3600), source, outcome), [0, 0.0, 0])
            total[0] += 1
            total[1] += latency_ms
            total[2] += nbytes
        rows = [(app, *key, *total) for key, total in sorted(groups.items())]
        self.upsert(db, hourly, rows, add=("events", "latency_ms", "bytes"))

    def _connect(self) -> Engine:
        if not self.is_sqlite:
            try:
                return sa.create_engine(self.url, pool_pre_ping=True)
            except ModuleNotFoundError as error:
                raise MissingExtraError(
                    "postgres", error.name or "psycopg", f"the database {self.url.drivername}"
                ) from error
        name = self.url.database
        if name and name != ":memory:":
            file = Path(name)
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives WAL and index the same mode
        engine = sa.create_engine(self.url, connect_args={"timeout": _PATIENCE_S})
        sa.event.listen(engine, "connect", _set_up_sqlite)
        sa.event.listen(engine, "begin", _begin_sqlite)
        return engine


def _set_up_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # BEGIN is ours to say, see _begin_sqlite
    _switch_to_wal(connection)
    # A 202 is a promise that outlives a power cut: the client deletes its copy. One sync for each batch, not
    # for each event.
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA cache_size=-65536")


def _switch_to_wal(connection: Any) -> None:
    """Of several processes that start at once: SQLite's own patience does not cover this switch."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and then writes can't wait for another writer; one that says at once what
    # it wants can.
    connection.exec_driver_sql(connection.get_execution_options().get("mcp_begin", "BEGIN"))
