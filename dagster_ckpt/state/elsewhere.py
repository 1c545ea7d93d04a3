"""State that another Spark reads, for a session whose Spark has no reader of state (3.5, and 4.0 for format v2).

The rewriter's process writes the rows as Parquet, which the session reads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import UnsupportedSparkError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.state.reading import StateFrame, StateKind, StateName, StateReader, storable
from dagster_ckpt.state.rewriter import Rewriter, ask, settings_of
from dagster_ckpt.state.stopped_state import readable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Report = Callable[[str], None]
_LOG = logging.getLogger(__name__)
_ADVICE = (
    "A newer Spark reads it for this one, if it is on a disk of this machine: run `dagster-ckpt rewriter install` once."
)


class StateElsewhere(StateReader):
    """From Parquet files; their folder must exist while frames are computed."""

    def __init__(
        self, spark: SparkSession, live: LiveDirectory, batch_id: int, places: Mapping[StateName, tuple[StateKind, str]]
    ) -> None:
        self.live, self.batch_id, self.format_version = live, batch_id, 1
        self._spark, self._places = spark, places

    @cached_property
    def states(self) -> tuple[StateName, ...]:
        return tuple(self._places)

    def frame(self, name: StateName) -> StateFrame:
        kind, place = self._places[name]
        return StateFrame(name, kind, self._spark.read.parquet(f"file://{place}"))


@contextmanager
def readers_of(
    spark: SparkSession, live: LiveDirectory, batch_ids: Sequence[int], report: Report = _LOG.info
) -> Iterator[dict[int, StateReader]]:
    """By the session, or by the rewriter, of a directory that no query uses; UnsupportedSparkError if neither can.

    For the rewriter the directory must be on a local disk: another Spark would need other jars for an object store.
    """
    try:
        readers = {each: StateReader(spark, live, each) for each in batch_ids}
    except UnsupportedSparkError as error:
        rewriter = Rewriter.find()
        if rewriter is None or live.local_path is None:
            raise UnsupportedSparkError(f"{error} {_ADVICE}") from error
        report("another Spark reads the state")
        with TemporaryDirectory(prefix="dagster-ckpt-state-") as folder:
            settings = settings_of(spark)
            order = {"read": live.url, "batches": list(batch_ids), "folder": folder, "settings": settings}
            yield _read(rewriter, order, spark, live, report)
        return
    yield readers


def _read(
    rewriter: Rewriter, order: Mapping[str, Any], spark: SparkSession, live: LiveDirectory, report: Report
) -> dict[int, StateReader]:
    places: dict[int, dict[StateName, tuple[StateKind, str]]] = {batch_id: {} for batch_id in order["batches"]}
    for batch_id, operator_id, operator, state, partitions, kind, place in ask(rewriter, order, no_op, report)[
        "states"
    ]:
        places[batch_id][StateName(operator_id, operator, state, partitions)] = (StateKind(kind), place)
    return {batch_id: StateElsewhere(spark, live, batch_id, found) for batch_id, found in places.items()}


def states_written(spark: SparkSession, order: Mapping[str, Any]) -> dict[str, object]:
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
