"""Streams in your own assets and ops: `StreamResource` runs one, `declare_stream` registers it for the sensors."""

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, overload

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.assets.stream import Stream, StreamingAsset, StreamSpec, find_stream
from dagster_ckpt.orchestration.resources.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    DeploymentResources,
    StateBackendResource,
)
from dagster_ckpt.orchestration.runs.run_status import (
    StepContext,
    refuse_required_outputs,
    refuse_retry_policy,
    refuse_run_retries,
)
from dagster_ckpt.orchestration.translator import StreamTranslator
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.runtime.run import Outcome


class StreamResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Runs streams inside your own assets and ops.

    Its four parts are the resources that every code location with streams has.

    Example:
        >>> ORDERS = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=60_000))
        >>> @dg.asset(output_required=False)
        ... def orders(context, config: StreamRunConfig, streams: StreamResource):
        ...     yield from streams.run(context, ORDERS, describe=lambda spark: count_orders(spark).writeStream)
        >>> defs = stream_definitions(declare_stream(ORDERS, orders))
    """

    # A `SparkSessionResource`, or any other with a `spark_session`.
    pyspark: dg.ResourceDependency[Any]
    checkpoint_storage: dg.ResourceDependency[CheckpointStorageResource]
    state_backend: dg.ResourceDependency[StateBackendResource]
    checkpoint_catalog: dg.ResourceDependency[CheckpointCatalogResource]

    def run(
        self, context: StepContext, spec: StreamSpec, *, describe: Callable[["SparkSession"], "DataStreamWriter"]
    ) -> "Generator[Any, None, Outcome | None]":
        """Run a stream until it ends, is stopped, canceled or interrupted, exactly as a `streaming_asset` does.

        The op's config decides where to start, if it has the fields of `StreamRunConfig`.

        Args:
            context: The context of the asset or op.
            spec: The stream.
            describe: Defines the query without starting it; called again for each restart in place.

        Yields:
            Events for Dagster. Currently there are none, because the catalog sensor reports the
            checkpoints; use `yield from` anyway.

        Returns:
            How the stream ended, if it ended well: a bounded input was consumed, or the stream was
            stopped. `savepoint` is the savepoint that it was stopped with. None if the run only tried the
            code (`preflight`).

        Raises:
            dagster.Failure: The stream was canceled or failed, or this op must not run one because
                Dagster retries it or its run, or because it has required outputs. Do not catch it:
                otherwise Dagster would record a success.
        """
        # Imported here: only a run needs Spark, not the definition of an asset.
        from dagster_ckpt.orchestration.runs.stream_run import run_stream  # noqa: PLC0415

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

    Its checkpoints are then reported, its failures restarted, and the operator jobs can reach it.
    Pass the result to `stream_definitions` and do not add the definition to the code location
    separately.

    Args:
        spec: The stream.
        runs_in: The asset, multi-asset or job whose op calls `StreamResource.run` with it.
        op: For a job: the name of that op; default: its only one.
        translator: Names the jobs, sensors and schedules around it, and says which resources these use.
            Your own definition keeps its names.

    Raises:
        OptionError: The op's config has no starting point, the op has a retry policy, or the job has
            several ops.

    Example:
        >>> ORDERS = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=60_000))
        >>> defs = stream_definitions(declare_stream(ORDERS, orders_asset))
    """
    if isinstance(runs_in, dg.AssetsDefinition):
        _check_op(spec, runs_in.op)
        return StreamingAsset.of(runs_in, spec, translator=translator)
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
            "cancel. "
            "Remove it: restarts come from the stream's restart_strategy."
        )
    fields = getattr(op.config_field.config_type if op.config_field else None, "fields", {})
    if "start_from" not in fields:
        raise OptionError(
            f"Stream {spec.stream_id}: {op.name} has no config that says where to start, so restart_stream_job could "
            "not start it. Give its function a parameter `config: StreamRunConfig`, or a subclass with fields of your "
            "own."
        )


def stream_handle(stream: Stream, resources: DeploymentResources) -> StreamHandle:
    """Create the handle of a stream, for operators."""
    return open_stream(stream.spec, resources, name=stream.name, writes=stream.writes, code_version=stream.code_version)


def open_stream(
    spec: StreamSpec,
    resources: DeploymentResources,
    *,
    name: str,
    writes: str,
    code_version: str | None,
) -> StreamHandle:
    """Create the handle of a stream.

    A storage set in the stream's `CheckpointConfig` overrides the deployment's resource, as in
    Flink, and inherits its unset options from it.

    Args:
        spec: The stream.
        resources: Its checkpoint storage, state backend and catalog.
        name: Name of its query in Spark.
        writes: The assets it writes, or its name outside assets.
        code_version: Version of the code that defines the query.
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
    )


class DefinedStreams:
    """The streams of a code location as a client opens them: with the settings of their definitions.

    Args:
        streams: The streams.
        resources: Their checkpoint storage, state backend and catalog.
    """

    def __init__(self, streams: Sequence[Stream], resources: DeploymentResources) -> None:
        self._streams = streams
        self._resources = resources
        self.catalog: Catalog = resources.checkpoint_catalog.catalog()

    def id_of(self, stream: str) -> str:
        """The id of a stream.

        Raises:
            StreamNotFoundError: This code location has no such stream.
        """
        return find_stream(self._streams, stream).stream_id

    def on_storage(self) -> list[str]:
        """Ids of all streams of the code location."""
        return [stream.stream_id for stream in self._streams]

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        """Open a stream, whether or not it was ever started.

        Raises:
            StreamNotFoundError: This code location has no such stream.
        """
        del new_like  # its own definition has every setting
        return stream_handle(find_stream(self._streams, stream), self._resources)
