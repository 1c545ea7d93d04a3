"""What the ops of all operator jobs share: the stream they operate, their errors, and tables for their pages."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import dagster as dg

from dagster_ckpt.catalog.records import SnapshotRecord
from dagster_ckpt.client import Client
from dagster_ckpt.config.redaction import cause_to_show, without_secrets
from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.assets.stream import Stream
from dagster_ckpt.orchestration.resources.stream_resource import DefinedStreams
from dagster_ckpt.orchestration.runs.run_status import transitions_in_run_log
from dagster_ckpt.orchestration.sensors.snapshot_report import snapshot_metadata

RESOURCES = {"checkpoint_storage", "state_backend", "checkpoint_catalog"}
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


def job_of_op(name: str, op: dg.OpDefinition) -> dg.JobDefinition:
    """A job with one op, which runs in the run's own process and has the op's description."""

    @dg.job(name=name, description=op.description, executor_def=dg.in_process_executor)
    def operator_job() -> None:
        op()

    return operator_job


def client_of(context: dg.OpExecutionContext, streams: Sequence[Stream]) -> Client:
    """The client through which an op operates the streams of its code location, in the name of its run."""
    source = DefinedStreams(streams, context.resources)
    return Client.of_streams(source, origin=f"{context.job_name} run {context.run_id}")


def report_snapshot(context: dg.OpExecutionContext, snapshot: SnapshotRecord) -> str:
    """Show a snapshot in the log and on the page, and return its location."""
    location = snapshot.location or ""
    context.log.info(f"{snapshot.kind.lower()} at batch {snapshot.batch_id}: {location}")
    context.add_output_metadata(snapshot_metadata(snapshot))
    return location


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, at_most: int | None = None) -> str:
    """A Markdown table, or "none" without rows.

    Args:
        header: Headings of the columns.
        rows: Cells.
        at_most: Maximum number of rows; the number of omitted rows is shown below the table.
    """
    every = list(rows)
    shown = every if at_most is None else every[:at_most]
    if not shown:
        return "none"
    lines = map(_row, [header, ["---"] * len(header), *shown])
    more = len(every) - len(shown)
    return "\n".join(lines) + (f"\n\nand {more} more" if more else "")


def _row(cells: Sequence[object]) -> str:
    # A vertical bar or a line break would end the cell.
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
