"""The spool: events on disk until the Profile API has them, shared by all processes of this install.

One SQLite file (WAL) per destination. Every step is one transaction, so that a process killed between any two
loses nothing and counts nothing twice: an event gets its ``seq`` when it is stored; a batch gets its id,
durably, before it is first sent; both go when the server has said yes. Two processes that send the same batch
send the same id and the same events.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .events import uuid7
from .install import exclusive, make_private

log = logging.getLogger("mcp_client.telemetry")

# Part of the file's name, so that an older SDK on the same machine never meets a newer file's tables.
FORMAT = 1
# A server may limit bodies; well under what ours takes (16 MiB), and a 413 splits the batch anyway.
_MAX_BATCH_BYTES = 4 * 1024 * 1024
_PAGE = 4096
# What SQLite needs for a row beside its body: header, rowid, cell pointer, and the page's own share.
_ROW_OVERHEAD = 24

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta(name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events(seq INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS batches(id TEXT PRIMARY KEY, first INTEGER NOT NULL, last INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """Events ``first`` to ``last`` under one durable id. ``bodies`` are JSON objects, ``seq`` included."""

    id: str
    first: int
    last: int
    bodies: tuple[bytes, ...]


class Spool:
    """``file=None`` keeps everything in memory: same behaviour, for a machine whose disk can't be written.

    ``max_bytes`` bounds file and WAL together; when it is reached the oldest events go. Methods raise
    ``sqlite3.Error`` or ``OSError`` when the disk fails; what was stored before stays. Safe to share between
    threads; usable after ``fork``.
    """

    def __init__(self, file: Path | None, max_bytes: int) -> None:
        self.file = file
        self._wal_pages = max(16, min(256, max_bytes // 16 // _PAGE))  # 64 KiB to 1 MiB
        self.write_bytes = self._wal_pages * _PAGE  # at most at once, for the sum to hold
        self._max_bytes = max_bytes - 2 * self._wal_pages * _PAGE if file else max_bytes
        self._connection: sqlite3.Connection | None = None
        self._client_id = ""
        _spools.add(self)

    @property
    def client_id(self) -> str:
        """Who sends: one id per spool file, with which ``seq`` only grows."""
        with _guard:
            self._open()
            return self._client_id

    def add(self, bodies: Sequence[bytes]) -> int:
        """Store events, all or none; returns how many older ones had to go to make room.

        More than ``write_bytes`` at once would let the WAL grow beyond its share.
        """
        with _guard, self._transaction() as db:
            dropped = self._make_room(db, len(bodies), sum(map(len, bodies)) + _ROW_OVERHEAD * len(bodies))
            db.executemany("INSERT INTO events(body) VALUES (?)", [(body,) for body in bodies])
        return dropped

    def next_batch(self, most: int) -> Batch | None:
        """The oldest batch; one of at most ``most`` events is formed, and durable, if none is waiting."""
        with _guard:
            db = self._open()
            row = db.execute("SELECT id, first, last FROM batches ORDER BY first LIMIT 1").fetchone()
            if row is None:
                # Only here a power cut matters: were the name lost after the batch was sent, its events would
                # be counted twice under the next name. FULL syncs the WAL at this commit.
                db.execute("PRAGMA synchronous=FULL")
                try:
                    with self._transaction():
                        row = self._form(db, most)
                finally:
                    db.execute("PRAGMA synchronous=NORMAL")
            if row is None:
                return None
            batch_id, first, last = row
            found = db.execute(
                "SELECT seq, body FROM events WHERE seq BETWEEN ? AND ? ORDER BY seq", (first, last)
            )
            bodies = tuple(b'{"seq":%d,%s' % (seq, body[1:]) for seq, body in found)
        return Batch(batch_id, first, last, bodies)

    def settle(self, batch: Batch) -> int:
        """The batch is done with:

        delete it; returns how many events this call deleted (0 if another process did).
        """
        with _guard, self._transaction() as db:
            gone = db.execute("DELETE FROM batches WHERE id = ?", (batch.id,)).rowcount
            if not gone:
                return 0
            return db.execute(
                "DELETE FROM events WHERE seq BETWEEN ? AND ?", (batch.first, batch.last)
            ).rowcount

    def split(self, batch: Batch) -> None:
        """The server did not take the batch: make two of it, under new ids."""
        middle = (batch.first + batch.last) // 2
        with _guard, self._transaction() as db:
            if db.execute("DELETE FROM batches WHERE id = ?", (batch.id,)).rowcount:
                halves = [(uuid7(), batch.first, middle), (uuid7(), middle + 1, batch.last)]
                db.executemany("INSERT INTO batches(id, first, last) VALUES (?, ?, ?)", halves)

    def pending(self) -> int:
        """Events stored and not yet settled."""
        with _guard:
            return int(self._open().execute("SELECT count(*) FROM events").fetchone()[0])

    def shrink(self) -> None:
        """Give pages that are free back to the file system, after days offline have emptied."""
        with _guard:
            db = self._open()
            if self._pages(db, "freelist_count") > self._wal_pages:
                # As a script: it frees a page for each step, and execute() makes one step.
                db.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")

    @contextlib.contextmanager
    def uploading(self) -> Iterator[bool]:
        """Whether this process is the one to upload now; see ``install.exclusive``."""
        with exclusive(self.file.with_suffix(".lock") if self.file else None) as mine:
            yield mine

    def set_aside(self, error: Exception) -> bool:
        """Whether ``error`` says that the file is damaged; it is then renamed, and a new one begun."""
        if self.file is None or getattr(error, "sqlite_errorcode", None) not in _DAMAGED:
            return False
        with _guard:
            self._release()
            aside = self.file.with_suffix(".damaged")
            os.replace(self.file, aside)
            for suffix in ("-wal", "-shm"):
                self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)
        log.warning("the telemetry spool was damaged (%s) and is set aside as %s", error, aside)
        return True

    def close(self) -> None:
        with _guard:
            self._release()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        if self.file is not None:
            make_private(self.file.parent)
            os.close(
                os.open(self.file, os.O_RDWR | os.O_CREAT, 0o600)
            )  # SQLite gives WAL and index the file's mode
        db = sqlite3.connect(
            self.file or ":memory:", timeout=2.0, isolation_level=None, check_same_thread=False
        )
        try:
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
            self._to_wal(db)
            db.execute("PRAGMA synchronous=NORMAL")
            db.execute(f"PRAGMA wal_autocheckpoint={self._wal_pages}")
            db.execute(f"PRAGMA journal_size_limit={self._wal_pages * _PAGE}")
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            db.execute("INSERT OR IGNORE INTO meta VALUES ('client_id', ?)", (str(uuid.uuid4()),))
            self._client_id = str(db.execute("SELECT value FROM meta WHERE name = 'client_id'").fetchone()[0])
        except BaseException:
            db.close()
            raise
        return db

    @staticmethod
    def _to_wal(db: sqlite3.Connection) -> None:
        """Several processes may make the file at once;

        SQLite answers "locked" to this statement without waiting.
        """
        for attempt in range(50):
            try:
                db.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError:
                if attempt == 49:
                    raise
                time.sleep(0.02)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        db = self._open()
        db.execute("BEGIN IMMEDIATE")
        try:
            yield db
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:  # a full disk may have rolled it back already
                db.execute("ROLLBACK")
            raise

    def _form(self, db: sqlite3.Connection, most: int) -> tuple[str, int, int] | None:
        batched = db.execute("SELECT coalesce(max(last), 0) FROM batches").fetchone()[0]
        first = last = size = 0
        for seq, length in db.execute(
            "SELECT seq, length(body) FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (batched, most)
        ):
            size += length
            if first and size > _MAX_BATCH_BYTES:
                break
            first, last = first or seq, seq
        if not first:
            return None
        row = (uuid7(), first, last)
        db.execute("INSERT INTO batches(id, first, last) VALUES (?, ?, ?)", row)
        return row

    def _make_room(self, db: sqlite3.Connection, rows: int, needed: int) -> int:
        dropped = 0
        while (
            self._pages(db, "page_count") - self._pages(db, "freelist_count")
        ) * _PAGE + needed > self._max_bytes:
            row = db.execute("SELECT seq FROM events ORDER BY seq LIMIT 1 OFFSET ?", (rows,)).fetchone()
            row = row or db.execute("SELECT max(seq) FROM events").fetchone()
            if row[0] is None:
                break
            cut = row[0]
            # Whole batches: one that may be on its way keeps the events its id was given for.
            covering = db.execute("SELECT max(last) FROM batches WHERE first <= ?", (cut,)).fetchone()[0]
            cut = max(cut, covering or 0)
            dropped += db.execute("DELETE FROM events WHERE seq <= ?", (cut,)).rowcount
            db.execute("DELETE FROM batches WHERE last <= ?", (cut,))
        return dropped

    @staticmethod
    def _pages(db: sqlite3.Connection, which: str) -> int:
        return int(db.execute(f"PRAGMA {which}").fetchone()[0])

    def _release(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _forked(self) -> None:
        """In the child: what is in memory is the parent's to send;

        a connection that came along must never be used.
        """
        if self._connection is not None:
            _abandoned.append(self._connection)
            self._connection = None
            if self.file is not None:
                log.warning("fork with the telemetry spool in use: the child keeps its events in memory")
                self.file = None


# SQLite's locks do not survive fork: an inherited connection makes the child believe it holds them. So every
# use of SQLite here is under one lock, and a fork waits for it and closes the connections first; both sides
# open again when they need to.
_guard = threading.Lock()
_spools: weakref.WeakSet[Spool] = weakref.WeakSet()
_abandoned: list[sqlite3.Connection] = []  # kept, because to close one would touch the parent's file
_fork_waits_s = 1.0
_fork_holds = False


def _before_fork() -> None:
    global _fork_holds  # noqa: PLW0603 - the three hooks have no other way to speak to one another
    _fork_holds = _guard.acquire(timeout=_fork_waits_s)
    if _fork_holds:
        for spool in list(_spools):
            if spool.file is not None:
                spool._release()


def _after_fork_in_parent() -> None:
    if _fork_holds:
        _guard.release()


def _after_fork_in_child() -> None:
    global _guard  # noqa: PLW0603
    _guard = threading.Lock()
    for spool in list(_spools):
        spool._forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
    )
