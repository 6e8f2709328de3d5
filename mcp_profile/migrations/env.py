"""Alembic runs this for each of its commands; the connection, and its transaction, are those of ``migrations.upgrade``."""

from alembic import context

from mcp_profile.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
with context.begin_transaction():
    context.run_migrations()
