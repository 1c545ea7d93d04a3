"""`StreamSpec`, what a run needs of a stream, and `Stream`, what sensors and operators need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack, get_type_hints

import dagster as dg

from dagster_ckpt.client.connection import GivenStreams
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.errors import OptionError, StreamNotFoundError
from dagster_ckpt.orchestration._compat import BaseAssetGraph, KeysAssetSelection, UnresolvedAssetJobDefinition
from dagster_ckpt.orchestration.resources import DeploymentResources
from dagster_ckpt.orchestration.settings import CheckpointSettings, RestartSettings, UpgradeSettings, launchpad
from dagster_ckpt.orchestration.translator import StreamTranslator
from dagster_ckpt.policies.restart import (
    RestartPolicy,
    RestartStrategyConfiguration,
    effective_restart_strategy,
    restart_description,
)
from dagster_ckpt.policies.upgrade import UnexpectedRows, UpgradePolicy
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.state.migration import StateMigration
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.modes import DesiredState
from dagster_ckpt.values.validation import checked_stream_id, conforming, did_you_mean, policy_name

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

STREAM_TAGS = {
    # A stream has no time limit, and only its restart strategy retries it.
    "dagster/max_runtime": "0",
    "dagster/max_retries": "0",
}

SHORTEST_STALL_MS = 30_000
# Takes a Dagster context and an object with the resources as attributes.
QueryDescriber = Callable[[Any, Any], "DataStreamWriter"]
_STREAM = "dagster_ckpt_stream"


def refuse_unknown(function: str, given: Mapping[str, object], *known: type) -> None:
    names = [name for kind in known for name in kind.__annotations__]
    for name in given:
        if name not in names:
            hint = _UNFIT.get(name) or did_you_mean(name, names)
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}.{hint}")


_ONLY_RUN = " The supervisor sensor launches the only run of a stream, which does not end."
# Parameters of `dagster.asset` that a stream cannot have, and why.
_UNFIT = {
    "automation_condition": _ONLY_RUN,
    "partitions_def": f"{_ONLY_RUN} Define one stream for each region or tenant.",
    "backfill_policy": _ONLY_RUN,
    "retry_policy": " It would start a second writer. Use restart_strategy.",
    "ins": " The query reads its sources. Use deps.",
    "check_specs": " A run that does not end cannot yield results. Define an asset_check of its own for the asset.",
    "config_schema": " Give the function a parameter config, annotated with a subclass of dagster.Config.",
    "required_resource_keys": " Each parameter of the function names a resource.",
    "resource_defs": " Give the resources to the definitions.",
    "io_manager_def": " The query writes its output.",
    "io_manager_key": " The query writes its output.",
    "run_tags": " Use op_tags, which are those of the run as well.",
}


def refuse_unfit(
    where: str,
    key: dg.AssetKey,
    automation_condition: dg.AutomationCondition[Any] | None,
    partitions_def: dg.PartitionsDefinition[Any] | None,
) -> None:
    """Refuse an asset that Dagster would launch by itself, or in parts."""
    for name, value in (("automation_condition", automation_condition), ("partitions_def", partitions_def)):
        if value is not None:
            raise OptionError(
                f"{where}: asset {key.to_user_string()} has {name}, which a streaming asset cannot have."
                f"{_UNFIT[name]} Remove it."
            )


class StreamOptions(TypedDict, total=False):
    """How a stream runs: keywords of every decorator, and fields of `StreamsComponent` under the same names."""

    checkpointing: Annotated[
        CheckpointConfig | CheckpointSettings | None,
        "When checkpoints are taken, how many are retained, and what outlives the stream.",
    ]
    restart_strategy: Annotated[
        RestartStrategyConfiguration | RestartPolicy | RestartSettings | None,
        "What happens after a failure. Default: Flink's, exponential delay with checkpointing and none without.",
    ]
    desired_state: Annotated[
        DesiredState | None,
        "RUNNING: the supervisor sensor starts the stream as soon as its code is loaded, and upgrades it to each new "
        "code_version. A state that an operator sets later takes precedence. Default: you start and stop it.",
    ]
    upgrade: Annotated[
        UpgradePolicy | UpgradeSettings | None,
        "How the stream is upgraded to another code_version. Default: with a savepoint.",
    ]
    unexpected_rows: Annotated[
        UnexpectedRows | None,
        "With verify_batches: a function that gets the name of what differs, output or a state, and the rows that "
        "differ as a DataFrame, and returns those that must not differ; in YAML its import path. Default: no row may.",
    ]
    stall_timeout_ms: Annotated[
        int | None,
        "Fail the run if the query makes no progress for this long: no batch completes, it is not idle, and no Spark "
        "task is running. The restart strategy then starts a new run. At least 30000. Default: no timeout.",
    ]
    restart_in_run: Annotated[
        bool,
        "If the driver or its JVM dies, start the stream again within the same Dagster run: the run's process forks a "
        "child that runs the stream. False: one process, and the supervisor sensor launches a new run, as it does "
        "where Spark is started before the step (PySparkResource) and on systems other than Linux. Default: true.",
    ]
    standby: Annotated[
        bool,
        "Keep a spare process within the run, with your code imported and Spark started, that takes over when the "
        "driver or its JVM dies. It costs the memory of a second driver. Needs restart_in_run. Default: false.",
    ]
    state_migrations: Annotated[
        Sequence[StateMigration] | None,
        "Rules for the state of operators that a release changes, carried out by a start with migrate_state. Default: "
        "none.",
    ]
    op_tags: Annotated[
        Mapping[str, Any] | None,
        "Tags of the op and of the runs of its start job, which are one process, such as dagster-k8s/config and "
        "dagster/priority. Default: none.",
    ]
    hooks: Annotated[
        Sequence[dg.HookDefinition] | None,
        "Hooks of the start job, such as a failure_hook; in YAML import paths, such as company.alerts:page. Default: "
        "none.",
    ]


# Functions, which are reviewed with the code that needs them.
NOT_IN_YAML = frozenset({"state_migrations"})


def description_of(option: str) -> str:
    described: str = get_type_hints(StreamOptions, include_extras=True)[option].__metadata__[0]
    return described


@dataclass(frozen=True)
class StreamSpec:
    """A stream, independent of what runs it in Dagster; `StreamOptions` describes the options.

    Example:
        >>> ORDERS = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=60_000))
    """

    stream_id: str
    options: CheckpointOptions
    restart: RestartPolicy
    desired_state: DesiredState | None = None
    upgrade: UpgradePolicy = field(default_factory=UpgradePolicy)
    stall_timeout_ms: int | None = None
    restart_in_run: bool = True
    standby: bool = False
    op_tags: Mapping[str, Any] = field(default_factory=dict, hash=False)
    hooks: frozenset[dg.HookDefinition] = frozenset()
    unexpected_rows: UnexpectedRows | None = None
    state_migrations: tuple[StateMigration, ...] = ()

    @staticmethod
    def of(stream_id: str, **options: Unpack[StreamOptions]) -> StreamSpec:
        """Create a stream from options as objects, or as settings read from YAML."""
        refuse_unknown("StreamSpec.of", options, StreamOptions)
        checked_stream_id(stream_id)
        kinds = get_type_hints(StreamOptions)
        given: Any = {
            name: conforming(f"{name} of stream {stream_id!r}", value, kinds[name])
            for name, value in options.items()
            if value is not None
        }
        options = given
        stall_timeout_ms = options.get("stall_timeout_ms")
        if stall_timeout_ms is not None and stall_timeout_ms < SHORTEST_STALL_MS:
            raise OptionError(
                f"stall_timeout_ms of stream {stream_id!r} is {stall_timeout_ms}, but must be at least "
                f"{SHORTEST_STALL_MS}, or None for no limit: shorter waits are normal."
            )
        if options.get("standby") and not options.get("restart_in_run", True):
            raise OptionError(
                f"Stream {stream_id!r} has standby=True and restart_in_run=False, but its spare process would "
                "restart it within the run. Remove one of them."
            )
        checkpointing = options.get("checkpointing")
        strategy, upgrade = options.get("restart_strategy"), options.get("upgrade")
        if isinstance(checkpointing, CheckpointSettings):
            checkpointing = checkpointing.checkpoint_config()
        if isinstance(strategy, RestartSettings):
            strategy = strategy.restart_strategy()
        checkpoint_options = (checkpointing or CheckpointConfig()).options
        return StreamSpec(
            stream_id,
            checkpoint_options,
            effective_restart_strategy(strategy, checkpointing_enabled=checkpoint_options.is_checkpointing_enabled),
            options.get("desired_state"),
            upgrade.upgrade_policy() if isinstance(upgrade, UpgradeSettings) else upgrade or UpgradePolicy(),
            stall_timeout_ms,
            options.get("restart_in_run", True),
            options.get("standby", False),
            _checked_tags(stream_id, options.get("op_tags") or {}),
            frozenset(options.get("hooks") or ()),
            options.get("unexpected_rows"),
            tuple(options.get("state_migrations") or ()),
        )

    def tags_of_op(self) -> dict[str, Any]:
        """Tags of the op, and of the runs of its start job."""
        return {**self.op_tags, **STREAM_TAGS}

    def metadata(self) -> dict[str, Any]:
        options = self.options
        return {
            "dagster_ckpt/stream_id": self.stream_id,
            "dagster_ckpt/interval_ms": options.interval if options.interval is not None else "off",
            **({"dagster_ckpt/trigger": policy_name(options.trigger)} if options.trigger is not None else {}),
            "dagster_ckpt/mode": options.mode.name,
            "dagster_ckpt/cleanup": options.cleanup.name,
            "dagster_ckpt/retained": (
                options.num_retained if options.retention is None else policy_name(options.retention)
            ),
            "dagster_ckpt/restart_strategy": restart_description(self.restart),
        }


def _checked_tags(stream_id: str, tags: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in tags:
        if name in STREAM_TAGS or name.startswith("dagster_ckpt/"):
            raise OptionError(f"op_tags of stream {stream_id!r} has {name}, which is set for every stream. Remove it.")
    return tags


def asset_names(keys: Sequence[dg.AssetKey]) -> str:
    return ", ".join(key.to_user_string() for key in keys)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """A stream of a code location, with what sensors and operator jobs need.

    Attributes:
        name: Name of its op, and of the query in Spark.
        untranslated_name: Name of its op before a translator changes it.
        keys: The assets it writes; empty for an op outside assets.
        start_job: None if something else starts it.
        runs_externally: Its query outlives the runs of its start job.
        describe: None if the query is in an asset or program of the user's own.
    """

    spec: StreamSpec
    name: str
    untranslated_name: str
    keys: tuple[dg.AssetKey, ...]
    code_version: str | None
    start_job: UnresolvedAssetJobDefinition | dg.JobDefinition | None
    runs_externally: bool = False
    translator: StreamTranslator = field(default_factory=StreamTranslator)
    describe: QueryDescriber | None = field(default=None, compare=False, repr=False)

    @property
    def stream_id(self) -> str:
        return self.spec.stream_id

    @property
    def writes(self) -> str:
        return asset_names(self.keys) or self.name

    def is_called(self, name: str) -> bool:
        return name == self.stream_id or name in {key.to_user_string() for key in self.keys}


@dataclass(frozen=True, kw_only=True, repr=False)
class StreamingAsset(Stream):
    """A stream that writes one or more assets; `asset` is their Dagster definition.

    It can be called like the function that it was made of, such as in a test.
    """

    def __repr__(self) -> str:
        # Dagster's error for an object of the wrong type quotes this.
        return (
            f"<StreamingAsset {self.stream_id}: write .asset or .key in deps of an asset, and "
            "stream_definitions(...) in place of Definitions(assets=...)>"
        )

    asset: dg.AssetsDefinition
    function: Callable[..., DataStreamWriter] | None = field(default=None, compare=False, repr=False)

    def __call__(self, *given: Any, **named: Any) -> DataStreamWriter:
        """Call the decorated function with plain arguments; starts nothing."""
        if self.function is None:
            raise OptionError(
                f"Stream {self.stream_id!r} cannot be called: its query is described by an asset, op, program or YAML "
                "of your own, not by a function that streaming_asset or streaming_multi_asset decorates."
            )
        return self.function(*given, **named)

    @property
    def key(self) -> dg.AssetKey:
        return self.keys[0]

    @staticmethod
    def of(
        asset: dg.AssetsDefinition,
        spec: StreamSpec,
        *,
        runs_externally: bool = False,
        translator: StreamTranslator | None = None,
        name: str | None = None,
        describe: QueryDescriber | None = None,
        function: Callable[..., DataStreamWriter] | None = None,
    ) -> StreamingAsset:
        """Make a stream of a definition whose op runs it, or that has no op; `name` is the op's untranslated name."""
        translator = translator or StreamTranslator()
        described = asset.map_asset_specs(lambda each: each.merge_attributes(metadata=spec.metadata()))
        keys = tuple(each.key for each in described.specs)
        versions = {each.code_version for each in described.specs}
        if len(versions) > 1:
            raise OptionError(
                f"{spec.stream_id}: its assets have the code versions {sorted(map(str, versions))}, but one query "
                "writes them all. Give every spec the same code_version."
            )
        op_name = described.op.name if described.is_executable else "__".join(keys[0].path)
        base = keys[0].path[-1] if len(keys) == 1 else name or op_name
        stream = StreamingAsset(
            spec=spec,
            name=op_name,
            untranslated_name=name or op_name,
            keys=keys,
            code_version=versions.pop(),
            start_job=_start_job(spec, translator.get_start_job_name(base), described)
            if described.is_executable
            else None,
            runs_externally=runs_externally,
            translator=translator,
            asset=described,
            describe=describe,
            function=function,
        )
        of_op = _function_of(described)
        if of_op is not None:
            # For `stream_of_asset`.
            vars(of_op)[_STREAM] = stream
        return stream


