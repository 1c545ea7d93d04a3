"""The thresholds of a stream's health checks in YAML."""

from typing import Self

import dagster as dg
from pydantic import Field, model_validator

from dagster_ckpt.operations.health_settings import DAY_MS, HOUR_MS, HealthSettings


class Health(dg.Model):
    """The thresholds of `HealthSettings`, under the same names."""

    max_checkpoint_age_ms: int | None = Field(
        default=None,
        description="Recovery point objective: the newest snapshot may be so old; half of it warns. Default: "
        "max(interval, timeout) x (tolerable failures + 2), and it warns after (tolerable failures + 2) intervals plus "
        "the slowest of the last checkpoints.",
    )
    failures_to_warn: int = Field(
        default=1, description="Number of consecutive failed checkpoints that cause a warning."
    )
    failures_to_fail: int = Field(
        default=3, description="Number of consecutive failed checkpoints that cause an error."
    )
    max_verification_age_ms: int = Field(
        default=2 * DAY_MS, description="Maximum age of the last verification of a snapshot. Default: two days."
    )
    size_growth_factor: float = Field(
        default=2.0, description="Warn if a snapshot has grown by this factor since the start of the window."
    )
    size_window_ms: int = Field(
        default=DAY_MS, description="Length of the window for size_growth_factor. Default: a day."
    )
    size_floor_bytes: int = Field(
        default=64 * 1024 * 1024, description="Snapshots smaller than this are not checked for growth. Default: 64 MiB."
    )
    max_snapshot_bytes: int | None = Field(
        default=None, description="Maximum size of a snapshot; a larger one is an error. Default: no limit."
    )
    max_stall_ms: int = Field(
        default=10 * 60_000,
        description="Time without progress after which a query that is not idle is an error, or a warning while "
        "tasks of its batch are running. Default: ten minutes.",
    )
    loop_failures: int = Field(
        default=3,
        description="Number of failed runs, within loop_window_ms and since the newest snapshot, that count as a "
        "restart loop: an error.",
    )
    loop_window_ms: int = Field(
        default=HOUR_MS, description="Length of the window for loop_failures. Default: an hour."
    )
    max_catch_up_ms: int = Field(
        default=10 * 60_000,
        description="Source lag: warn if processing the backlog at the speed of the last batch takes longer than "
        "this. Default: ten minutes.",
    )
    source_retention_ms: int | None = Field(
        default=None,
        description="Retention of sources that do not report it (Kafka's retention.ms).",
    )
    file_max_age_ms: int = Field(
        default=7 * DAY_MS,
        description="maxFileAge of file sources: older files are not read again. Default: seven days.",
    )
    retention_margin_ms: int = Field(
        default=6 * HOUR_MS,
        description="Warn if records that a recovery would re-read leave the sources' retention within this time. "
        "Default: six hours.",
    )

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        self.settings()
        return self

    def settings(self) -> HealthSettings:
        """The thresholds for `stream_definitions`.

        Raises:
            OptionError: A threshold is not valid.
        """
        return HealthSettings(**self.model_dump())
