"""The SQL record of jobs, executions, leases, images, requests and events; it outlives every process.

No bytes of images and no decisions live here: it keeps what others decided, in transactions, and tells of each change
through an outbox of events. Start with `catalog.py`, then `records.py` for what is kept and `tables.py` for how.
"""

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, PreflightRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import (
    CompletedImage,
    EventRecord,
    EventType,
    ExecutionRecord,
    ExecutionStatus,
    Holder,
    HoldKind,
    HoldRecord,
    ImageRecord,
    ImageStatus,
    ImageTally,
    ImageTrigger,
    JobRecord,
    LaunchRecord,
    LeaseRecord,
    RequestKind,
    RequestRecord,
    RequestStatus,
    StartCause,
)
from dagster_ckpt.catalog.recovery_records import OriginKind, PointFailure, StateOrigin

__all__ = [
    "Catalog",
    "CompletedImage",
    "DesiredRecord",
    "EventRecord",
    "EventType",
    "ExecutionRecord",
    "ExecutionStatus",
    "HoldKind",
    "HoldRecord",
    "Holder",
    "ImageRecord",
    "ImageStatus",
    "ImageTally",
    "ImageTrigger",
    "JobRecord",
    "LaunchRecord",
    "LeaseRecord",
    "OriginKind",
    "PointFailure",
    "PreflightRecord",
    "RequestKind",
    "RequestRecord",
    "RequestStatus",
    "StartCause",
    "StateOrigin",
    "UpgradePhase",
    "UpgradeRecord",
]
