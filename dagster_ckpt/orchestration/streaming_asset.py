"""`@streaming_asset`: a function that returns a `DataStreamWriter` becomes a long-running asset.

The function only describes the query. The framework names it, gives it its checkpoint
location, starts, supervises, restarts and stops it.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import Field

from dagster_ckpt.errors import OptionError
from dagster_ckpt.lifecycle.job import JOB_ID_PATTERN
from dagster_ckpt.options import (
    CheckpointConfig,
    CheckpointOptions,
    DecidingRestartStrategy,
    DesiredState,
    RecoveryClaimMode,
    RestartStrategyConfiguration,
    UpgradePolicy,
    effective_restart_strategy,
)
from dagster_ckpt.orchestration._compat import UnresolvedAssetJobDefinition
from dagster_ckpt.orchestration.checkpoint_settings import CheckpointOverrides, CheckpointSettings, RestartSettings
from dagster_ckpt.orchestration.freshness import default_freshness
from dagster_ckpt.orchestration.upgrade_settings import UpgradeSettings

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

# The names under which a streaming asset looks for its resources.
RESOURCES = frozenset({"pyspark", "checkpoint_storage", "state_backend", "checkpoint_catalog"})
STREAM_TAGS = {
    # A stream has no natural end: no limit on its run time, and no retry besides our restart strategy.
    "dagster/max_runtime": "0",
    "dagster/max_retries": "0",
}

StreamFunction = Callable[..., "DataStreamWriter"]


class StreamRunConfig(dg.Config):
    """What a start of a streaming asset can be told in the launchpad."""

    start_from: str = Field(
        default="latest",
        description="latest: go on where the query stopped (live directory, else the newest image). "
        "latest-checkpoint, latest-savepoint, preferred-savepoint, or the id, number (chk-7), label or location of "
        "an image: rewind to it. batch-<n>: rewind to a batch that Spark still retains. empty: give up all state and "
        "begin again.",
    )
    new_query_id: bool = Field(
        default=False,
        description="With a rewind: go on as a new query, so that sinks which remember query ids (Delta, Iceberg) "
        "write the rewound batches once more instead of passing over them.",
    )
    accept_loss: bool = Field(
        default=False,
        description="Start also where a sink could lose rows by the rewind. Without it such a start is refused, and "
        "the message says which sink and why.",
    )
    claim_mode: RecoveryClaimMode = Field(
        default=RecoveryClaimMode.NO_CLAIM,
        description="With a start from an image: NO_CLAIM leaves a savepoint to its owner, the stream never deletes "
        "it. CLAIM makes it the stream's own, deleted like a checkpoint. Flink's LEGACY is not offered.",
    )
    checkpointing: CheckpointOverrides | None = Field(
        default=None,
        description="Checkpointing options for this run in place of the asset's, each by itself. A run that the "
        "supervisor starts later has the asset's again.",
    )
    preflight: bool = Field(
        default=False,
        description="Start nothing: only try whether the code that is loaded can go on from the state, on a copy of it "
        "and without output. The stream may run meanwhile.",
    )


@dataclass(frozen=True)
class StreamingAsset:
    """A streaming asset with everything that its jobs and sensors need.

    Attributes:
        asset: The Dagster asset.
        job_id: Stable id of the streaming job in catalog and storage.
        key: Asset key.
        options: Checkpointing options.
        restart: Restart strategy.
        start_job: The Dagster job that runs the stream, one process for run and step; None where something outside
            Dagster starts it.
        runs_outside: Whether its query runs in a process that outlives the runs of its start job.
        desired_state: What it is to be where nobody has said anything else; None: it is not managed.
        upgrade: How it goes over to another code version.
    """

    asset: dg.AssetsDefinition
    job_id: str
    key: dg.AssetKey
    options: CheckpointOptions
    restart: DecidingRestartStrategy
    start_job: UnresolvedAssetJobDefinition | None
    runs_outside: bool = False
    desired_state: DesiredState | None = None
    upgrade: UpgradePolicy = field(default_factory=UpgradePolicy)

    @property
    def code_version(self) -> str | None:
        """Version of the code that describes the query."""
        return self.asset.code_versions_by_key.get(self.key)

    @property
    def name(self) -> str:
        """Name of the op, and of the query in Spark."""
        return self.asset.op.name if self.asset.is_executable else "__".join(self.key.path)


def streaming_asset(
    *,
    checkpointing: CheckpointConfig | CheckpointSettings | None = None,
    restart_strategy: RestartStrategyConfiguration | RestartSettings | None = None,
    desired_state: DesiredState | None = None,
    upgrade: UpgradePolicy | UpgradeSettings | None = None,
    job_id: str | None = None,
    name: str | None = None,
    key_prefix: str | Sequence[str] | None = None,
    deps: Sequence[Any] | None = None,
    group_name: str | None = None,
    description: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    code_version: str | None = None,
    owners: Sequence[str] | None = None,
    freshness_policy: dg.FreshnessPolicy | None = None,
) -> Callable[[StreamFunction], StreamingAsset]:
    """Make a streaming asset of a function that returns an unstarted `DataStreamWriter`.

    The function's first parameter is the Dagster context; every other parameter names a
    resource. `pyspark` holds the session. A `queryName` or `checkpointLocation` set on the
    writer is replaced.

    Args:
        checkpointing: Checkpointing options, as an object or as `CheckpointSettings` read from YAML; default: a
            `CheckpointConfig()`, periodic checkpoints off.
        restart_strategy: What happens after a failure; default: Flink's, which is none
            without checkpointing and exponential delay with it.
        desired_state: What the stream is to be, from the moment the code is loaded: the supervisor sensor starts it,
            and brings it over to another `code_version`. What people say later wins. None: people start and stop it.
        upgrade: How it goes over to another code version; default: `UpgradePolicy()`, by a savepoint.
        job_id: Id in catalog and storage; default: the asset key joined by dots. Keep it when
            the asset is renamed, and its state goes along.
        name: Asset name; default: the function's name.
        key_prefix: As in `dagster.asset`.
        deps: As in `dagster.asset`.
        group_name: As in `dagster.asset`.
        description: As in `dagster.asset`; default: the function's docstring.
        metadata: As in `dagster.asset`.
        tags: As in `dagster.asset`.
        code_version: As in `dagster.asset`.
        owners: As in `dagster.asset`.
        freshness_policy: As in `dagster.asset`; default: `default_freshness` of the checkpoint interval.

    Raises:
        OptionError: An option or the job id is not valid, or the function has no parameters.

    Example:
        >>> @streaming_asset(checkpointing=CheckpointConfig(interval=60_000))
        ... def orders(context, pyspark: PySparkResource) -> DataStreamWriter:
        ...     return pyspark.spark_session.readStream.table("raw").writeStream.format("parquet")
    """
    if isinstance(checkpointing, CheckpointSettings):
        checkpointing = checkpointing.checkpoint_config()
    if isinstance(restart_strategy, RestartSettings):
        restart_strategy = restart_strategy.restart_strategy()
    policy = upgrade.upgrade_policy() if isinstance(upgrade, UpgradeSettings) else upgrade or UpgradePolicy()
    options = (checkpointing or CheckpointConfig()).options
    restart = effective_restart_strategy(restart_strategy, checkpointing_enabled=options.interval_ms is not None)

    def decorate(function: StreamFunction) -> StreamingAsset:
        # Imported here: the run path needs Spark, defining an asset does not.
        from dagster_ckpt.orchestration.stream_run import run_stream  # noqa: PLC0415

        asset_name = name or function.__name__
        prefix = [key_prefix] if isinstance(key_prefix, str) else list(key_prefix or [])
        key = dg.AssetKey([*prefix, asset_name])
        stable_id = job_id or ".".join(key.path)
        if not JOB_ID_PATTERN.fullmatch(stable_id):
            raise OptionError(
                f"streaming_asset {asset_name}: job_id {stable_id!r} cannot name a folder. Use letters, digits, "
                "'_', '-' and '.', beginning with a letter or digit, 128 at most."
            )
        parameters = list(inspect.signature(function).parameters)
        if not parameters:
            raise OptionError(
                f"streaming_asset {asset_name}: the function takes no parameters. Its first one is the Dagster "
                "context, the others name resources: def f(context, pyspark: PySparkResource)."
            )
        resources = parameters[1:]
        holder: list[StreamingAsset] = []

        @dg.asset(
            name=asset_name,
            key_prefix=prefix or None,
            deps=deps,
            group_name=group_name,
            description=description or inspect.getdoc(function),
            metadata={"dagster_ckpt/job_id": stable_id, **describe_options(options, restart), **(metadata or {})},
            tags=tags,
            code_version=code_version,
            owners=owners,
            freshness_policy=freshness_policy or default_freshness(options),
            kinds={"spark", "streaming"},
            required_resource_keys=set(RESOURCES | set(resources)),
            config_schema=StreamRunConfig.to_config_schema().as_field(),
            op_tags=STREAM_TAGS,
            # The catalog sensor reports each checkpoint; the end of a run is not one more.
            output_required=False,
        )
        def streaming(context: dg.AssetExecutionContext) -> Iterator[Any]:
            yield from run_stream(
                context,
                holder[0],
                lambda: function(context, **{each: getattr(context.resources, each) for each in resources}),
            )

        holder.append(
            StreamingAsset(
                asset=streaming,
                job_id=stable_id,
                key=key,
                options=options,
                restart=restart,
                start_job=dg.define_asset_job(
                    f"{asset_name}_stream",
                    # Its health checks are for the sensor: here they would run at the stream's end.
                    selection=dg.AssetSelection.assets(key).without_checks(),
                    description=f"Start the stream {stable_id}, from where it stopped or from start_from.",
                    # One process for run and step: a killed run worker leaves no orphaned step behind.
                    executor_def=dg.in_process_executor,
                    tags={**STREAM_TAGS, "dagster_ckpt/job_id": stable_id},
                ),
                desired_state=desired_state,
                upgrade=policy,
            )
        )
        return holder[0]

    return decorate


def describe_options(options: CheckpointOptions, restart: DecidingRestartStrategy) -> dict[str, Any]:
    """The options of a stream, as metadata of its asset."""
    return {
        "dagster_ckpt/interval_ms": options.interval_ms if options.interval_ms is not None else "off",
        "dagster_ckpt/mode": options.mode.name,
        "dagster_ckpt/cleanup": options.cleanup.name,
        "dagster_ckpt/retained": options.num_retained,
        "dagster_ckpt/restart_strategy": restart.get_description(),
    }
