"""The few names of Dagster that are not public, in one place and under one test.

Interrupts: Dagster raises `DagsterExecutionInterruptedError` in the main thread. If that lands inside
a py4j call, the reply stays on the socket and the next call hangs or reads the wrong answer. A
streaming step therefore captures interrupts and looks at a flag between short waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._check import CheckError
from dagster._core.definitions.assets.graph.base_asset_graph import BaseAssetGraph
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from dagster._core.errors import DagsterExecutionInterruptedError
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
        evaluation = record.evaluation
        if evaluation is not None:
            found[key] = LatestEvaluation(record.create_timestamp, evaluation.metadata)
    return found
