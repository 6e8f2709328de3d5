"""Brings a database to the form that schema.py describes: an empty one at once, an older one step by step (Alembic).

A change of schema.py is a new file in ``versions/``, and ``HEAD`` names it; tests hold the two ways to the same result.
"""

from __future__ import annotations

from importlib import metadata

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from mcp_client.errors import ConfigurationError

from ..schema import metadata as schema

HEAD = "0003"
_FIRST = "0001"
BEFORE_RECORDS = "before"  # a database of the first form, made when revisions were not recorded yet

_revisions = sa.Table(
    "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True)
)


def bring_up_to_date(db: Connection) -> None:
    """Make or upgrade the tables, in the transaction that ``db`` is in: all of it happens or nothing.

    The caller sees to it that one process at a time does this. ``ConfigurationError`` if the database is of a later release.
    """
    found = revision(db)
    if found == HEAD:
        return
    if not found and not sa.inspect(db).has_table(schema.tables["events"].name):
        schema.create_all(db)
        _revisions.create(db)
        db.execute(_revisions.insert().values(version_num=HEAD))
        return
    upgrade(db, found or BEFORE_RECORDS)


def revision(db: Connection) -> str:
    """The revision that the database is at; "" if it has none."""
    if not sa.inspect(db).has_table(_revisions.name):
        return ""
    return str(db.execute(sa.select(_revisions.c.version_num)).scalar() or "")


def upgrade(db: Connection, found: str, to: str = "head") -> None:
    """Run the migrations after ``found``: a revision, ``BEFORE_RECORDS``, or "" for an empty database."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config(attributes={"connection": db})
    config.set_main_option("script_location", "mcp_profile:migrations")
    if found == BEFORE_RECORDS:
        command.stamp(config, _FIRST)
    elif found:
        try:
            ScriptDirectory.from_config(config).get_revision(found)
        except CommandError as error:
            raise ConfigurationError(
                f"the database is at revision {found}, which this release ({_release()}, up to {HEAD}) does not know: "
                "a later release has upgraded it. Install that release, or restore the database from a copy made before"
            ) from error
    command.upgrade(config, to)


def _release() -> str:
    try:
        return f"mcp2026 {metadata.version('mcp2026')}"
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return "mcp2026"