def stream_of_asset(asset: dg.AssetsDefinition) -> StreamingAsset | None:
    function = _function_of(asset)
    found = vars(function).get(_STREAM) if function is not None else None
    return found if isinstance(found, StreamingAsset) else None


def _function_of(asset: dg.AssetsDefinition) -> Callable[..., Any] | None:
    if not asset.is_executable or not isinstance(asset.node_def, dg.OpDefinition):
        return None
    return getattr(asset.node_def.compute_fn, "decorated_fn", None)


class _AssetsOfStream(KeysAssetSelection):
    """Checks the assets when definitions are built, as `map_asset_specs` may have changed them."""

    def resolve_inner(self, asset_graph: BaseAssetGraph[Any], allow_missing: bool) -> AbstractSet[dg.AssetKey]:
        found: AbstractSet[dg.AssetKey] = super().resolve_inner(asset_graph, allow_missing)
        for key in found:
            node = asset_graph.get(key)
            refuse_unfit("Definitions", key, node.automation_condition, node.partitions_def)
        return found


def _start_job(spec: StreamSpec, name: str, asset: dg.AssetsDefinition) -> UnresolvedAssetJobDefinition:
    return dg.define_asset_job(
        name,
        # The health sensor evaluates the checks.
        selection=_AssetsOfStream(selected_keys=sorted(asset.keys)).without_checks(),
        config=launchpad(asset.op.name, asset.op),
        description=f"Start the stream {spec.stream_id}, from where it stopped or from start_from.",
        # So a killed run worker leaves no orphaned step.
        executor_def=dg.in_process_executor,
        tags={**spec.tags_of_op(), "dagster_ckpt/stream_id": spec.stream_id},
        hooks=spec.hooks or None,
    )


