"""Forgetting (days of arrival, counts with fractions), TTL policies; SQLite gives no event id out twice."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    db = op.get_bind()
    sqlite = db.dialect.name == "sqlite"
    # What is there was counted with weight 1, up to the day of the last mining; events count as of their own day, as that of
    # their arrival was not kept.
    day_of_event = "CAST(t / 86400 AS INTEGER)" if sqlite else "CAST(floor(t / 86400) AS INTEGER)"
    day_mined = day_of_event.replace("t /", "mined_at /")
    if sqlite:
        _events_anew(day_of_event)
    else:
        op.add_column("events", sa.Column("day", sa.Integer(), nullable=False, server_default="0"))
        op.execute(f"UPDATE events SET day = {day_of_event}")
        op.alter_column("events", "day", server_default=None)
    with op.batch_alter_table("mined") as mined:
        for name in ("since", "day"):
            mined.add_column(sa.Column(name, sa.Integer(), nullable=False, server_default="0"))
        mined.add_column(sa.Column("half_life_days", sa.Float(), nullable=False, server_default="30"))
    op.execute(f"UPDATE mined SET since = {day_mined}, day = {day_mined}")
    with op.batch_alter_table("mined") as mined:
        for name in ("since", "day", "half_life_days"):
            mined.alter_column(name, server_default=None)
    with op.batch_alter_table("path_sums") as sums:
        for name in ("asked", "gaps", "served", "answered"):
            sums.alter_column(name, existing_type=sa.BigInteger(), type_=sa.Float(), existing_nullable=False)
    op.create_table(
        "policies",
        sa.Column("app", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("app"),
    )


def _events_anew(day: str) -> None:
    texts = ("session", "path", "route", "fp", "model")
    columns: list[sa.Column[Any]] = [
        sa.Column("id", sa.Integer(), primary_key=True, autoincrement=True),
        sa.Column("app", sa.Integer(), nullable=False),
        sa.Column("client", sa.Integer(), nullable=False),
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("t", sa.Float(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in texts),
        sa.Column("source", sa.String(10), nullable=False),
        sa.Column("latency_ms", sa.Float(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("prefetch_id", sa.Text(), nullable=False),
        sa.Column("outcome", sa.String(10), nullable=False),
    ]
    op.rename_table("events", "events_before")
    op.drop_index("events_by_session", "events_before")
    op.create_table("events", *columns, sqlite_autoincrement=True)
    names = ", ".join(column.name for column in columns)
    op.execute(
        f"INSERT INTO events ({names}) SELECT {names.replace(' day,', f' {day},')} FROM events_before ORDER BY id"
    )
    op.drop_table("events_before")
    op.create_index("events_by_session", "events", ["app", "session"])
    # Events that were mined and have aged out had ids, too.
    op.execute("DELETE FROM sqlite_sequence WHERE name = 'events'")
    op.execute(
        "INSERT INTO sqlite_sequence (name, seq) SELECT 'events', max(coalesce((SELECT max(id) FROM events), 0), "
        "coalesce((SELECT max(watermark) FROM mined), 0))"
    )
