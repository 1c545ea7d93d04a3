"""What a streaming job is meant to be, whatever it is at the moment."""

from __future__ import annotations

from enum import StrEnum


class DesiredState(StrEnum):
    """What the supervisor sensor brings a job to (`job.state` of the Flink Kubernetes Operator, and a third).

    RUNNING: It runs, with the code that is loaded.
    SUSPENDED: It does not run; it was stopped with a savepoint, and everything is kept.
    CANCELLED: It does not run; its checkpoints are kept or deleted as its clean-up option says.
    """

    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    CANCELLED = "CANCELLED"
