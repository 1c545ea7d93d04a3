"""The default freshness policy of a streaming asset."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

from dagster_ckpt.config.checkpoint_options import CheckpointOptions

# `build_catalog_sensor` reports once a minute, and Dagster accepts no shorter window.
SHORTEST_MS = 60_000
_INTERVALS_TO_WARN = 3
_INTERVALS_TO_FAIL = 6


def default_freshness(options: CheckpointOptions) -> dg.FreshnessPolicy | None:
    """Freshness by checkpoints: warn after three intervals without one, fail after six.

    An interval counts as at least one minute: Dagster judges by materializations, and the catalog
    sensor reports at most one a minute. Without periodic checkpoints there is no policy, because
    the next one has no due time.

    Example:
        >>> default_freshness(CheckpointConfig(interval=600_000).options).fail_window
        datetime.timedelta(seconds=3600)
    """
    if options.interval_ms is None:
        return None
    interval_ms = max(options.interval_ms + options.min_pause_ms, SHORTEST_MS)
    return dg.FreshnessPolicy.time_window(
        fail_window=timedelta(milliseconds=_INTERVALS_TO_FAIL * interval_ms),
        warn_window=timedelta(milliseconds=_INTERVALS_TO_WARN * interval_ms),
    )
