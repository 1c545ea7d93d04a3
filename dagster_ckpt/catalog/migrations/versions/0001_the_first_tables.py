"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "event_counter",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event_counter")),
    )
    op.execute("INSERT INTO event_counter (id, last_sequence) VALUES (1, 0)")
    op.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("image_id", sa.String(length=64), nullable=True),
        sa.Column("execution_id", sa.String(length=64), nullable=True),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_events")),
    )
    op.create_table(
        "jobs",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("asset_key", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("live_directory", sa.Text(), nullable=True),
        sa.Column("live_generation", sa.Integer(), nullable=False),
        sa.Column("timeline", sa.Integer(), nullable=False),
        sa.Column("restored_image_id", sa.String(length=64), nullable=True),
        sa.Column("preferred_savepoint_id", sa.String(length=64), nullable=True),
        sa.Column("pending_restore", sa.Text(), nullable=True),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_jobs")),
    )
    op.create_table(
        "executions",
        sa.Column("execution_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("ordinal", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("settled", sa.Boolean(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("ended_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("recovery", sa.Text(), nullable=True),
        sa.Column("live_directory", sa.Text(), nullable=True),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("heartbeat_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_executions_job_id_jobs")),
        sa.PrimaryKeyConstraint("execution_id", name=op.f("pk_executions")),
    )
    op.create_index("ix_executions_job_id_ordinal", "executions", ["job_id", "ordinal"], unique=False)
    op.create_index("ix_executions_settled", "executions", ["settled"], unique=False)
    op.create_table(
        "images",
        sa.Column("image_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("execution_id", sa.String(length=64), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("trigger", sa.String(length=32), nullable=False),
        sa.Column("timeline", sa.Integer(), nullable=False),
        sa.Column("location", sa.Text(), nullable=True),
        sa.Column("batch_id", sa.BigInteger(), nullable=True),
        sa.Column("query_id", sa.String(length=64), nullable=True),
        sa.Column("full_bytes", sa.BigInteger(), nullable=True),
        sa.Column("incremental_bytes", sa.BigInteger(), nullable=True),
        sa.Column("file_count", sa.Integer(), nullable=True),
        sa.Column("rows", sa.BigInteger(), nullable=True),
        sa.Column("state_rows", sa.BigInteger(), nullable=True),
        sa.Column("watermark", sa.Text(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("properties", sa.Text(), nullable=False),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("completed_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_images_job_id_jobs")),
        sa.PrimaryKeyConstraint("image_id", name=op.f("pk_images")),
    )
    op.create_index("ix_images_job_id_status", "images", ["job_id", "status"], unique=False)
    op.create_table(
        "leases",
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("execution_id", sa.String(length=128), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("process_started_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("jvm_pid", sa.BigInteger(), nullable=True),
        sa.Column("jvm_started_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("acquired_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("renewed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_leases_job_id_jobs")),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_leases")),
    )
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("image_id", sa.String(length=64), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("resolved_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.job_id"], name=op.f("fk_requests_job_id_jobs")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_requests")),
    )
    op.create_index("ix_requests_job_id_status", "requests", ["job_id", "status"], unique=False)


def downgrade() -> None:
    op.drop_index("ix_requests_job_id_status", table_name="requests")
    op.drop_table("requests")
    op.drop_table("leases")
    op.drop_index("ix_images_job_id_status", table_name="images")
    op.drop_table("images")
    op.drop_index("ix_executions_settled", table_name="executions")
    op.drop_index("ix_executions_job_id_ordinal", table_name="executions")
    op.drop_table("executions")
    op.drop_table("jobs")
    op.drop_table("events")
    op.drop_table("event_counter")
