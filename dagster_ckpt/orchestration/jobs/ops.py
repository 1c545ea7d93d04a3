"""What the ops of all operator jobs share: the stream they operate, their errors, and tables for their pages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dagster as dg

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client import Client
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.assets.stream import Stream, find_stream, translator_of
from dagster_ckpt.orchestration.resources.defined_streams import DefinedStreams
from dagster_ckpt.orchestration.resources.resources import DeploymentResources
from dagster_ckpt.orchestration.runs.run_status import (
    OPERATION_TAG,
    refuse_overridden_resources,
    run_tags,
    transitions_in_run_log,
)
from dagster_ckpt.orchestration.sensors.reports import snapshot_metadata
from dagster_ckpt.orchestration.translator import OPERATOR_RESOURCES, RESOURCES
from dagster_ckpt.values.redaction import cause_to_show, without_secrets

STREAM_ID = "Stream id (or asset key) of the streaming asset, such as departure_delays."


@contextmanager
def errors_as_failure() -> Iterator[None]:
    """Turn our own errors into step failures with their message, without retries.

    The transitions of streams that the op causes are shown in the log of its run.
    """
    try:
        with transitions_in_run_log(dg.OpExecutionContext.get()):
            yield
    except CkptError as error:
        raise dg.Failure(
            without_secrets(str(error)), metadata={"dagster_ckpt/error": type(error).__name__}, allow_retries=False
        ) from cause_to_show(error)


class StreamOps:
    """Makes the ops and jobs of some streams, and finds the stream that a run operates.

    Args:
        streams: The streams. Other streams of the code location are not found.

    Raises:
        OptionError: The streams have different translators.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._translator = translator_of(streams)
        self._names: dict[str, str] = {}

    def op(self, function: Callable[..., Any]) -> dg.OpDefinition:
        """Make an op of a function that takes a context and a config."""
        return self._op(function, OPERATOR_RESOURCES)

    def op_with_spark(self, function: Callable[..., Any]) -> dg.OpDefinition:
        """Make an op that needs a Spark session as well."""
        return self._op(function, RESOURCES)

    def job(self, op: dg.OpDefinition) -> dg.JobDefinition:
        """The job of an op, which runs in the run's own process and has the op's description."""
        name = self._names[op.name]

        @dg.job(
            name=self._translator.get_job_name(f"{name}_job"),
            description=op.description,
            executor_def=dg.in_process_executor,
        )
        def operator_job() -> None:
            # A run config names the op like the function, even if a translator renames it.
            (op if op.name == name else op.alias(name))()

        return operator_job

    def stream(self, stream_id: str) -> Stream:
        """The stream with an id, or with the key of one of its assets.

        Raises:
            StreamNotFoundError: There is none among these.
        """
        return find_stream(self._streams, stream_id)

    def client(self, context: dg.OpExecutionContext, stream_id: str) -> Client:
        """The client through which an op operates these streams, in the name of its run.

        The run is tagged with the stream that it operates, so that the runs of a stream can be listed.

        Args:
            context: The op's context.
            stream_id: The stream that the run operates.

        Raises:
            StreamNotFoundError: There is no such stream among these.
            OptionError: The run's config changes a resource of the deployment.
        """
        stream = self.stream(stream_id)
        refuse_overridden_resources(context)
        client = Client.of_streams(
            DefinedStreams(self._streams, self.resources(context)),
            origin=f"{context.job_name} run {context.run_id}",
        )
        tags = run_tags(client.catalog, stream.stream_id)
        context.instance.add_run_tags(context.run_id, {**tags, OPERATION_TAG: context.op_handle.name})
        return client

    def resources(self, context: dg.OpExecutionContext) -> DeploymentResources:
        """The resources of these streams."""
        return DeploymentResources.of(context.resources, self._translator)

    def _op(self, function: Callable[..., Any], resources: Iterable[str]) -> dg.OpDefinition:
        # The ops of a code location have different names in Dagster, as its jobs have.
        name = self._translator.get_op_name(function.__name__)
        self._names[name] = function.__name__
        return dg.op(name=name, required_resource_keys=self._translator.keys_of(resources))(function)


def report_snapshot(context: dg.OpExecutionContext, snapshot: SnapshotRecord) -> str:
    """Show a snapshot in the log and on the page, and return its location."""
    location = snapshot.location or ""
    context.log.info(f"{snapshot.kind.lower()} at batch {snapshot.batch_id}: {location}")
    context.add_output_metadata(snapshot_metadata(snapshot))
    return location
