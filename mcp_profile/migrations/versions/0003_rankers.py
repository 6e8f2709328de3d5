"""Trained rankers, with their metrics."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "rankers",
        sa.Column("app", sa.Integer(), primary_key=True),
        sa.Column("version", sa.Integer(), primary_key=True),
        sa.Column("trained_at", sa.Float(), nullable=False),
        sa.Column("promoted", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("onnx", sa.LargeBinary(), nullable=False),
    )
