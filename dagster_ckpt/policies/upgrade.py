"""Upgrade policy: how a running stream moves to a new version of its code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.validation import conform_fields

# Called with what differs (`output`, or the name of a state) and the rows that do, as a DataFrame; returns those that
# must not.
UnexpectedRows = Callable[[str, Any], Any]


class UpgradeMode(StrEnum):
    """What the new code starts from, like `job.upgradeMode` of the Flink Kubernetes Operator.

    STATELESS: Empty state: all state is discarded, and sinks that support it are rolled back.
    LAST_STATE: The live directory where the old code stopped, or the newest snapshot if there is no live directory.
        Works for a failing stream too.
    SAVEPOINT: The same, after the old code was stopped with a savepoint, to which a rollback returns.
    HAND_OVER: As LAST_STATE, but the run of the new code starts beside the old one, compares what both do
        (`verify_batches`), and only then stops the old code and takes over.

    Example:
        >>> UpgradePolicy(mode=UpgradeMode.LAST_STATE)
    """

    STATELESS = "STATELESS"
    LAST_STATE = "LAST_STATE"
    SAVEPOINT = "SAVEPOINT"
    HAND_OVER = "HAND_OVER"


@dataclass(frozen=True)
class UpgradePolicy:
    """What to do when the code version of a managed stream differs from the one that it was started with.

    Example:
        >>> UpgradePolicy(UpgradeMode.LAST_STATE, max_checkpoint_age_ms=600_000).preflight
        True
    """

    mode: Annotated[
        UpgradeMode,
        "STATELESS: discard all state. LAST_STATE: continue where the old code stopped. SAVEPOINT: the same, after "
        "stopping with a savepoint. HAND_OVER: as LAST_STATE, by a run that starts beside the old one, and stops it "
        "after comparing what both do.",
    ] = UpgradeMode.SAVEPOINT
    # `kubernetes.operator.job.upgrade.last-state.max.allowed.checkpoint.age`
    max_checkpoint_age_ms: Annotated[
        int | None,
        "LAST_STATE: if the newest snapshot of a running stream is older than this, stop with a savepoint instead. "
        "Default: no limit.",
    ] = None
    # Off by default like `kubernetes.operator.deployment.rollback.enabled`.
    rollback_after_ms: Annotated[
        int | None,
        "Time within which the new code must commit a batch or complete a checkpoint. If it does not, the stream is "
        "stopped and rolled back to where the old code stopped. Default: off.",
    ] = None
    rollback_if_restarted: Annotated[
        bool,
        "Observe the new code for rollback_after_ms, also after its first batch, and roll back as soon as it fails and "
        "the restart strategy would start it again.",
    ] = False
    rollback_if_unhealthy: Annotated[
        bool,
        "Observe the new code for rollback_after_ms, and roll back as soon as a health check reports an ERROR, or at "
        "the end because of source_lag, that it did not report when the upgrade began.",
    ] = False
    preflight: Annotated[
        bool, "Run the new code for one batch on a copy of the state, without output, before the stream is stopped."
    ] = True
    verify_batches: Annotated[
        int,
        "HAND_OVER: number of the newest batches that the new code runs again, without output. If output or state "
        "differs from what the old code made of them, or they take longer than the input allows, the upgrade is "
        "refused. 0: they are not compared.",
    ] = 3
    hand_over_timeout_ms: Annotated[
        int | None,
        "HAND_OVER: time for the run of the new code to be launched, to compare and to take over. After that the "
        "upgrade is refused, and the old code continues; null: no limit. Default: an hour.",
    ] = 60 * 60_000
    stop_timeout_ms: Annotated[
        int | None,
        "Time for a stream to answer a stop, suspend or cancel request and to end. After that the upgrade is aborted "
        "and an alert is raised. Set it longer than the checkpoint timeout; null: no limit. Default: half an hour.",
    ] = 30 * 60_000

    @property
    def observes(self) -> bool:
        """Whether code that works is observed until `rollback_after_ms` is over."""
        return self.rollback_if_restarted or self.rollback_if_unhealthy

    def __post_init__(self) -> None:
        conform_fields(self)
        if self.observes and self.rollback_after_ms is None:
            raise OptionError(
                "UpgradePolicy: rollback_if_restarted and rollback_if_unhealthy need rollback_after_ms, the time for "
                "which the new code is observed."
            )
        if self.verify_batches < 0:
            raise OptionError(
                f"UpgradePolicy: verify_batches is {self.verify_batches}, but must be 0 or a number of batches."
            )
        for name in ("max_checkpoint_age_ms", "rollback_after_ms", "hand_over_timeout_ms", "stop_timeout_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise OptionError(
                    f"UpgradePolicy: {name} is {value}, but must be a positive number of milliseconds. "
                    "Leave it out to have no limit."
                )
