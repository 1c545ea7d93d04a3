"""Streams in your own assets and ops: `StreamResource` runs one, `declare_stream` registers it for the sensors."""

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, overload

import dagster as dg

from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.assets.stream import Stream, StreamingAsset, StreamSpec
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

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.runtime.run import Outcome


class StreamResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """Runs streams inside your own assets and ops.

    Example:
        >>> ORDERS = StreamSpec.of("orders", checkpointing=CheckpointConfig(interval=60_000))
        >>> @dg.asset(output_required=False)
        ... def orders(context, config: StreamRunConfig, streams: StreamResource):
        ...     yield from streams.run(context, ORDERS, describe=lambda spark: count_orders(spark).writeStream)
        >>> defs = stream_definitions(declare_stream(ORDERS, orders))
    """

    # Or any other resource with a `spark_session`.
    pyspark: dg.ResourceDependency[Any]
    checkpoint_storage: dg.ResourceDependency[CheckpointStorageResource]
    state_backend: dg.ResourceDependency[StateBackendResource]
    checkpoint_catalog: dg.ResourceDependency[CheckpointCatalogResource]

    def run(
        self, context: StepContext, spec: StreamSpec, *, describe: Callable[["SparkSession"], "DataStreamWriter"]
    ) -> "Generator[Any, None, Outcome | None]":
        """Run a stream until it ends, exactly as a `streaming_asset` does.

        The op's config decides where to start, if it has the fields of `StreamRunConfig`. Use `yield from`; the
        catalog sensor reports the checkpoints.

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

    Its checkpoints are then reported, its failures restarted, and operator jobs reach it. Do not add the definition to
    the code location separately.

    Args:
        runs_in: The asset, multi-asset or job whose op calls `StreamResource.run` with it.
        op: For a job: the name of that op; default: its only one.
        translator: As in `streaming_asset`; your own definition keeps its names.

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
