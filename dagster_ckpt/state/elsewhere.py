"""State that another Spark has read, for a session whose Spark has no reader of state (3.5, and 4.0 for format v2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state.other_spark import Rewriter, read_elsewhere, settings_of
from dagster_ckpt.state.reading import StateFrame, StateKind, StateName, StateReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class StateElsewhere(StateReader):
    """The state of a query after a batch, from Parquet files; their folder must exist while frames are computed."""

    def __init__(
        self, spark: SparkSession, live: LiveDirectory, batch_id: int, places: Mapping[StateName, tuple[StateKind, str]]
    ) -> None:
        self.live, self.batch_id, self.format_version = live, batch_id, 1
        self._spark, self._places = spark, places

    @cached_property
    def states(self) -> tuple[StateName, ...]:
        """In the operators' order."""
        return tuple(self._places)

    def frame(self, name: StateName) -> StateFrame:
        """The rows of one of `states`."""
        kind, place = self._places[name]
        return StateFrame(name, kind, self._spark.read.parquet(f"file://{place}"))


def states_elsewhere(
    rewriter: Rewriter,
    spark: SparkSession,
    live: LiveDirectory,
    batch_ids: Sequence[int],
    folder: str,
    *,
    report: Callable[[str], None],
) -> dict[int, StateReader]:
    """The state after each of some batches, read by another Spark into a folder of this machine."""
    places: dict[int, dict[StateName, tuple[StateKind, str]]] = {batch_id: {} for batch_id in batch_ids}
    for each in read_elsewhere(rewriter, live, batch_ids, folder, settings=settings_of(spark), report=report):
        name = StateName(each.operator_id, each.operator, each.state, each.partitions)
        places[each.batch_id][name] = (StateKind(each.kind), each.place)
    return {batch_id: StateElsewhere(spark, live, batch_id, found) for batch_id, found in places.items()}
