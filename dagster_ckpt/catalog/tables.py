"""Table definitions. Times are ms since the epoch; JSON is text that this package reads and writes."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    false,
)
from sqlalchemy.engine import Dialect

from dagster_ckpt.values.redaction import without_secrets


class FreeText(TypeDecorator[str]):
    """Text for people, redacted when stored."""

    impl = Text
    cache_ok = True

    @property
    def python_type(self) -> type[str]:
        return str

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's
        return None if value is None else without_secrets(value)


metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_STREAM = "streams.stream_id"

streams = Table(
    "streams",
    metadata,
    Column("stream_id", String(128), primary_key=True),
    Column("name", Text, nullable=False),
    Column("asset_key", Text, nullable=False),
    Column("options", Text, nullable=False),
    Column("live_directory", Text),
    Column("live_generation", Integer, nullable=False),
    Column("timeline", Integer, nullable=False),
    Column("restored_snapshot_id", String(64)),
    Column("preferred_savepoint_id", String(64)),
    Column("pending_restore", Text),
    Column("plan", Text),
    Column("accepted_plan", String(80)),
    Column("origin", Text),
    Column("state_edits", Text),
    Column("next_number", Integer, nullable=False),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
)

# The id that each snapshot carries, and JSON of a CatalogHome.
deployment = Table(
    "deployment",
    metadata,
    Column("deployment_id", String(64), primary_key=True),
    Column("home", Text),
    # Set by a migration: older streams are counted since then.
    Column("counting_since_ms", BigInteger),
)

executions = Table(
    "executions",
    metadata,
    Column("execution_id", String(64), primary_key=True),
    Column("stream_id", ForeignKey(_STREAM), nullable=False),
    # Orders executions of equal times.
    Column("ordinal", Integer, nullable=False),
    Column("run_id", Text, nullable=False),
    Column("cause", String(32), nullable=False),
    Column("status", String(32), nullable=False),
    Column("settled", Boolean, nullable=False),
    Column("host", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("started_at_ms", BigInteger, nullable=False),
    Column("ended_at_ms", BigInteger),
    Column("reason", FreeText),
    Column("recovery", Text),
    Column("live_directory", Text),
    Column("progress", Text),
    Column("heartbeat_at_ms", BigInteger, nullable=False),
    Column("code_version", Text),
    Column("application", Text),
    Column("boot_id", Text),
    Column("process_start_ticks", BigInteger),
    Index("ix_executions_stream_id_ordinal", "stream_id", "ordinal"),
    Index("ix_executions_stream_id_ended_at_ms", "stream_id", "ended_at_ms"),
    Index("ix_executions_settled", "settled"),
)

leases = Table(
    "leases",
    metadata,
    Column("stream_id", ForeignKey(_STREAM), primary_key=True),
    # Empty once released; the row keeps the token.
    Column("execution_id", String(128)),
    Column("run_id", Text),
    Column("token", BigInteger, nullable=False),
    Column("host", Text),
    Column("pid", BigInteger),
    Column("process_start_ticks", BigInteger),
    Column("boot_id", Text),
    Column("jvm_pid", BigInteger),
    Column("jvm_start_ticks", BigInteger),
    Column("acquired_at_ms", BigInteger),
    Column("renewed_at_ms", BigInteger),
    Column("expires_at_ms", BigInteger),
    # Survives a release: a previous holder may be alive and unfenced.
    Column("predecessor_unproven", Boolean, nullable=False, server_default=false()),
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("snapshot_id", String(64), primary_key=True),
    Column("stream_id", ForeignKey(_STREAM), nullable=False),
    Column("execution_id", String(64)),
    Column("kind", String(32), nullable=False),
    Column("number", Integer),
    Column("status", String(32), nullable=False),
    Column("trigger", String(32), nullable=False),
    Column("timeline", Integer, nullable=False),
    Column("location", Text),
    Column("batch_id", BigInteger),
    Column("query_id", String(64)),
    Column("full_bytes", BigInteger),
    Column("incremental_bytes", BigInteger),
    Column("file_count", Integer),
    Column("rows", BigInteger),
    Column("state_rows", BigInteger),
    # The sum in the properties, which are large: charts read a thousand rows.
    Column("records_behind", BigInteger),
    Column("watermark", Text),
    Column("duration_ms", BigInteger),
    Column("label", Text),
    Column("request_id", String(64)),
    Column("properties", Text, nullable=False),
    Column("failure_reason", FreeText),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("completed_at_ms", BigInteger),
    Column("claimed", Boolean, nullable=False, server_default=false()),
    Column("schedule", Text),
    Column("verified_at_ms", BigInteger),
    Column("verified_problem", FreeText),
    Index("ix_snapshots_stream_id_status_number", "stream_id", "status", "number"),
    Index("ix_snapshots_stream_id_completed_at_ms", "stream_id", "completed_at_ms"),
    Index("ix_snapshots_stream_id_created_at_ms", "stream_id", "created_at_ms"),
    Index("ix_snapshots_stream_id_verified_at_ms", "stream_id", "verified_at_ms"),
)

holds = Table(
    "holds",
    metadata,
    Column("hold_id", String(64), primary_key=True),
    Column("snapshot_id", ForeignKey("snapshots.snapshot_id"), nullable=False),
    Column("stream_id", ForeignKey(_STREAM), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("holder", Text, nullable=False),
    Column("request_id", String(64)),
    Column("expires_at_ms", BigInteger),
    Column("created_at_ms", BigInteger, nullable=False),
    Index("ix_holds_snapshot_id", "snapshot_id"),
    Index("ix_holds_stream_id_kind", "stream_id", "kind"),
)

requests = Table(
    "requests",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("stream_id", ForeignKey(_STREAM), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("status", String(32), nullable=False),
    Column("arguments", Text, nullable=False),
    Column("origin", Text, nullable=False),
    Column("snapshot_id", String(64)),
    Column("error", FreeText),
    Column("created_at_ms", BigInteger, nullable=False),
    Column("resolved_at_ms", BigInteger),
    Index("ix_requests_stream_id_status", "stream_id", "status"),
    Index("ix_requests_status_kind", "status", "kind"),
)

# The history of a timeline includes snapshots of its parent up to `to_batch`.
timelines = Table(
    "timelines",
    metadata,
    Column("stream_id", ForeignKey(_STREAM), primary_key=True),
    Column("timeline", Integer, primary_key=True, autoincrement=False),
    Column("parent", Integer, nullable=False),
    Column("to_batch", BigInteger, nullable=False),
    Column("accepted", FreeText),
)

recovery_failures = Table(
    "recovery_failures",
    metadata,
    Column("stream_id", ForeignKey(_STREAM), primary_key=True),
    Column("ordinal", Integer, primary_key=True, autoincrement=False),
    Column("execution_id", String(64), nullable=False),
    Column("point", Text, nullable=False),
    Column("error", String(128), nullable=False),
    Column("detail", FreeText, nullable=False),
    Column("is_certain", Boolean, nullable=False),
    Column("batch_id", BigInteger),
    Column("rewound_batches", BigInteger),
    Column("rewound_ms", BigInteger),
    Column("is_over", Boolean, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)

planned_batches = Table(
    "planned_batches",
    metadata,
    Column("stream_id", ForeignKey(_STREAM), primary_key=True),
    Column("batch_id", BigInteger, primary_key=True, autoincrement=False),
    Column("follows", String(64), nullable=False),
    Column("is_committed", Boolean, nullable=False),
    Column("files", Text, nullable=False),
)

desired_states = Table(
    "desired_states",
    metadata,
    Column("stream_id", ForeignKey(_STREAM), primary_key=True),
    Column("desired", String(16)),
    Column("generation", Integer, nullable=False),
    Column("reached", Integer, nullable=False),
    Column("request_id", String(64)),
    Column("upgrade", Text),
    Column("preflight", Text),
    Column("alert", FreeText),
    Column("alert_until", String(16)),
    Column("origin", Text, nullable=False),
    Column("changed_at_ms", BigInteger, nullable=False),
    Column("updated_at_ms", BigInteger, nullable=False),
)

launches = Table(
    "launches",
    metadata,
    Column("request_id", String(64), primary_key=True),
    Column("stream_id", ForeignKey(_STREAM), nullable=False),
    Column("run_id", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("process_start_ticks", BigInteger),
    Column("command", FreeText, nullable=False),
    Column("log", Text, nullable=False),
    Column("launched_at_ms", BigInteger, nullable=False),
    Index("ix_launches_stream_id_launched_at_ms", "stream_id", "launched_at_ms"),
)

events = Table(
    "events",
    metadata,
    Column("sequence", BigInteger, primary_key=True, autoincrement=False),
    Column("stream_id", String(128), nullable=False),
    Column("type", String(32), nullable=False),
    Column("snapshot_id", String(64)),
    Column("execution_id", String(64)),
    Column("payload", Text, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
    Index("ix_events_stream_id_sequence", "stream_id", "sequence"),
)

# One row, locked until the commit: sequence numbers follow the commit order.
event_counter = Table(
    "event_counter",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("last_sequence", BigInteger, nullable=False),
)

# Counts and last figures of each stream, which outlive the rows that they were taken of. `name` and `kind` are those of
# `dagster_ckpt.values.metrics`.
metrics = Table(
    "metrics",
    metadata,
    Column("stream_id", String(128), primary_key=True),
    Column("name", String(64), primary_key=True),
    Column("kind", String(32), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
