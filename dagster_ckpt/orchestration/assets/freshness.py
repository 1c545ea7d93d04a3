"""The freshness policy that a streaming asset has unless it is given another."""

from __future__ import annotations

from datetime import timedelta

import dagster as dg

from dagster_ckpt.config.checkpoint_options import CheckpointOptions

# Reports come once a minute (`build_catalog_sensor`), and Dagster takes no shorter window.
SHORTEST_MS = 60_000
_INTERVALS_TO_WARN = 3
_INTERVALS_TO_FAIL = 6


def default_freshness(options: CheckpointOptions) -> dg.FreshnessPolicy | None:
    """Fresh while checkpoints come: warns after three intervals without one, fails after six; of a minute at least.

    Dagster judges by materializations, which the catalog sensor reports at most once a minute. Without periodic
    checkpoints there is no policy: nobody could say when the next one is due.

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
