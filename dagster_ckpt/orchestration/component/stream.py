"""One stream in YAML."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Self, cast

import dagster as dg
from pydantic import Field, create_model, model_validator

from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.orchestration.component.query import Sink, Source, Transform, Trigger, described
from dagster_ckpt.orchestration.component.yaml_fields import describe, in_yaml, settings_in_yaml, templated
from dagster_ckpt.orchestration.jobs.schedules import PeriodicSavepoints
from dagster_ckpt.orchestration.settings import CheckpointSettings, RestartSettings, UpgradeSettings, described_fields
from dagster_ckpt.orchestration.stream import NOT_IN_YAML, StreamingAsset, StreamOptions, description_of
from dagster_ckpt.orchestration.streaming_asset import SHORTEST_MS, streaming_multi_asset
from dagster_ckpt.orchestration.translator import StreamTranslator
from dagster_ckpt.policies.retention import SavepointHistory
from dagster_ckpt.policies.serialization import read_retention
from dagster_ckpt.values.modes import DesiredState
from dagster_ckpt.values.validation import imported

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter


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
        """The policy of the assets."""
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
        """The schedule for `stream_definitions`."""
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
        """The thresholds for `stream_definitions`."""
        return HealthSettings(**self.model_dump())


def _function(_context: dg.ResolutionContext, path: str | None) -> Callable[..., Any] | None:
    return None if path is None else imported("unexpected_rows", path)


def _hooks(_context: dg.ResolutionContext, paths: Sequence[str] | None) -> Sequence[dg.HookDefinition] | None:
    return None if paths is None else [imported("hooks", path) for path in paths]


class StreamDeclaration(dg.Resolvable, dg.Model):
    """One stream: a query, its checkpointing and restart options, and the assets that it writes."""

    # For a field with a default, Dagster takes the description only from its Resolver.
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
        """Create the streaming assets."""
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
