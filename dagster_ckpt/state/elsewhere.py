"""State that another Spark reads, for a session whose Spark has no reader of state (3.5, and 4.0 for format v2).

The rewriter's process writes the rows as Parquet, which the session reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state.reading import StateFrame, StateKind, StateName, StateReader, storable
from dagster_ckpt.state.rewriter import Rewriter, ask, settings_of
from dagster_ckpt.state.stopped_state import readable

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
    """The state after some batches of a directory that no query uses, read by the rewriter.

    Directory and folder must be on a local disk: another Spark would need other jars for an object store.
    """
    order = {"read": live.url, "batches": list(batch_ids), "folder": folder, "settings": settings_of(spark)}
    places: dict[int, dict[StateName, tuple[StateKind, str]]] = {batch_id: {} for batch_id in batch_ids}
    for batch_id, operator_id, operator, state, partitions, kind, place in ask(rewriter, order, no_op, report)[
        "states"
    ]:
        places[batch_id][StateName(operator_id, operator, state, partitions)] = (StateKind(kind), place)
    return {batch_id: StateElsewhere(spark, live, batch_id, found) for batch_id, found in places.items()}


def states_written(spark: SparkSession, order: Mapping[str, Any]) -> dict[str, object]:
    """The rewriter's part: carry out an order to read."""
    live, found = LiveDirectory(order["read"]), []
    for batch_id in order["batches"]:
        with readable(live, batch_id) as copy:
            reader = StateReader(spark, copy, batch_id)
            for number, name in enumerate(reader.states):
                frame, place = reader.frame(name), f"{order['folder']}/{batch_id}/{number}"
                storable(frame.rows).write.parquet(place)
                found.append(
                    [batch_id, name.operator_id, name.operator, name.state, name.partitions, frame.kind.value, place]
                )
    return {"states": found}
