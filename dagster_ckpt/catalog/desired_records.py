"""What the catalog records of a managed job: what it is meant to be, and how far an upgrade is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.options import DesiredState, UpgradeMode


class UpgradePhase(StrEnum):
    """Where an upgrade is.

    PREFLIGHT → STOPPING → STARTING → UPGRADING → STABLE, or from UPGRADING → ROLLING_BACK → RESTORING → ROLLED_BACK.
    PREFLIGHT and STOPPING can end in REFUSED: nothing was changed. RESTORING can end in ROLLBACK_FAILED.
    """

    PREFLIGHT = "PREFLIGHT"
    STOPPING = "STOPPING"
    STARTING = "STARTING"
    UPGRADING = "UPGRADING"
    ROLLING_BACK = "ROLLING_BACK"
    RESTORING = "RESTORING"
    STABLE = "STABLE"
    REFUSED = "REFUSED"
    ROLLED_BACK = "ROLLED_BACK"
    ROLLBACK_FAILED = "ROLLBACK_FAILED"

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do for the upgrade."""
        return self in _OVER

    @property
    def refuses(self) -> bool:
        """Whether the upgrade's code version is not started again by itself."""
        return self.is_over and self is not UpgradePhase.STABLE

    @property
    def goes_back(self) -> bool:
        """Whether a rollback is under way, which has to be finished whatever else is wanted."""
        return self in (UpgradePhase.ROLLING_BACK, UpgradePhase.RESTORING)


_OVER = (UpgradePhase.STABLE, UpgradePhase.REFUSED, UpgradePhase.ROLLED_BACK, UpgradePhase.ROLLBACK_FAILED)


@dataclass(frozen=True)
class UpgradeRecord:
    """One upgrade.

    Attributes:
        phase: How far it is.
        from_version: Code version that ran before, where known.
        to_version: Code version it goes to.
        mode: What the new code starts from.
        began_at_ms: When it was begun.
        reason: How it came to this phase.
        old_execution_id: The newest execution before the new code was started.
        starts: How often a start was asked for.
        started_at_ms: When the first execution of the new code began.
        image_id: The image that a rollback goes back to.
    """

    phase: UpgradePhase
    from_version: str | None
    to_version: str | None
    mode: UpgradeMode
    began_at_ms: int
    reason: str
    old_execution_id: str | None = None
    starts: int = 0
    started_at_ms: int | None = None
    image_id: str | None = None


@dataclass(frozen=True)
class PreflightRecord:
    """What came of running new code on a copy of a job's state.

    Attributes:
        code_version: Version of the code that was tried.
        passed: Whether a running job may be stopped for it.
        reason: What happened, for a person.
        batch_id: The batch that was run, None where none could be.
        at_ms: When it ended.
        refused_plan: Fingerprint of the plan, where a person has to accept what is different in it.
    """

    code_version: str | None
    passed: bool
    reason: str
    batch_id: int | None
    at_ms: int
    refused_plan: str | None = None


@dataclass(frozen=True)
class DesiredRecord:
    """A managed job.

    Attributes:
        job_id: The job.
        desired: What was last asked for; None leaves it to the asset's definition.
        generation: Rises with each change of what is wanted and with each upgrade.
        reached: The generation that the world was last brought to.
        request_id: The request that the sensor itself made last for this job.
        upgrade: The last upgrade, also when it is over.
        preflight: The last preflight.
        alert: What a person has to know, until it is resolved.
        origin: Who changed it last.
        changed_at_ms: When what is wanted was last changed.
        broken: Why the row could not be read as it is, or None; nothing is done for such a job.
    """

    job_id: str
    desired: DesiredState | None
    generation: int
    reached: int
    request_id: str | None
    upgrade: UpgradeRecord | None
    preflight: PreflightRecord | None
    alert: str | None
    origin: str
    changed_at_ms: int
    updated_at_ms: int
    broken: str | None = None
