"""The SQL record of streams, executions, leases, snapshots, requests and events; it outlives every process.

No bytes of snapshots and no decisions live here: it keeps what others decided, in transactions, and tells of each
    change
through an outbox of events. Start with `catalog.py`, then `records.py` for what is kept and `tables.py` for how.
"""

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, PreflightRecord, UpgradePhase, UpgradeRecord
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
    RequestKind,
    RequestRecord,
    RequestStatus,
    SnapshotRecord,
    SnapshotStatus,
    SnapshotTally,
    SnapshotTrigger,
    StartCause,
    StreamRecord,
)
from dagster_ckpt.catalog.recovery_records import OriginKind, PointFailure, StateOrigin

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
