"""Which process holds a lease, deployments, where state came from, holds, and what a recovery has tried."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _leases()
    _deployment()
    _recovery()
    _holds()
    _plans()


# When a process started was a time by the wall clock, and would be compared with the kernel's count.
_STARTS = (
    ("leases", "process_started_at_ms", "process_start_ticks"),
    ("leases", "jvm_started_at_ms", "jvm_start_ticks"),
    ("launches", "process_started_at_ms", "process_start_ticks"),
)


def _leases() -> None:
    for table, by_the_clock, ticks in _STARTS:
        op.drop_column(table, by_the_clock)
        op.add_column(table, sa.Column(ticks, sa.BigInteger(), nullable=True))
    op.add_column("leases", sa.Column("predecessor_unproven", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("executions", sa.Column("boot_id", sa.Text(), nullable=True))
    op.add_column("executions", sa.Column("process_start_ticks", sa.BigInteger(), nullable=True))


def _deployment() -> None:
    table = op.create_table("deployment", sa.Column("deployment_id", sa.String(64), primary_key=True))
    op.bulk_insert(table, [{"deployment_id": str(uuid.uuid4())}])


def _recovery() -> None:
    op.add_column("jobs", sa.Column("origin", sa.Text))
    op.create_table(
        "timelines",
        sa.Column("job_id", sa.String(128), nullable=False),
        sa.Column("timeline", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("parent", sa.Integer, nullable=False),
        sa.Column("to_batch", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "timeline", name="pk_timelines"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_timelines_job_id_jobs"),
    )
    op.create_table(
        "recovery_failures",
        sa.Column("job_id", sa.String(128), nullable=False),
        sa.Column("ordinal", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("execution_id", sa.String(64), nullable=False),
        sa.Column("point", sa.Text, nullable=False),
        sa.Column("error", sa.String(128), nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("is_certain", sa.Boolean, nullable=False),
        sa.Column("batch_id", sa.BigInteger),
        sa.Column("rewound_batches", sa.BigInteger),
        sa.Column("rewound_ms", sa.BigInteger),
        sa.Column("is_over", sa.Boolean, nullable=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("job_id", "ordinal", name="pk_recovery_failures"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name="fk_recovery_failures_job_id_jobs"),
    )
    op.create_index("ix_executions_job_id_ended_at_ms", "executions", ["job_id", "ended_at_ms"], unique=False)


def _holds() -> None:
    op.create_table(
        "holds",
        sa.Column("hold_id", sa.String(length=64), nullable=False),
        sa.Column("image_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["image_id"], ["images.image_id"], name=op.f("fk_holds_image_id_images")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_holds_job_id_jobs")),
        sa.PrimaryKeyConstraint("hold_id", name=op.f("pk_holds")),
    )
    op.create_index("ix_holds_image_id", "holds", ["image_id"], unique=False)
    op.create_index("ix_holds_job_id_kind", "holds", ["job_id", "kind"], unique=False)


def _plans() -> None:
    op.add_column("jobs", sa.Column("plan", sa.Text))
    op.add_column("jobs", sa.Column("accepted_plan", sa.String(80)))


def downgrade() -> None:
    op.drop_column("jobs", "accepted_plan")
    op.drop_column("jobs", "plan")
    op.drop_index("ix_executions_job_id_ended_at_ms", "executions")
    op.drop_table("recovery_failures")
    op.drop_table("timelines")
    op.drop_column("jobs", "origin")
    op.drop_table("holds")
    op.drop_table("deployment")
    _leases_before()


def _leases_before() -> None:
    op.drop_column("executions", "process_start_ticks")
    op.drop_column("executions", "boot_id")
    op.drop_column("leases", "predecessor_unproven")
    for table, by_the_clock, ticks in _STARTS:
        op.drop_column(table, ticks)
        # The start of the epoch: of a process that is there, it says that it is a later one.
        default = None if table == "leases" else "0"
        op.add_column(table, sa.Column(by_the_clock, sa.BigInteger(), nullable=default is None, server_default=default))
