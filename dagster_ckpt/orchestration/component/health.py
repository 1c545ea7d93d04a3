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
    failures_to_warn: int = Field(default=1, description="Failed checkpoints in a row that warn.")
    failures_to_fail: int = Field(default=3, description="Failed checkpoints in a row that are an error.")
    max_verification_age_ms: int = Field(
        default=2 * DAY_MS, description="The last verification of a snapshot may be so old. Default: two days."
    )
    size_growth_factor: float = Field(
        default=2.0, description="A snapshot so many times as large as at the begin of the window warns."
    )
    size_window_ms: int = Field(default=DAY_MS, description="That window. Default: a day.")
    size_floor_bytes: int = Field(
        default=64 * 1024 * 1024, description="Smaller snapshots may grow as they like. Default: 64 MiB."
    )
    max_snapshot_bytes: int | None = Field(
        default=None, description="A larger snapshot is an error. Default: any size."
    )
    max_stall_ms: int = Field(
        default=10 * 60_000,
        description="A query that makes no batch and does not rest for so long is an error; a warning where tasks of "
        "its batch run. Default: ten minutes.",
    )
    loop_failures: int = Field(
        default=3,
        description="A stream whose run failed this often within loop_window_ms and since its newest snapshot restarts "
        "in a loop: an error.",
    )
    loop_window_ms: int = Field(default=HOUR_MS, description="That window. Default: an hour.")
    max_catch_up_ms: int = Field(
        default=10 * 60_000,
        description="Source lag: a backlog that takes longer, at the speed of the last batch, warns. Default: ten "
        "minutes.",
    )
    source_retention_ms: int | None = Field(
        default=None,
        description="How long the sources keep what they had, where they do not tell (Kafka's retention.ms).",
    )
    file_max_age_ms: int = Field(
        default=7 * DAY_MS,
        description="maxFileAge of file sources: older files are not read again. Default: seven days.",
    )
    retention_margin_ms: int = Field(
        default=6 * HOUR_MS,
        description="A restore point that leaves the sources' retention within this time warns. Default: six hours.",
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