def find_stream(streams: Sequence[Stream], stream_id: str) -> Stream:
    """Find a stream by its id, or by the key of one of its assets."""
    for stream in streams:
        if stream.is_called(stream_id):
            return stream
    known = ", ".join(sorted(stream.stream_id for stream in streams)) or "none"
    raise StreamNotFoundError(
        f"No streaming asset with stream id {stream_id!r} in this code location. It has: {known}. "
        "Give one of these as stream_id in the launchpad."
    )


def translator_of(streams: Sequence[Stream]) -> StreamTranslator:
    first = streams[0].translator if streams else StreamTranslator()
    for stream in streams:
        if stream.translator != first:
            raise OptionError(
                f"Streams {streams[0].stream_id!r} and {stream.stream_id!r} have different translators, so they cannot "
                "share jobs and sensors. Give both the same translator, or call stream_definitions once for each."
            )
    return first


def stream_handle(stream: Stream, resources: DeploymentResources) -> StreamHandle:
    return open_stream(stream.spec, resources, name=stream.name, writes=stream.writes, code_version=stream.code_version)


def open_stream(
    spec: StreamSpec,
    resources: DeploymentResources,
    *,
    name: str,
    writes: str,
    code_version: str | None,
) -> StreamHandle:
    """Open a stream with a deployment's resources; `name` is that of the query in Spark.

    A storage in the stream's `CheckpointConfig` overrides the resource, as in Flink, and inherits its other options.
    """
    deployment = resources.checkpoint_storage
    configured = spec.options.storage
    backend = resources.state_backend.backend()
    storage = deployment.storage() if configured is None else configured.configure(deployment.deployment())
    return StreamHandle(
        stream_id=spec.stream_id,
        name=name,
        asset_key=writes,
        catalog=resources.checkpoint_catalog.catalog(),
        store=open_store(storage, spec.stream_id, transfer_threads=backend.transfer_threads),
        options=spec.options,
        restart=spec.restart,
        live_root=resources.state_backend.live_directory,
        code_version=code_version,
        backend=backend,
        on_backend_change=resources.state_backend.on_change,
        executor_copy_bytes=deployment.executor_copy_bytes,
        stall_timeout_ms=spec.stall_timeout_ms,
        storage=storage,
        state_migrations=spec.state_migrations,
    )


def defined_streams(streams: Sequence[Stream], resources: DeploymentResources) -> GivenStreams:
    return GivenStreams(
        resources.checkpoint_catalog.catalog(),
        id_of=lambda name: find_stream(streams, name).stream_id,
        open_stream=lambda name: stream_handle(find_stream(streams, name), resources),
        ids=lambda: [stream.stream_id for stream in streams],
    )
