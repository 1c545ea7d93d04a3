"""What is known of a query: its execution mode, and how many operators keep state.

A directory cannot prove that its query keeps no state: a lost folder `state` looks the same. Catalog and newest
snapshot can.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from dagster_ckpt.errors import IncompleteCutError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.layout import STATE
from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry
from dagster_ckpt.spark.query.plan import PlanDescription, read_plan


class ExecutionMode(StrEnum):
    """How Spark executes a query; triggers that only time micro-batches are all MICRO_BATCH.

    ASYNC_PROGRESS writes offsets and commits periodically in the background. CONTINUOUS has long-running tasks with
    epochs. The offsets of a REAL_TIME batch are known only at its end.
    """

    MICRO_BATCH = "MICRO_BATCH"
    ASYNC_PROGRESS = "ASYNC_PROGRESS"
    CONTINUOUS = "CONTINUOUS"
    REAL_TIME = "REAL_TIME"


def mode_in_logs(committed: OffsetEntry, before: OffsetEntry | None) -> ExecutionMode:
    """Real-time queries and asynchronous tracking without a gap look like micro-batches.

    Only the running query tells (`SupervisedQuery.facts`).
    """
    if committed.continuous:
        return ExecutionMode.CONTINUOUS
    if before is not None and before.batch_id < committed.batch_id - 1:
        return ExecutionMode.ASYNC_PROGRESS
    return ExecutionMode.MICRO_BATCH


def mode_of_execution(execution_class: str, trigger_class: str) -> ExecutionMode:
    if trigger_class == "RealTimeTrigger":
        return ExecutionMode.REAL_TIME
    if execution_class == "ContinuousExecution":
        return ExecutionMode.CONTINUOUS
    if execution_class == "AsyncProgressTrackingMicroBatchExecution":
        return ExecutionMode.ASYNC_PROGRESS
    return ExecutionMode.MICRO_BATCH


# A watermark keeps no state, and Spark removes some limits.
_MAY_KEEP_NONE = {"EventTimeWatermark", "GlobalLimit"}


@dataclass(frozen=True)
class KnownQuery:
    """`operators` is the least number of those that keep state; `mode` is the last one, if known."""

    operators: int = 0
    mode: ExecutionMode | None = None

    @staticmethod
    def of(plan: object, properties: Mapping[str, Any] | None = None) -> KnownQuery:
        noted = properties or {}
        is_same = not plan or not noted.get("plan") or noted["plan"] == plan
        listed = noted.get("state_operators")
        counted = len(listed) if is_same and isinstance(listed, list) else 0
        described = read_plan(plan) if plan else None
        mode = noted.get("mode")
        known_mode = ExecutionMode(mode) if mode in list(ExecutionMode) else None
        return KnownQuery(max(counted, int(described is not None and keeps_state(described))), known_mode)

    def is_asynchronous(self, offsets: Sequence[int], commits: Sequence[int]) -> bool:
        """Asynchronous progress tracking, which leaves gaps in the logs, is proven.

        Either a running query reported it, or both logs lack the same batch below the newest commit.
        """
        between = range(min(commits, default=0), max(commits, default=0))
        return self.mode is ExecutionMode.ASYNC_PROGRESS or bool({*between} - {*offsets} - {*commits})

    def check_operators(self, folder: FileIO, found: Collection[int], committed: Collection[int]) -> None:
        """A directory with a commit must have the state of every known operator.

        `committed` are the operators that the commit names; empty in checkpoint format v1.
        """
        missing = sorted({*range(self.operators), *committed} - {*found})
        if missing:
            why = "the newest commit names it" if missing[0] in committed else "its query is known to keep state there"
        elif not found and STATE in folder.list():
            missing, why = [0], f"{STATE} is empty, and Spark creates this folder only for a query that keeps state"
        if missing:
            raise IncompleteCutError(
                f"{folder.url}/{STATE}/{missing[0]} is missing: {why}. The live directory is damaged: restore a "
                "snapshot."
            )


NOTHING_KNOWN = KnownQuery()


def keeps_state(plan: PlanDescription) -> bool:
    return any(operator.kind not in _MAY_KEEP_NONE for operator in plan.operators)
