"""Upgrade policy: how a running stream moves to a new version of its code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.errors import OptionError


class UpgradeMode(StrEnum):
    """What the new code starts from, like `job.upgradeMode` of the Flink Kubernetes Operator.

    STATELESS: Empty state: all state is discarded, and sinks that support it are rolled back.
    LAST_STATE: The live directory where the old code stopped, or the newest snapshot if there is no
        live directory. Works for a failing stream too.
    SAVEPOINT: The same, after the old code was stopped with a savepoint, to which a rollback
        returns.

    Example:
        >>> UpgradePolicy(mode=UpgradeMode.LAST_STATE)
    """

    STATELESS = "STATELESS"
    LAST_STATE = "LAST_STATE"
    SAVEPOINT = "SAVEPOINT"


@dataclass(frozen=True)
class UpgradePolicy:
    """What to do when the code version of a managed stream differs from the one that it was started with.

    Attributes:
        mode: What the new code starts from.
        max_checkpoint_age_ms: With LAST_STATE: a stream that has been running for longer than this, and whose newest
            snapshot is older, is stopped with a savepoint instead. None means no limit
            (`kubernetes.operator.job.upgrade.last-state.max.allowed.checkpoint.age`).
        rollback_after_ms: Time within which the new code must commit a batch or complete a checkpoint. Otherwise the
            stream is rolled back to where the old code stopped. None leaves failures to the restart strategy, like
            `kubernetes.operator.deployment.rollback.enabled`.
        preflight: Before the stream is stopped, run the new code for one batch on a copy of its
            state, without output.
        stop_timeout_ms: Maximum time for a stream to answer any stop, suspend or cancel request and to end. After that
            an upgrade is aborted, and a message says what to do. A savepoint has to fit into it. None means no limit.

    Example:
        >>> UpgradePolicy(UpgradeMode.LAST_STATE, max_checkpoint_age_ms=600_000).preflight
        True
    """

    mode: UpgradeMode = UpgradeMode.SAVEPOINT
    max_checkpoint_age_ms: int | None = None
    rollback_after_ms: int | None = None
    preflight: bool = True
    stop_timeout_ms: int | None = 30 * 60_000

    def __post_init__(self) -> None:
        """Validate the durations."""
        for name in ("max_checkpoint_age_ms", "rollback_after_ms", "stop_timeout_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise OptionError(
                    f"UpgradePolicy: {name} is {value}, but must be a positive number of milliseconds. "
                    "Leave it out to have no limit."
                )
