"""Where an execution runs, and which drivers were launched."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("executions", sa.Column("application", sa.Text(), nullable=True))
    op.create_table(
        "launches",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("process_started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("launched_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_launches_job_id_jobs")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_launches")),
    )
    op.create_index("ix_launches_job_id_launched_at_ms", "launches", ["job_id", "launched_at_ms"], unique=False)


def downgrade() -> None:
    op.drop_table("launches")
    op.drop_column("executions", "application")
