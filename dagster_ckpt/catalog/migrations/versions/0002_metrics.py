"""Counts and last figures of streams."""

import time

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "metrics",
        sa.Column("stream_id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream_id", "name", "kind", name="pk_metrics"),
    )
    op.add_column("deployment", sa.Column("counting_since_ms", sa.BigInteger()))
    has_streams = "EXISTS (SELECT 1 FROM streams)"
    since = sa.text(f"UPDATE deployment SET counting_since_ms = :now WHERE {has_streams}")
    op.get_bind().execute(since, {"now": int(time.time() * 1000)})


def downgrade() -> None:
    op.drop_column("deployment", "counting_since_ms")
    op.drop_table("metrics")
