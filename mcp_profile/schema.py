"""The tables of the Profile API, for SQLite and PostgreSQL alike.

``app`` keeps applications apart everywhere.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData()

# SQLite autoincrements only INTEGER PRIMARY KEY, PostgreSQL needs 64 bits.
_Id = BigInteger().with_variant(Integer(), "sqlite")

applications = Table(
    "applications",
    metadata,
    Column(
        "id", Integer, Identity(start=2), primary_key=True
    ),  # 1 is the default application, which is always there
    Column("name", String(100), nullable=False, unique=True),
)

clients = Table(
    "clients",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("app", Integer, nullable=False),
    Column("client_id", String(64), nullable=False),
    Column("sdk", String(100), nullable=False),
    Column("first_seen", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
    UniqueConstraint("app", "client_id"),
)

# What makes a batch count once. Rows outlive the events: a client may have been offline for long.
batches = Table(
    "batches",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("batch_id", String(64), primary_key=True),
    Column("client", _Id, nullable=False),
    Column("received_at", Float, nullable=False),
    Column("events", Integer, nullable=False),
    Column("rejected", Text, nullable=False),  # JSON, as it was answered the first time; "" for none
)

# ``id`` grows in the order of arrival, and within a batch in the order of ``seq``: it is the order that
# mining follows, because the clock of a client may jump and its sequence may not.
events = Table(
    "events",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("app", Integer, nullable=False),
    Column("client", _Id, nullable=False),
    Column("day", Integer, nullable=False),  # of arrival, since 1970
    Column("seq", BigInteger, nullable=False),
    Column("t", Float, nullable=False),
    Column("session", Text, nullable=False),
    Column("path", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("fp", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("source", String(10), nullable=False),
    Column("latency_ms", Float, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("prefetch_id", Text, nullable=False),
    Column("outcome", String(10), nullable=False),
    Index("events_by_session", "app", "session"),
    sqlite_autoincrement=True,  # else SQLite gives the ids of deleted events out again, below the watermark of mining
)

# Sums by the hour, kept at ingest: they answer /v1/stats whatever the number of events, and stay when events
# age out.
hourly = Table(
    "hourly",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("hour", Integer, primary_key=True),  # Unix time in seconds / 3600, rounded down
    Column("source", String(10), primary_key=True),
    Column("outcome", String(10), primary_key=True),
    Column("events", BigInteger, nullable=False),
    Column("latency_ms", Float, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)

keys = Table(
    "keys",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("app", Integer, nullable=False),
    Column("name", String(100), nullable=False),
    Column(
        "digest", String(64), nullable=False, unique=True
    ),  # SHA-256 of the key; the key itself is shown once
    Column("scopes", String(100), nullable=False),  # joined by spaces
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
)

# Where mining stands. What follows it is what has been learned; it stays when events age out.
mined = Table(
    "mined",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("watermark", BigInteger, nullable=False),  # the id of the last event that is counted
    Column("steps", BigInteger, nullable=False),
    Column("visits", BigInteger, nullable=False),
    Column("mined_at", Float, nullable=False),
    # forgetting.py: the days on which the first and the last of the counted events arrived, and how fast they fade (0: never)
    Column("since", Integer, nullable=False),
    Column("day", Integer, nullable=False),
    Column("half_life_days", Float, nullable=False),
)

# Each session's present visit: when its last step was, and its last steps, oldest first; what the next run needs to go on.
tails = Table(
    "tails",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("session", Text, primary_key=True),
    Column("state", Text, nullable=False),  # JSON [t, [[path, route], …]]
    Column("touched_at", Float, nullable=False),
)

# How often a step followed a context, weighted by forgetting.py. ``kind``: "path" or "route".
transitions = Table(
    "transitions",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("kind", String(5), primary_key=True),
    Column("context", Text, primary_key=True),
    Column("step", Text, primary_key=True),
    Column("n", Float, nullable=False),
)

# Sums by path, weighted by forgetting.py, from which prefetch.profile.KeyStats are the means.
path_sums = Table(
    "path_sums",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("path", Text, primary_key=True),
    Column("asked", Float, nullable=False),
    Column("gap_s", Float, nullable=False),  # to the step after it
    Column("gaps", Float, nullable=False),
    Column("latency_ms", Float, nullable=False),  # of answers that came from a server
    Column("served", Float, nullable=False),
    Column("bytes", Float, nullable=False),
    Column("answered", Float, nullable=False),
)

# The TTL policy of an application (PROTOCOL.md section 4), as Watch hands it out.
policies = Table(
    "policies",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("version", Integer, nullable=False),
    Column("document", Text, nullable=False),  # JSON
    Column("changed_at", Float, nullable=False),
)

# What `mcp-profile train` made. The file is kept of those that were put into service only.
rankers = Table(
    "rankers",
    metadata,
    Column("app", Integer, primary_key=True),
    Column("version", Integer, primary_key=True),
    Column("trained_at", Float, nullable=False),
    Column("promoted", Integer, nullable=False),  # 1: it beat what was in service on held-out sessions
    Column("metrics", Text, nullable=False),  # JSON, reliability diagram included
    Column("onnx", LargeBinary, nullable=False),
)
