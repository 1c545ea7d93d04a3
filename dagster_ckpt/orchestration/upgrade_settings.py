"""How a stream goes over to another code version, as Dagster config: the same options as `UpgradePolicy`."""

from __future__ import annotations

from enum import Enum

import dagster as dg
from pydantic import Field

from dagster_ckpt.options import UpgradeMode, UpgradePolicy


class UpgradeModeKind(Enum):
    """The upgrade modes. Dagster's config knows members by name, other YAML by value: they are the same."""

    STATELESS = "STATELESS"
    LAST_STATE = "LAST_STATE"
    SAVEPOINT = "SAVEPOINT"


class UpgradeSettings(dg.Config):
    """Every option of `UpgradePolicy`; durations are milliseconds.

    Example:
        >>> UpgradeSettings.model_validate({"mode": "LAST_STATE"}).upgrade_policy().preflight
        True
    """

    mode: UpgradeModeKind = Field(
        default=UpgradeModeKind.SAVEPOINT,
        description="STATELESS: give up all state. LAST_STATE: go on where the old code stopped. SAVEPOINT: the same, "
        "after a stop with a savepoint.",
    )
    max_checkpoint_age_ms: int | None = Field(
        default=None,
        description="LAST_STATE: where the newest image of a running stream is older, it is stopped with a savepoint "
        "instead. Default: no bound.",
    )
    rollback_after_ms: int | None = Field(
        default=None,
        description="The new code has so long to commit a batch or complete a checkpoint; else it is stopped and the "
        "stream brought back to where the old code stopped. Default: off.",
    )
    preflight: bool = Field(
        default=True,
        description="Before the stream is stopped, run the new code for one batch on a copy of its state.",
    )
    stop_timeout_ms: int | None = Field(
        default=30 * 60_000,
        description="A stream that was asked to stop, also to be suspended or cancelled, has so long to answer and to "
        "end; then an upgrade is given up, and people are told. Longer than the checkpoint timeout; null: no limit. "
        "Default: half an hour.",
    )

    def upgrade_policy(self) -> UpgradePolicy:
        """The policy.

        Raises:
            OptionError: A duration is not positive.
        """
        return UpgradePolicy(
            UpgradeMode(self.mode.value),
            self.max_checkpoint_age_ms,
            self.rollback_after_ms,
            self.preflight,
            self.stop_timeout_ms,
        )
