"""The catalog: a SQL record of streams.

It records, in transactions, what other packages decide, and writes an event for each change to an outbox; it stores no
bytes of snapshots.
"""

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, PreflightRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.history import SnapshotTally
from dagster_ckpt.catalog.journal import PointFailure
from dagster_ckpt.catalog.records import (
    CompletedSnapshot,
    EventRecord,
    EventType,
    ExecutionRecord,
    ExecutionStatus,
    Holder,
    HoldKind,
    HoldRecord,
    LaunchRecord,
    LeaseRecord,
    OriginKind,
    RequestKind,
    RequestRecord,
    RequestStatus,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTrigger,
    StartCause,
    StateOrigin,
    StreamRecord,
)

__all__ = [
    "Catalog",
    "CompletedSnapshot",
    "DesiredRecord",
    "EventRecord",
    "EventType",
    "ExecutionRecord",
    "ExecutionStatus",
    "HoldKind",
    "HoldRecord",
    "Holder",
    "LaunchRecord",
    "LeaseRecord",
    "OriginKind",
    "PointFailure",
    "PreflightRecord",
    "RequestKind",
    "RequestRecord",
    "RequestStatus",
    "SnapshotRecord",
    "SnapshotStatus",
    "SnapshotTally",
    "SnapshotTrigger",
    "StartCause",
    "StateOrigin",
    "StreamRecord",
    "UpgradePhase",
    "UpgradeRecord",
]
