"""A streaming query in YAML."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, Self

import dagster as dg
from pydantic import Field, field_validator, model_validator

from dagster_ckpt.orchestration.component.yaml_fields import Scalar, with_env_vars, with_values
from dagster_ckpt.spark.query.output import to_table
from dagster_ckpt.values.modes import Semantic, kafka_delivery
from dagster_ckpt.values.validation import imported

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    Describe = Callable[[SparkSession], DataStreamWriter]


class Watermark(dg.Model):
    """How late a row may be."""

    column: str = Field(description="Column of event time.")
    delay: str = Field(description="How late, such as 10 minutes.")


class Source(dg.Model):
    """One stream that the query reads."""

    name: str = Field(description="Name of the view that SQL reads; letters, digits and '_'.")
    format: str | None = Field(
        default=None, description="Format, such as json, parquet, kafka, delta or rate. Default: Spark's."
    )
    schema_ddl: str | None = Field(
        default=None,
        alias="schema",
        description="Schema as DDL, such as at timestamp, shop string, amount long. File formats need one.",
    )
    options: dict[str, Scalar] = Field(default_factory=dict, description="Options of the source, by Spark's names.")
    path: str | None = Field(default=None, description="Folder to read, for formats that have one.")
    table: str | None = Field(default=None, description="Table to read, in place of format and path.")
    watermark: Watermark | None = Field(default=None, description="How late rows may be.")
    _keep_env_vars = field_validator("options", mode="wrap")(with_env_vars)

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if not self.name.isidentifier():
            raise ValueError(f"source {self.name!r} cannot name a view. Use letters, digits and '_'.")
        if self.table is not None and (self.path is not None or self.format is not None):
            raise ValueError(f"source {self.name}: table is read by its name alone. Remove format and path, or table.")
        if self.table is None and self.format is None and self.path is None:
            raise ValueError(f"source {self.name}: it has nothing to read. Give table, or format, or path.")
        return self

    def read(self, spark: SparkSession) -> DataFrame:
        """The stream as a data frame."""
        reader = spark.readStream.options(**with_values(self.options))
        if self.schema_ddl is not None:
            reader = reader.schema(self.schema_ddl)
        if self.format is not None:
            reader = reader.format(self.format)
        rows = reader.table(self.table) if self.table is not None else reader.load(self.path)
        return rows.withWatermark(self.watermark.column, self.watermark.delay) if self.watermark is not None else rows


class Transform(dg.Model):
    """The transformation of the sources."""

    sql: str | None = Field(default=None, description="A query over the views that the sources are named.")
    function: str | None = Field(
        default=None,
        description="Import path of a function, such as company.queries:late_orders. It takes the sources as data "
        "frames, in their order, and returns one.",
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.sql is None) == (self.function is None):
            raise ValueError("transform: give either sql or function.")
        return self


class Sink(dg.Model):
    """Where the rows go."""

    format: str | None = Field(default=None, description="Format, such as parquet, delta or kafka. Default: Spark's.")
    output_mode: Literal["append", "update", "complete"] = Field(default="append", description="Spark's output mode.")
    path: str | None = Field(default=None, description="Folder to write, for formats that have one.")
    table: str | None = Field(
        default=None,
        description="Table of a catalog to write, such as lake.db.orders, in place of path. If it does not exist, it "
        "is created in the format.",
    )
    options: dict[str, Scalar] = Field(default_factory=dict, description="Options of the sink, by Spark's names.")
    semantic: Literal["EXACTLY_ONCE", "AT_LEAST_ONCE", "NONE"] | None = Field(
        default=None, description="Guarantee of a Kafka sink: adds the options of kafka_delivery."
    )
    partition_by: list[str] = Field(default_factory=list, description="Columns that name the folders of a file sink.")
    foreach_batch: str | None = Field(
        default=None,
        description="Import path of a function that writes each batch, such as company.sinks:write_orders, in place of "
        "a format. It takes a data frame and the number of the batch.",
    )
    _keep_env_vars = field_validator("options", mode="wrap")(with_env_vars)

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if "checkpointLocation" in self.options:
            raise ValueError("sink: checkpointLocation is given by the state_backend resource. Remove it from options.")
        places = [self.format, self.path, self.table]
        if self.foreach_batch is not None and any(place is not None for place in places):
            raise ValueError("sink: foreach_batch writes by itself. Remove format, path and table, or foreach_batch.")
        if self.semantic is not None and self.format != "kafka":
            raise ValueError(f"sink: semantic is for format kafka, and the format is {self.format}. Remove semantic.")
        if self.table is not None and self.path is not None:
            raise ValueError("sink: a table of a catalog has its own folder. Remove path, or table.")
        if self.foreach_batch is None and all(place is None for place in places):
            raise ValueError("sink: it has no place to write to. Give table, format, path or foreach_batch.")
        return self


class Trigger(dg.Model):
    """When a batch starts; set exactly one field. Without a trigger: as soon as the previous batch is done."""

    processing_time: str | None = Field(default=None, description="An interval, such as 10 seconds.")
    available_now: bool = Field(default=False, description="Process all available input, in several batches, and end.")
    continuous: str | None = Field(default=None, description="Continuous processing; an interval, such as 1 second.")

    @model_validator(mode="after")
    def _only_one(self) -> Self:
        if sum([self.processing_time is not None, self.available_now, self.continuous is not None]) != 1:
            raise ValueError("trigger: give one of processing_time, available_now: true and continuous.")
        return self

    def applied_to(self, writer: DataStreamWriter) -> DataStreamWriter:
        """Set this trigger on a writer."""
        if self.processing_time is not None:
            return writer.trigger(processingTime=self.processing_time)
        if self.continuous is not None:
            return writer.trigger(continuous=self.continuous)
        return writer.trigger(availableNow=True)


def described(
    job: str, sources: list[Source], transform: Transform | None, sink: Sink, trigger: Trigger | None
) -> Describe:
    """Import paths are resolved now, to report wrong ones when definitions are loaded."""
    function = None
    if transform is not None and transform.function is not None:
        function = imported(f"stream {job}: transform.function", transform.function)
    write = imported(f"stream {job}: sink.foreach_batch", sink.foreach_batch) if sink.foreach_batch else None

    def describe(spark: SparkSession) -> DataStreamWriter:
        frames = [source.read(spark) for source in sources]
        if function is not None:
            rows = function(*frames)
        elif transform is not None and transform.sql is not None:
            for source, frame in zip(sources, frames, strict=True):
                frame.createOrReplaceTempView(source.name)
            rows = spark.sql(transform.sql)
        else:
            [rows] = frames
        delivery = kafka_delivery(Semantic[sink.semantic]).writer_options if sink.semantic is not None else {}
        writer = rows.writeStream.outputMode(sink.output_mode).options(**{**delivery, **with_values(sink.options)})
        if sink.format is not None:
            writer = writer.format(sink.format)
        if sink.path is not None:
            writer = writer.option("path", sink.path)
        if sink.table is not None:
            writer = to_table(writer, sink.table)
        if sink.partition_by:
            writer = writer.partitionBy(*sink.partition_by)
        if write is not None:
            writer = writer.foreachBatch(write)
        return trigger.applied_to(writer) if trigger is not None else writer

    return describe
