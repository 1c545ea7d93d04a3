"""The time that a stream's time-dependent operations go by, as a column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.options import TimeCharacteristic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def with_time(frame: DataFrame, characteristic: TimeCharacteristic, column: str, delay: str) -> DataFrame:
    """Give a stream the column that its windows and timers go by.

    Ingestion and processing time are Spark's `current_timestamp()`: one time a batch, which Spark writes into the
    offset log, so that a replayed batch has it again.

    Args:
        frame: The stream, as its source gives it.
        characteristic: Event time takes the column that is there; the others put theirs in its place.
        column: Name of the column.
        delay: How late rows may be, such as "10 minutes". Processing time has no late rows, and no watermark.
    """
    # Imported here: whoever only reads live directories needs no Spark.
    from pyspark.sql import functions as F  # noqa: PLC0415

    if characteristic is TimeCharacteristic.EventTime:
        return frame.withWatermark(column, delay)
    stamped = frame.withColumn(column, F.current_timestamp())
    return stamped if characteristic is TimeCharacteristic.ProcessingTime else stamped.withWatermark(column, delay)
