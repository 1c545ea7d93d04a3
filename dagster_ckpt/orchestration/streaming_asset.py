"""Streams that run inside Dagster: `@streaming_asset`, `@streaming_multi_asset`, or an asset or op of your own.

A function only defines the query, which the framework names, starts, supervises and stops.
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

import dagster as dg

from dagster_ckpt.config.checkpoint_options import CheckpointOptions
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    DeploymentResources,
    StateBackendResource,
)
from dagster_ckpt.orchestration.run_status import (
    StepContext,
    refuse_required_outputs,
    refuse_retry_policy,
    refuse_run_retries,
)
from dagster_ckpt.orchestration.settings import (
    PARAMETER,
    config_class,
    config_in,
    config_of_run,
    fields_of_run,
)
from dagster_ckpt.orchestration.stream import (
    QueryDescriber,
    Stream,
    StreamingAsset,
    StreamOptions,
    StreamSpec,
    refuse_unfit,
    refuse_unknown,
)
from dagster_ckpt.orchestration.translator import RESOURCES, StreamTranslator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.runtime.run_request import Outcome


KIND_TAG_PREFIX = "dagster/kind/"
KINDS = frozenset({"spark", "streaming"})

StreamFunction = Callable[..., "DataStreamWriter"]


class AssetOptions(TypedDict, total=False):
    """Options with their meaning in `dagster.asset`."""

    key_prefix: str | Sequence[str] | None
    deps: Sequence[Any] | None
    group_name: str | None
    description: str | None
    metadata: Mapping[str, Any] | None
    tags: Mapping[str, str] | None
    code_version: str | None
    owners: Sequence[str] | None
    kinds: AbstractSet[str] | None
    freshness_policy: dg.FreshnessPolicy | None


class StreamingAssetOptions(StreamOptions, AssetOptions):
    """Options of the stream and of its asset."""


def parts_of(
    function: str, options: Mapping[str, Any], translator: StreamTranslator, stream_id: str | None
) -> Callable[[str, str | None], tuple[StreamSpec, dg.AssetSpec]]:
    """Return a maker of the stream and of the asset's spec, from the asset's name and description."""
    refuse_unknown(function, options, StreamingAssetOptions)
    of_stream = {name: value for name, value in options.items() if name in StreamOptions.__annotations__}
    of_asset = {name: value for name, value in options.items() if name not in of_stream}
    prefix = of_asset.pop("key_prefix", None) or []
    path = [prefix] if isinstance(prefix, str) else list(prefix)
    kinds, deps = of_asset.pop("kinds", None), of_asset.pop("deps", None)
    of_asset["kinds"] = set(KINDS if kinds is None else kinds)
    of_asset["deps"] = [each.asset if isinstance(each, StreamingAsset) else each for each in deps or ()]

    def parts(name: str, description: str | None) -> tuple[StreamSpec, dg.AssetSpec]:
        declared = dg.AssetSpec([*path, name], **of_asset)
        translated = translator.get_asset_spec(
            declared.replace_attributes(description=declared.description or description)
        )
        refuse_unfit(function, translated.key, translated.automation_condition, translated.partitions_def)
        spec = StreamSpec.of(stream_id or ".".join(translated.key.path), **of_stream)
        policy = translated.freshness_policy or default_freshness(spec.options)
        return spec, translated.replace_attributes(freshness_policy=policy)

    return parts


@overload
def streaming_asset(function: StreamFunction, /) -> StreamingAsset: ...


@overload
def streaming_asset(
    *,
    stream_id: str | None = None,
    name: str | None = None,
    pool: str | None = None,
    translator: StreamTranslator | None = None,
    **options: Unpack[StreamingAssetOptions],
) -> Callable[[StreamFunction], StreamingAsset]: ...


def streaming_asset(
    function: StreamFunction | None = None,
    /,
    *,
    stream_id: str | None = None,
    name: str | None = None,
    pool: str | None = None,
    translator: StreamTranslator | None = None,
    **options: Unpack[StreamingAssetOptions],
) -> StreamingAsset | Callable[[StreamFunction], StreamingAsset]:
    """Make a streaming asset of a function that returns an unstarted `DataStreamWriter`.

    The function's first parameter is the Dagster context; the others name resources. `pyspark` holds the session, and
    `config`, annotated with a `dagster.Config`, holds fields of the launchpad. The framework replaces a `queryName` or
    `checkpointLocation` of the writer. Parameters of `dagster.asset` that a stream cannot have are refused.

    Args:
        stream_id: Id in catalog and storage; default: the asset key joined by dots. If you rename the asset, keep it,
            and the asset keeps its state.
        name: Asset name; default: the function's name.
        options: How the stream runs, see `StreamOptions`; and `key_prefix`, `deps`, `group_name`, `description`
            (default: the function's docstring), `metadata`, `tags`, `code_version` (each snapshot records it),
            `owners`, `kinds` (three at most; default: spark and streaming) and `freshness_policy` (default:
            `default_freshness` of the checkpoint interval) as in `dagster.asset`.

    Example:
        >>> @streaming_asset(checkpointing=CheckpointConfig(interval=60_000))
        ... def orders(context, pyspark: SparkSessionResource) -> DataStreamWriter:
        ...     return pyspark.spark_session.readStream.table("raw").writeStream.format("parquet")
    """
    names = translator or StreamTranslator()
    parts = parts_of("streaming_asset", options, names, stream_id)

    def decorate(function: StreamFunction) -> StreamingAsset:
        spec, described = parts(name or function.__name__, inspect.getdoc(function))
        asset = dg.asset(
            **arguments_of(described),
            pool=pool,
            # The end of a run is no materialization.
            output_required=False,
            **_of_the_op(function, spec, names),
        )(_op_function(function, spec, names))
        described_by = describer(function, names)
        return StreamingAsset.of(asset, spec, translator=names, describe=described_by, function=function)

    return decorate if function is None else decorate(function)


def streaming_multi_asset(
    *,
    specs: Sequence[dg.AssetSpec],
    stream_id: str | None = None,
    name: str | None = None,
    description: str | None = None,
    code_version: str | None = None,
    pool: str | None = None,
    translator: StreamTranslator | None = None,
    **options: Unpack[StreamOptions],
) -> Callable[[StreamFunction], StreamingAsset]:
    """Make several assets of one query, for example one whose `foreachBatch` writes several tables.

    They share one stream id, start job and history: each checkpoint is reported on every asset. Assets cannot be
    materialized individually. The function and other options are as for `streaming_asset`.

    Args:
        specs: The first asset names the stream on the page. Default kinds: spark and streaming.
        stream_id: Id in catalog and storage; default: the name.
        name: Name of the op and of the query; default: the function's name.
        description: Description of the op; default: the function's docstring.
        code_version: Version of the query's code, for every spec.

    Example:
        >>> @streaming_multi_asset(specs=[dg.AssetSpec("good_orders"), dg.AssetSpec("bad_orders")])
        ... def orders(context, pyspark: SparkSessionResource) -> DataStreamWriter:
        ...     return pyspark.spark_session.readStream.table("raw").writeStream.foreachBatch(write_good_and_bad)
    """
    refuse_unknown("streaming_multi_asset", options, StreamOptions)
    names = translator or StreamTranslator()

    def decorate(function: StreamFunction) -> StreamingAsset:
        op_name = name or function.__name__
        spec = StreamSpec.of(stream_id or op_name, **options)
        if not specs:
            raise OptionError(
                f"streaming_multi_asset {op_name}: specs is empty. Name the assets that the query writes."
            )
        asset = dg.multi_asset(
            name=names.get_op_name(op_name),
            specs=[_output_of_a_stream(names.get_asset_spec(each), spec, code_version) for each in specs],
            description=description or inspect.getdoc(function),
            pool=pool,
            **_of_the_op(function, spec, names),
        )(_op_function(function, spec, names))
        described_by = describer(function, names)
        return StreamingAsset.of(asset, spec, translator=names, name=op_name, describe=described_by, function=function)

    return decorate


def arguments_of(spec: dg.AssetSpec) -> dict[str, Any]:
    return {
        "key": spec.key,
        "deps": spec.deps,
        "group_name": spec.group_name,
        "description": spec.description,
        "metadata": spec.metadata,
        "tags": {name: value for name, value in spec.tags.items() if not name.startswith(KIND_TAG_PREFIX)},
        "kinds": spec.kinds,
        "code_version": spec.code_version,
        "owners": spec.owners,
        "freshness_policy": spec.freshness_policy,
    }


def _output_of_a_stream(asset: dg.AssetSpec, stream: StreamSpec, code_version: str | None) -> dg.AssetSpec:
    refuse_unfit("streaming_multi_asset", asset.key, asset.automation_condition, asset.partitions_def)
    return asset.replace_attributes(
        skippable=True,
        kinds=asset.kinds or set(KINDS),
        freshness_policy=asset.freshness_policy or default_freshness(stream.options),
        code_version=asset.code_version if code_version is None else code_version,
    )


def _of_the_op(function: StreamFunction, spec: StreamSpec, translator: StreamTranslator) -> dict[str, Any]:
    return {
        "required_resource_keys": translator.keys_of(RESOURCES | set(_resources(function))),
        "config_schema": fields_of_run(config_class(function)),
        "op_tags": spec.tags_of_op(),
    }


def _resources(function: StreamFunction) -> list[str]:
    parameters = list(inspect.signature(function).parameters)
    if not parameters:
        raise OptionError(
            f"streaming_asset {function.__name__}: the function takes no parameters. Its first one is the Dagster "
            "context, the others name resources: def f(context, pyspark: SparkSessionResource)."
        )
    return [each for each in parameters[1:] if each != PARAMETER or config_class(function) is None]


def describer(
    function: StreamFunction,
    translator: StreamTranslator,
    config_of: Callable[[Any, type[dg.Config]], dg.Config] = config_in,
) -> QueryDescriber:
    """Make a function that calls the user's with resources from the attributes of an object."""
    keys = {each: translator.get_resource_key(each) for each in _resources(function)}
    kind = config_class(function)

    def describe(context: Any, resources: Any) -> "DataStreamWriter":
        config = {PARAMETER: config_of(context, kind)} if kind is not None else {}
        return function(context, **{each: getattr(resources, key) for each, key in keys.items()}, **config)

    return describe


def _op_function(
    function: StreamFunction, spec: StreamSpec, translator: StreamTranslator
) -> Callable[[dg.AssetExecutionContext], Iterator[Any]]:
    def streaming(context: dg.AssetExecutionContext) -> Iterator[Any]:
        # Only a run needs Spark.
        from dagster_ckpt.orchestration.stream_run import run_stream  # noqa: PLC0415

        resources = DeploymentResources.of(context.resources, translator)

        @cache
        def config_of(context: dg.AssetExecutionContext, kind: type[dg.Config]) -> dg.Config:
            return config_of_run(context, kind, spec.stream_id, resources.checkpoint_catalog)

        describe = describer(function, translator, config_of)
        yield from run_stream(
            context, spec, resources, lambda: describe(context, context.resources), check=refuse_retry_policy
        )

    # So that code references of the asset name the user's function.
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        place = {"co_filename": code.co_filename, "co_firstlineno": code.co_firstlineno, "co_name": code.co_name}
        # Each entry puts eight code units on the first line, so that a traceback names no line that was not executed.
        lines = b"\xef\x00" * (len(streaming.__code__.co_code) // 16 + 1)
        streaming.__code__ = streaming.__code__.replace(**place, co_linetable=lines)
    return streaming


# The catalog sensor reports once a minute, and Dagster accepts no shorter window.
SHORTEST_MS = 60_000
_LONGEST_MS = 100 * 365 * 86_400_000
_INTERVALS_TO_WARN = 3
_INTERVALS_TO_FAIL = 6


def default_freshness(options: CheckpointOptions) -> dg.FreshnessPolicy | None:
    """A policy that warns after three intervals without a checkpoint and fails after six; None without periodic ones.

    An interval counts as at least a minute.

    Example:
        >>> default_freshness(CheckpointConfig(interval=600_000).options).fail_window
        datetime.timedelta(seconds=3600)
    """
    if options.known_interval_ms is None:
        return None
    # Dagster cannot represent longer windows.
    interval_ms = min(max(options.known_interval_ms + options.min_pause, SHORTEST_MS), _LONGEST_MS)
    return dg.FreshnessPolicy.time_window(
        fail_window=timedelta(milliseconds=_INTERVALS_TO_FAIL * interval_ms),
        warn_window=timedelta(milliseconds=_INTERVALS_TO_WARN * interval_ms),
    )


class StreamResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Runs streams inside your own assets and ops.

    Example:
        >>> ORDERS = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=60_000))
        >>> @dg.asset(output_required=False)
        ... def orders(context, config: StreamRunConfig, streams: StreamResource):
        ...     yield from streams.run(context, ORDERS, describe=lambda spark: count_orders(spark).writeStream)
        >>> defs = stream_definitions(declare_stream(ORDERS, orders))
    """

    pyspark: dg.ResourceDependency[Any]
    checkpoint_storage: dg.ResourceDependency[CheckpointStorageResource]
    state_backend: dg.ResourceDependency[StateBackendResource]
    checkpoint_catalog: dg.ResourceDependency[CheckpointCatalogResource]

    def run(
        self, context: StepContext, spec: StreamSpec, *, describe: Callable[["SparkSession"], "DataStreamWriter"]
    ) -> "Generator[Any, None, Outcome | None]":
        """Run a stream until it ends, exactly as a `streaming_asset` does.

        The op's config decides where to start, if it has the fields of `StreamRunConfig`. Use `yield from`; the catalog
        sensor reports the checkpoints.

        Args:
            describe: Defines the query without starting it; called again for each restart in place.

        Returns:
            How it ended well: its input was consumed, or it was stopped, with `savepoint` if any. None after a
            `preflight`.

        Raises:
            dagster.Failure: The stream was canceled or failed, or the op has retries or required outputs. Do not catch
                it: Dagster would record a success.
        """
        # Only a run needs Spark.
        from dagster_ckpt.orchestration.stream_run import run_stream  # noqa: PLC0415

        resources = DeploymentResources(
            self.checkpoint_storage, self.state_backend, self.checkpoint_catalog, self.pyspark
        )
        return (
            yield from run_stream(context, spec, resources, lambda: describe(self.pyspark.spark_session), check=_refuse)
        )


def _refuse(context: StepContext) -> None:
    refuse_retry_policy(context)
    refuse_run_retries(context)
    refuse_required_outputs(context)


@overload
def declare_stream(
    spec: StreamSpec, runs_in: dg.AssetsDefinition, *, translator: StreamTranslator | None = None
) -> StreamingAsset: ...
@overload
def declare_stream(
    spec: StreamSpec,
    runs_in: dg.JobDefinition,
    *,
    op: str | None = None,
    translator: StreamTranslator | None = None,
) -> Stream: ...
def declare_stream(
    spec: StreamSpec,
    runs_in: dg.AssetsDefinition | dg.JobDefinition,
    *,
    op: str | None = None,
    translator: StreamTranslator | None = None,
) -> Stream:
    """Register a stream in your own asset or job with `stream_definitions`.

    Its checkpoints are then reported, its failures restarted, and operator jobs reach it. Do not add the definition to
    the code location separately.

    Args:
        runs_in: The asset, multi-asset or job whose op calls `StreamResource.run` with it.
        op: For a job: the name of that op; default: its only one.
        translator: Your own definition keeps its names.

    Example:
        >>> ORDERS = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=60_000))
        >>> defs = stream_definitions(declare_stream(ORDERS, orders_asset))
    """
    if isinstance(runs_in, dg.AssetsDefinition):
        _check_op(spec, runs_in.op)
        return StreamingAsset.of(runs_in, spec, translator=translator)
    if spec.op_tags or spec.hooks:
        raise OptionError(
            f"Stream {spec.stream_id} has op_tags or hooks, but its job is your own. Remove them, and give "
            f"{runs_in.name} the tags and hooks itself."
        )
    names = sorted(node.name for node in runs_in.nodes)
    if op is None and len(names) == 1:
        op = names[0]
    if op not in names:
        raise OptionError(
            f"Stream {spec.stream_id}: job {runs_in.name} has the ops {names}, and none is {op!r}. Name one as op."
        )
    definition = runs_in.get_node_named(op).definition
    if isinstance(definition, dg.OpDefinition):
        _check_op(spec, definition)
    return Stream(
        spec=spec,
        name=op,
        untranslated_name=op,
        keys=(),
        code_version=None,
        start_job=runs_in,
        translator=translator or StreamTranslator(),
    )


def _check_op(spec: StreamSpec, op: dg.OpDefinition) -> None:
    if op.retry_policy is not None:
        raise OptionError(
            f"Stream {spec.stream_id}: {op.name} has a RetryPolicy, so that Dagster would start it again after a "
            "cancel. Remove it: restarts come from the stream's restart_strategy."
        )
    fields = getattr(op.config_field.config_type if op.config_field else None, "fields", {})
    if "start_from" not in fields:
        raise OptionError(
            f"Stream {spec.stream_id}: {op.name} has no config that says where to start, so restart_stream_job could "
            "not start it. Give its function a parameter `config: StreamRunConfig`, or a subclass with fields of your "
            "own."
        )
