"""The output of a described query before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.query.description import described_field

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# Spark's format for `foreachBatch`, and its name for every such sink.
FOREACH_BATCH = "foreachbatch"
_FOREACH_BATCH_SINK = "ForeachBatchSink"


@dataclass(frozen=True)
class NamedOutput:
    """The output location of a described query.

    Attributes:
        format: Format of its sink, such as `parquet` or `kafka`.
        place: Its folder, topic or table, or None.
        sink: Spark's name for the sink, if it is known already.
    """

    format: str
    place: str | None
    sink: str | None = None

    def is_same(self, other: NamedOutput) -> bool:
        """Whether both write to the same location."""
        if self.place is None or other.place is None or self.format != other.format:
            return False
        return same_folder(self.place, other.place)


def named_output(writer: DataStreamWriter) -> NamedOutput | None:
    """The output location of a described query.

    `foreachBatch` has no location of its own; the option `path` or `table` names it.

    Returns:
        None for Spark Connect, whose writer cannot be inspected.
    """
    described: Any = getattr(writer, "_jwrite", None)
    if described is None:
        return None
    options = described_field(described, "extraOptions")
    places = (options.get(name) for name in ("path", "topic", "table"))
    return NamedOutput(
        str(described_field(described, "source")).lower(),
        next((str(place.get()) for place in places if place.isDefined()), None),
    )


def foreach_batch_name(place: str) -> str:
    """The name of a `foreachBatch` sink whose writer says where it writes."""
    return f"{_FOREACH_BATCH_SINK}[{place}]"


def qualified(sink: str, output: NamedOutput | None) -> str:
    """Spark's name for a sink of a query, with the place where the query writes if the name lacks it.

    Args:
        sink: `sink.description` of the query's progress.
        output: Where the query writes; None if unknown.
    """
    if sink != _FOREACH_BATCH_SINK or output is None or output.format != FOREACH_BATCH or output.place is None:
        return sink
    return foreach_batch_name(output.place)
