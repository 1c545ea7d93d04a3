"""When an image is taken and what counts as failure, as a pure state machine: events in, actions out.

No thread, no I/O, no clock, no Spark, no Dagster and no catalog may live here: whoever drives
the coordinator hands in times and reports, and carries out what it returns.
Start with `coordinator.py`; the rules it composes are one module each (`request_decider.py`,
`periodic_timer.py`, `failures.py`, `attempt.py`), and `events.py` and `actions.py` are its language.
"""

from dagster_ckpt.coordinator.actions import Abort, Action, Begin, Discard, FailQuery, Refuse, StopQuery
from dagster_ckpt.coordinator.attempt import Alignment, Attempt
from dagster_ckpt.coordinator.coordinator import CheckpointCoordinator
from dagster_ckpt.coordinator.events import (
    AttemptCompleted,
    AttemptFailed,
    CleaningChanged,
    CutTaken,
    Event,
    QueryStarted,
    QueryStopped,
    Tick,
    Triggered,
)
from dagster_ckpt.coordinator.reasons import CheckpointFailureReason
from dagster_ckpt.coordinator.request import TriggerKind, TriggerOrigin, TriggerRequest

__all__ = [
    "Abort",
    "Action",
    "Alignment",
    "Attempt",
    "AttemptCompleted",
    "AttemptFailed",
    "Begin",
    "CheckpointCoordinator",
    "CheckpointFailureReason",
    "CleaningChanged",
    "CutTaken",
    "Discard",
    "Event",
    "FailQuery",
    "QueryStarted",
    "QueryStopped",
    "Refuse",
    "StopQuery",
    "Tick",
    "TriggerKind",
    "TriggerOrigin",
    "TriggerRequest",
    "Triggered",
]
