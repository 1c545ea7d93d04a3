"""Thresholds of the health checks."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_ckpt.errors import OptionError

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@dataclass(frozen=True)
class HealthSettings:
    """Thresholds of the health checks.

    Attributes:
        max_checkpoint_age_ms: Recovery point objective: maximum age of the newest snapshot; half of it
            warns. None: the rule of the Flink Kubernetes Operator, max(interval, timeout) x (tolerable
            failures + 2). It warns after (tolerable failures + 2) intervals plus the duration of the
            slowest of the last checkpoints. With periodic checkpoints off, any age passes.
        failures_to_warn: Consecutive failed attempts that warn.
        failures_to_fail: Consecutive failed attempts that are an error.
        max_verification_age_ms: Maximum age of the last verification of a snapshot.
        size_growth_factor: Growth factor of the snapshot size within the window that warns.
        size_window_ms: That window.
        size_floor_bytes: Growth of smaller snapshots is ignored.
        max_snapshot_bytes: A larger snapshot is an error; None for any size.
        max_stall_ms: A query that completes no batch and is not idle for this long is an error; a
            warning if tasks of its batch are running.
        loop_failures: A stream whose run failed this often since its newest snapshot, within
            `loop_window_ms`, restarts in a loop: an error.
        loop_window_ms: That window.
        max_catch_up_ms: A backlog that takes longer to process, at the speed of the last batch, warns.
        source_retention_ms: How long the sources retain data, if they do not report it (Kafka's
            `retention.ms`).
        file_max_age_ms: `maxFileAge` of file sources, 7 days: older files are not read again.
        retention_margin_ms: A restore point that leaves the sources' retention within this time warns.

    Raises:
        OptionError: A threshold is not positive, or warns after it fails.
    """

    max_checkpoint_age_ms: int | None = None
    failures_to_warn: int = 1
    failures_to_fail: int = 3
    max_verification_age_ms: int = 2 * DAY_MS
    size_growth_factor: float = 2.0
    size_window_ms: int = DAY_MS
    size_floor_bytes: int = 64 * 1024 * 1024
    max_snapshot_bytes: int | None = None
    max_stall_ms: int = 10 * 60_000
    loop_failures: int = 3
    loop_window_ms: int = HOUR_MS
    max_catch_up_ms: int = 10 * 60_000
    source_retention_ms: int | None = None
    file_max_age_ms: int = 7 * DAY_MS
    retention_margin_ms: int = 6 * HOUR_MS

    def __post_init__(self) -> None:
        """Validate the thresholds."""
        for name, value in vars(self).items():
            if value is not None and value < 0:
                raise OptionError(f"HealthSettings: {name} is {value}, but must not be negative. Give a larger one.")
        if self.loop_failures < 1:
            raise OptionError(f"HealthSettings: loop_failures is {self.loop_failures}, but must be at least 1.")
        if not 1 <= self.failures_to_warn <= self.failures_to_fail:
            raise OptionError(
                f"HealthSettings: failures_to_warn is {self.failures_to_warn} and failures_to_fail is "
                f"{self.failures_to_fail}. Warn from 1 on, and not after it is an error."
            )
