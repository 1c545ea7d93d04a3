"""One stream and its query in YAML."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

import dagster as dg
from pydantic import Field, create_model, field_validator, model_validator

from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.orchestration.jobs.schedules import PeriodicSavepoints
from dagster_ckpt.orchestration.settings import CheckpointSettings, RestartSettings, UpgradeSettings, described_fields
from dagster_ckpt.orchestration.stream import NOT_IN_YAML, StreamingAsset, StreamOptions, description_of
from dagster_ckpt.orchestration.streaming_asset import SHORTEST_MS, streaming_multi_asset
from dagster_ckpt.orchestration.translator import StreamTranslator
from dagster_ckpt.orchestration.yaml_fields import (
    Scalar,
    describe,
    in_yaml,
    settings_in_yaml,
    templated,
    with_env_vars,
    with_values,
)
from dagster_ckpt.policies.retention import SavepointHistory
from dagster_ckpt.policies.serialization import read_retention
from dagster_ckpt.spark.query.output import to_table
from dagster_ckpt.values.modes import DesiredState, Semantic, kafka_delivery
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

    def read(self, spark: "SparkSession") -> "DataFrame":
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

    def applied_to(self, writer: "DataStreamWriter") -> "DataStreamWriter":
        if self.processing_time is not None:
            return writer.trigger(processingTime=self.processing_time)
        if self.continuous is not None:
            return writer.trigger(continuous=self.continuous)
        return writer.trigger(availableNow=True)


def described(
    name: str, sources: list[Source], transform: Transform | None, sink: Sink, trigger: Trigger | None
) -> "Describe":
    """Return a function that describes the query. Wrong import paths fail now, when definitions are loaded."""
    function = None
    if transform is not None and transform.function is not None:
        function = imported(f"stream {name}: transform.function", transform.function)
    write = imported(f"stream {name}: sink.foreach_batch", sink.foreach_batch) if sink.foreach_batch else None

    def describe(spark: "SparkSession") -> "DataStreamWriter":
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


class Freshness(dg.Model):
    """The maximum age of the newest reported checkpoint."""

    fail_after_ms: int = Field(description="An older snapshot is an error; at least 60000.")
    warn_after_ms: int | None = Field(default=None, description="An older snapshot is a warning; at least 60000.")

    @model_validator(mode="after")
    def _a_minute(self) -> Self:
        if min(self.fail_after_ms, self.warn_after_ms or self.fail_after_ms) < SHORTEST_MS:
            raise ValueError(f"freshness: the minimum is {SHORTEST_MS} ms, because Dagster accepts no shorter time.")
        return self

    def policy(self) -> dg.FreshnessPolicy:
        return dg.FreshnessPolicy.time_window(
            fail_window=timedelta(milliseconds=self.fail_after_ms),
            warn_window=timedelta(milliseconds=self.warn_after_ms) if self.warn_after_ms is not None else None,
        )


class Savepoints(dg.Model):
    """Scheduled savepoints."""

    cron_schedule: str = Field(description="When, as a cron expression such as 0 3 * * *.")
    execution_timezone: str = Field(default="UTC", description="Time zone of the cron expression.")
    max_count: int | None = Field(default=10, description="Number of savepoints to keep; null for no limit.")
    max_age_ms: int | None = Field(default=None, description="Maximum age of a kept savepoint. Default: no limit.")
    keep: dict[str, Any] | None = Field(
        default=None,
        description="Another retention policy instead of the two limits, by its name and arguments, such as "
        "{newest_per: {period: day, count: 14}}.",
    )
    running: bool = Field(default=True, description="Whether the schedule runs from the start.")

    @model_validator(mode="after")
    def _one_history(self) -> Self:
        if self.keep is not None:
            if self.model_fields_set & {"max_count", "max_age_ms"}:
                raise ValueError("savepoints: give either keep or max_count and max_age_ms.")
            read_retention(self.keep)
        return self

    def periodic(self) -> PeriodicSavepoints:
        return PeriodicSavepoints(
            self.cron_schedule,
            self.execution_timezone,
            history=(
                SavepointHistory(self.max_count, self.max_age_ms) if self.keep is None else read_retention(self.keep)
            ),
            default_status=dg.DefaultScheduleStatus.RUNNING if self.running else dg.DefaultScheduleStatus.STOPPED,
        )


class EveryMinute(CheckpointSettings):
    """When snapshots are taken, how many are kept, and what remains after the stream ends."""

    interval: int | None = Field(
        default=60_000,
        description="Time between periodic checkpoints, at least 10; null turns them off. Default: a minute.",
    )


_Thresholds: Any = create_model("Thresholds", __base__=dg.Model, **described_fields(HealthSettings))


class Health(_Thresholds):
    """The thresholds of `HealthSettings`, under the same names."""

    @model_validator(mode="after")
    def _can_be(self) -> Self:
        self.settings()
        return self

    def settings(self) -> HealthSettings:
        return HealthSettings(**self.model_dump())


def _function(_context: dg.ResolutionContext, path: str | None) -> Callable[..., Any] | None:
    return None if path is None else imported("unexpected_rows", path)


def _hooks(_context: dg.ResolutionContext, paths: Sequence[str] | None) -> Sequence[dg.HookDefinition] | None:
    return None if paths is None else [imported("hooks", path) for path in paths]


class StreamDeclaration(dg.Resolvable, dg.Model):
    """One stream: a query, its checkpointing and restart options, and the assets that it writes."""

    # Of a field with a default, Dagster takes the description from its Resolver.
    name: str = Field(description="Name of the op, of the query, and of the start job; letters, digits and '_'.")
    stream_id: Annotated[
        str | None, describe("Id in catalog and storage; it keeps the state if the stream is renamed. Default: name.")
    ] = None
    assets: Annotated[
        Sequence[dg.ResolvedAssetSpec] | None,
        describe("The assets that the stream writes, the main one first. Default: one, named after the stream."),
    ] = None
    sources: list[Annotated[Source, templated(Source)]] = Field(description="The sources that the stream reads.")
    transform: Annotated[
        Annotated[Transform, templated(Transform)] | None,
        describe("How the sources are transformed. Default: a single source is passed through."),
    ] = None
    sink: Annotated[Sink, templated(Sink)] = Field(description="Where the rows go.")
    trigger: Annotated[
        Annotated[Trigger, templated(Trigger)] | None,
        describe("When a batch starts. Default: as soon as the previous one has ended."),
    ] = None
    checkpointing: Annotated[
        EveryMinute,
        in_yaml(
            EveryMinute,
            CheckpointSettings.checkpoint_config,
            f"{description_of('checkpointing')} Default: every minute.",
        ),
    ] = EveryMinute()
    restart_strategy: Annotated[
        RestartSettings,
        in_yaml(RestartSettings, RestartSettings.restart_strategy, description_of("restart_strategy")),
    ] = RestartSettings()
    upgrade: Annotated[
        UpgradeSettings, in_yaml(UpgradeSettings, UpgradeSettings.upgrade_policy, description_of("upgrade"))
    ] = UpgradeSettings()
    desired_state: Annotated[DesiredState | None, describe(description_of("desired_state"))] = None
    unexpected_rows: Annotated[
        Callable[..., Any] | None,
        dg.Resolver(_function, model_field_type=str | None, description=description_of("unexpected_rows")),
    ] = None
    stall_timeout_ms: Annotated[int | None, describe(description_of("stall_timeout_ms"))] = None
    restart_in_run: Annotated[bool, describe(description_of("restart_in_run"))] = True
    standby: Annotated[bool, describe(description_of("standby"))] = False
    op_tags: Annotated[dict[str, Any] | None, settings_in_yaml(description_of("op_tags"), Any)] = None
    hooks: Annotated[
        # Pydantic would take a hook, which is a named tuple, apart.
        Sequence[Any] | None,
        dg.Resolver(_hooks, model_field_type=Sequence[str] | None, description=description_of("hooks")),
    ] = None
    savepoints: Annotated[
        Annotated[Savepoints, templated(Savepoints)] | None, describe("Scheduled savepoints. Default: none.")
    ] = None
    freshness: Annotated[
        Annotated[Freshness, templated(Freshness)] | None,
        describe("Maximum age of the newest checkpoint. Default: six checkpoint intervals."),
    ] = None
    health: Annotated[
        Annotated[Health, templated(Health)] | None,
        describe("Thresholds of the health checks. Default: those of HealthSettings."),
    ] = None
    pool: Annotated[str | None, describe("Dagster concurrency pool of the op. Default: none.")] = None

    @model_validator(mode="after")
    def _one_frame(self) -> Self:
        if not self.sources or (self.transform is None and len(self.sources) > 1):
            raise ValueError(
                f"stream {self.name}: it has {len(self.sources)} sources and no transform. Give it one source, or "
                "transform.sql or transform.function, which combines them."
            )
        return self

    def stream(self, translator: StreamTranslator | None = None) -> StreamingAsset:
        names = StreamOptions.__annotations__.keys() - NOT_IN_YAML
        options = cast("StreamOptions", {name: getattr(self, name) for name in names})
        describe = described(self.name, self.sources, self.transform, self.sink, self.trigger)
        translator = translator or StreamTranslator()
        specs = list(self.assets) if self.assets else [dg.AssetSpec(self.name)]
        if self.freshness is not None:
            specs = [spec.replace_attributes(freshness_policy=self.freshness.policy()) for spec in specs]

        @streaming_multi_asset(
            specs=specs,
            name=self.name,
            stream_id=self.stream_id,
            translator=translator,
            description=specs[0].description,
            pool=self.pool,
            **options,
        )
        def query(context: dg.AssetExecutionContext, pyspark: dg.ResourceParam[Any]) -> "DataStreamWriter":  # noqa: ARG001
            return describe(pyspark.spark_session)

        return query
