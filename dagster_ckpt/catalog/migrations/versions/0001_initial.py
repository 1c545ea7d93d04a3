"""The tables of the first release."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "deployment",
        sa.Column("deployment_id", sa.String(length=64), nullable=False),
        sa.Column("home", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("deployment_id", name=op.f("pk_deployment")),
    )
    op.create_table(
        "event_counter",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last_sequence", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event_counter")),
    )
    op.create_table(
        "events",
        sa.Column("sequence", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("type", sa.String(length=32), nullable=False),
        sa.Column("snapshot_id", sa.String(length=64), nullable=True),
        sa.Column("execution_id", sa.String(length=64), nullable=True),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("sequence", name=op.f("pk_events")),
    )
    op.create_index("ix_events_stream_id_sequence", "events", ["stream_id", "sequence"], unique=False)
    op.create_table(
        "streams",
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("asset_key", sa.Text(), nullable=False),
        sa.Column("options", sa.Text(), nullable=False),
        sa.Column("live_directory", sa.Text(), nullable=True),
        sa.Column("live_generation", sa.Integer(), nullable=False),
        sa.Column("timeline", sa.Integer(), nullable=False),
        sa.Column("restored_snapshot_id", sa.String(length=64), nullable=True),
        sa.Column("preferred_savepoint_id", sa.String(length=64), nullable=True),
        sa.Column("pending_restore", sa.Text(), nullable=True),
        sa.Column("plan", sa.Text(), nullable=True),
        sa.Column("accepted_plan", sa.String(length=80), nullable=True),
        sa.Column("origin", sa.Text(), nullable=True),
        sa.Column("state_edits", sa.Text(), nullable=True),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("stream_id", name=op.f("pk_streams")),
    )
    op.create_table(
        "desired_states",
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("desired", sa.String(length=16), nullable=True),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("reached", sa.Integer(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("upgrade", sa.Text(), nullable=True),
        sa.Column("preflight", sa.Text(), nullable=True),
        sa.Column("alert", sa.Text(), nullable=True),
        sa.Column("alert_until", sa.String(length=16), nullable=True),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("changed_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("updated_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_desired_states_stream_id_streams")),
        sa.PrimaryKeyConstraint("stream_id", name=op.f("pk_desired_states")),
    )
    op.create_table(
        "executions",
        sa.Column("execution_id", sa.String(length=64), nullable=False),
        sa.Column("stream_id", sa.String(length=128), nullable=False),
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
        sa.Column("code_version", sa.Text(), nullable=True),
        sa.Column("application", sa.Text(), nullable=True),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("process_start_ticks", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_executions_stream_id_streams")),
        sa.PrimaryKeyConstraint("execution_id", name=op.f("pk_executions")),
    )
    op.create_index("ix_executions_settled", "executions", ["settled"], unique=False)
    op.create_index("ix_executions_stream_id_ended_at_ms", "executions", ["stream_id", "ended_at_ms"], unique=False)
    op.create_index("ix_executions_stream_id_ordinal", "executions", ["stream_id", "ordinal"], unique=False)
    op.create_table(
        "launches",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("process_start_ticks", sa.BigInteger(), nullable=True),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("log", sa.Text(), nullable=False),
        sa.Column("launched_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_launches_stream_id_streams")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_launches")),
    )
    op.create_index("ix_launches_stream_id_launched_at_ms", "launches", ["stream_id", "launched_at_ms"], unique=False)
    op.create_table(
        "leases",
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("execution_id", sa.String(length=128), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.Text(), nullable=True),
        sa.Column("pid", sa.BigInteger(), nullable=True),
        sa.Column("process_start_ticks", sa.BigInteger(), nullable=True),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("jvm_pid", sa.BigInteger(), nullable=True),
        sa.Column("jvm_start_ticks", sa.BigInteger(), nullable=True),
        sa.Column("acquired_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("renewed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("predecessor_unproven", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_leases_stream_id_streams")),
        sa.PrimaryKeyConstraint("stream_id", name=op.f("pk_leases")),
    )
    op.create_table(
        "planned_batches",
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("follows", sa.String(length=64), nullable=False),
        sa.Column("is_committed", sa.Boolean(), nullable=False),
        sa.Column("files", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["stream_id"], ["streams.stream_id"], name=op.f("fk_planned_batches_stream_id_streams")
        ),
        sa.PrimaryKeyConstraint("stream_id", "batch_id", name=op.f("pk_planned_batches")),
    )
    op.create_table(
        "recovery_failures",
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("ordinal", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("execution_id", sa.String(length=64), nullable=False),
        sa.Column("point", sa.Text(), nullable=False),
        sa.Column("error", sa.String(length=128), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("is_certain", sa.Boolean(), nullable=False),
        sa.Column("batch_id", sa.BigInteger(), nullable=True),
        sa.Column("rewound_batches", sa.BigInteger(), nullable=True),
        sa.Column("rewound_ms", sa.BigInteger(), nullable=True),
        sa.Column("is_over", sa.Boolean(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["stream_id"], ["streams.stream_id"], name=op.f("fk_recovery_failures_stream_id_streams")
        ),
        sa.PrimaryKeyConstraint("stream_id", "ordinal", name=op.f("pk_recovery_failures")),
    )
    op.create_table(
        "requests",
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("status", sa.String(length=32), nullable=False),
        sa.Column("arguments", sa.Text(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("snapshot_id", sa.String(length=64), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("resolved_at_ms", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_requests_stream_id_streams")),
        sa.PrimaryKeyConstraint("request_id", name=op.f("pk_requests")),
    )
    op.create_index("ix_requests_status_kind", "requests", ["status", "kind"], unique=False)
    op.create_index("ix_requests_stream_id_status", "requests", ["stream_id", "status"], unique=False)
    op.create_table(
        "snapshots",
        sa.Column("snapshot_id", sa.String(length=64), nullable=False),
        sa.Column("stream_id", sa.String(length=128), nullable=False),
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
        sa.Column("records_behind", sa.BigInteger(), nullable=True),
        sa.Column("watermark", sa.Text(), nullable=True),
        sa.Column("duration_ms", sa.BigInteger(), nullable=True),
        sa.Column("label", sa.Text(), nullable=True),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("properties", sa.Text(), nullable=False),
        sa.Column("failure_reason", sa.Text(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("completed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("claimed", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("schedule", sa.Text(), nullable=True),
        sa.Column("verified_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("verified_problem", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_snapshots_stream_id_streams")),
        sa.PrimaryKeyConstraint("snapshot_id", name=op.f("pk_snapshots")),
    )
    op.create_index(
        "ix_snapshots_stream_id_completed_at_ms", "snapshots", ["stream_id", "completed_at_ms"], unique=False
    )
    op.create_index("ix_snapshots_stream_id_created_at_ms", "snapshots", ["stream_id", "created_at_ms"], unique=False)
    op.create_index(
        "ix_snapshots_stream_id_status_number", "snapshots", ["stream_id", "status", "number"], unique=False
    )
    op.create_index("ix_snapshots_stream_id_verified_at_ms", "snapshots", ["stream_id", "verified_at_ms"], unique=False)
    op.create_table(
        "timelines",
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("timeline", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent", sa.Integer(), nullable=False),
        sa.Column("to_batch", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_timelines_stream_id_streams")),
        sa.PrimaryKeyConstraint("stream_id", "timeline", name=op.f("pk_timelines")),
    )
    op.create_table(
        "holds",
        sa.Column("hold_id", sa.String(length=64), nullable=False),
        sa.Column("snapshot_id", sa.String(length=64), nullable=False),
        sa.Column("stream_id", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=True),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["snapshot_id"], ["snapshots.snapshot_id"], name=op.f("fk_holds_snapshot_id_snapshots")
        ),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.stream_id"], name=op.f("fk_holds_stream_id_streams")),
        sa.PrimaryKeyConstraint("hold_id", name=op.f("pk_holds")),
    )
    op.create_index("ix_holds_snapshot_id", "holds", ["snapshot_id"], unique=False)
    op.create_index("ix_holds_stream_id_kind", "holds", ["stream_id", "kind"], unique=False)
    op.execute("INSERT INTO event_counter (id, last_sequence) VALUES (1, 0)")
    # Snapshots carry the id of the deployment whose catalog recorded them.
    deployment = sa.table("deployment", sa.column("deployment_id", sa.String(64)))
    op.bulk_insert(deployment, [{"deployment_id": str(uuid.uuid4())}])


def downgrade() -> None:
    op.drop_index("ix_holds_stream_id_kind", table_name="holds")
    op.drop_index("ix_holds_snapshot_id", table_name="holds")
    op.drop_table("holds")
    op.drop_table("timelines")
    op.drop_index("ix_snapshots_stream_id_verified_at_ms", table_name="snapshots")
    op.drop_index("ix_snapshots_stream_id_status_number", table_name="snapshots")
    op.drop_index("ix_snapshots_stream_id_created_at_ms", table_name="snapshots")
    op.drop_index("ix_snapshots_stream_id_completed_at_ms", table_name="snapshots")
    op.drop_table("snapshots")
    op.drop_index("ix_requests_stream_id_status", table_name="requests")
    op.drop_index("ix_requests_status_kind", table_name="requests")
    op.drop_table("requests")
    op.drop_table("recovery_failures")
    op.drop_table("planned_batches")
    op.drop_table("leases")
    op.drop_index("ix_launches_stream_id_launched_at_ms", table_name="launches")
    op.drop_table("launches")
    op.drop_index("ix_executions_stream_id_ordinal", table_name="executions")
    op.drop_index("ix_executions_stream_id_ended_at_ms", table_name="executions")
    op.drop_index("ix_executions_settled", table_name="executions")
    op.drop_table("executions")
    op.drop_table("desired_states")
    op.drop_table("streams")
    op.drop_index("ix_events_stream_id_sequence", table_name="events")
    op.drop_table("events")
    op.drop_table("event_counter")
    op.drop_table("deployment")
