"""Whether a run has a time limit: one that has shows CANCELING also where nobody cancelled it."""

from collections.abc import Mapping

import dagster as dg


def has_time_limit(instance: dg.DagsterInstance, tags: Mapping[str, str]) -> bool:
    """Whether Dagster's monitoring ends a run with these tags after some time."""
    tag = tags.get("dagster/max_runtime")
    limit = float(tag) if tag else float(instance.run_monitoring_max_runtime_seconds)
    return limit > 0
