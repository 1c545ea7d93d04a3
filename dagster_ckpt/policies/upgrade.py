"""How a running stream goes over to another version of its code."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.errors import OptionError


class UpgradeMode(StrEnum):
    """What the new code starts from, as `job.upgradeMode` of the Flink Kubernetes Operator.

    STATELESS: Nothing: all state is given up, and what can be rolled back is.
    LAST_STATE: The live directory, where the old code stopped; without it the newest snapshot. Works for a stream that
        fails.
    SAVEPOINT: The same, after the old code was stopped with a savepoint, which is what a rollback goes back to.
    """

    STATELESS = "STATELESS"
    LAST_STATE = "LAST_STATE"
    SAVEPOINT = "SAVEPOINT"


@dataclass(frozen=True)
class UpgradePolicy:
    """What is done where the code version of a managed stream is another one than it was started with.

    `stop_timeout_ms` holds for every stop of a managed stream, also to suspend or cancel it.

    Attributes:
        mode: What the new code starts from.
        max_checkpoint_age_ms: With LAST_STATE: where the newest snapshot of a running stream is older, and the stream
            runs for
            longer than that, it is stopped with a savepoint instead. None: however old. Source and name:
            `kubernetes.operator.job.upgrade.last-state.max.allowed.checkpoint.age`.
        rollback_after_ms: The new code has so long, from its start, to commit a batch or complete a checkpoint;
            else it is stopped and the stream is brought back to where the old code stopped. None: it is left to the
            restart strategy. Off by default, as `kubernetes.operator.deployment.rollback.enabled`.
        preflight: Before the stream is stopped, run the new code for one batch on a copy of its state, without output.
        stop_timeout_ms: A stream that was asked to stop has so long to answer and to end, half an hour by default. Then
            an upgrade is given up and the stream left as it is; in every case people are told what was found and what
            to do. A savepoint has to fit into it: make it longer than the checkpoint timeout. None: however long.

    Raises:
        OptionError: A duration is not positive.

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
        """Check the durations."""
        for name in ("max_checkpoint_age_ms", "rollback_after_ms", "stop_timeout_ms"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise OptionError(
                    f"UpgradePolicy: {name} is {value}, but must be a positive number of milliseconds. "
                    "Leave it out to have no limit."
                )
