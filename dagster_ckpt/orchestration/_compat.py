"""The few names of Dagster that are not public, in one place and under one test.

Interrupts: Dagster raises `DagsterExecutionInterruptedError` in the main thread. If that lands inside
a py4j call, the reply stays on the socket and the next call hangs or reads the wrong answer. A
streaming step therefore captures interrupts and looks at a flag between short waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._check import CheckError
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.errors import DagsterExecutionInterruptedError
from dagster._core.events import AssetMaterializationPlannedData
from dagster._core.instance.utils import RUNLESS_JOB_NAME, RUNLESS_RUN_ID
from dagster._utils.interrupts import capture_interrupts, check_captured_interrupt

__all__ = [
    "BaseAssetGraph",
    "DagsterExecutionInterruptedError",
    "LatestEvaluation",
    "UnresolvedAssetJobDefinition",
    "asset_graph_of",
    "capture_interrupts",
    "check_captured_interrupt",
    "latest_check_evaluations",
    "plan_outside_runs",
]


@dataclass(frozen=True)
class LatestEvaluation:
    """The newest evaluation of an asset check.

    Attributes:
        at_s: When it was stored, seconds since the epoch.
        metadata: What it says.
    """

    at_s: float
    metadata: Mapping[str, dg.MetadataValue]

    def verdict(self, key: str) -> object:
        """The value of a metadata entry, or None."""
        entry = self.metadata.get(key)
        return entry.value if entry is not None else None


def asset_graph_of(context: dg.OpExecutionContext) -> BaseAssetGraph[Any] | None:
    """The assets of the code location that a run belongs to; None for a job that belongs to none, as in a notebook."""
    try:
        return context.repository_def.asset_graph
    except CheckError:
        return None


def latest_check_evaluations(
    instance: dg.DagsterInstance, keys: Sequence[dg.AssetCheckKey]
) -> dict[dg.AssetCheckKey, LatestEvaluation]:
    """The newest evaluation of each of these checks; one query. The public method asks for one check at a time."""
    if not keys:
        return {}
    found = {}
    for key, record in instance.event_log_storage.get_latest_asset_check_execution_by_key(keys).items():
        # Of a check that a run has yet to evaluate it is, against its type, what says that it is planned.
        evaluation: object = record.evaluation
        if isinstance(evaluation, dg.AssetCheckEvaluation):
            found[key] = LatestEvaluation(record.create_timestamp, evaluation.metadata)
    return found


def plan_outside_runs(instance: dg.DagsterInstance, keys: Iterable[dg.AssetKey]) -> None:
    """Make the newest materialization that is planned of each asset one of no run.

    To `AutomationCondition` an asset is in progress from the moment when a run is launched for it until that same run
    has materialized it, and `eager()` starts nothing downstream meanwhile. A stream's run goes on for weeks, and its
    checkpoints are reported outside of it, as events of no run. So is what is planned of it, then.
    """
    for key in keys:
        event = dg.DagsterEvent(
            event_type_value=dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value,
            job_name=RUNLESS_JOB_NAME,
            message=f"Checkpoints of {key.to_user_string()} are reported as they come.",
            event_specific_data=AssetMaterializationPlannedData(asset_key=key),
        )
        instance.report_dagster_event(event, run_id=RUNLESS_RUN_ID, log_level=logging.DEBUG)
