"""Reports from a program to the Dagster run that started it, through Dagster Pipes.

Checkpoints are not reported here: the catalog sensor reports them for all processes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.transitions import forwarded_log
from dagster_ckpt.errors import CkptError
from dagster_ckpt.flink.program import StreamExecution

if TYPE_CHECKING:
    from dagster_pipes import PipesContext

# Dagster keeps every line forever, a few hundred bytes each; at this rate a day takes a third of a
# megabyte.
PROGRESS_INTERVAL_S = 60.0
# Set by Dagster for a process that it starts through Pipes.
PIPES_VARIABLE = "DAGSTER_PIPES_CONTEXT"


class PipesReport:
    """Reports the end of a stream to the Dagster run that started the program, if there is a Pipes context.

    Args:
        context: The Pipes context, or None.
    """

    def __init__(self, context: PipesContext | None) -> None:
        self._context = context

    @property
    def run_id(self) -> str | None:
        """The Dagster run that started this process through Pipes."""
        return self._context.run_id if self._context is not None else None

    def ended(self, execution: StreamExecution) -> None:
        """Report how the stream ended, as a custom message: `PipesClientCompletedInvocation.get_custom_messages`."""
        if self._context is not None:
            self._context.report_custom_message(
                {
                    "dagster_ckpt/stream_id": execution.stream_id,
                    "dagster_ckpt/execution_id": execution.execution_id,
                    "dagster_ckpt/end": execution.end.value,
                    "dagster_ckpt/savepoint": execution.savepoint,
                }
            )


@contextmanager
def pipes_report(
    catalog: Catalog,
    stream_id: str,
    *,
    interval_s: float = PROGRESS_INTERVAL_S,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[PipesReport]:
    """Pass a stream's log, its progress and its end to Dagster through Pipes while a program runs.

    Does nothing without a Pipes context.

    Args:
        catalog: The catalog with the progress of the running query.
        stream_id: The stream that is running.
        interval_s: Minimum time between two progress messages in Dagster's log.
        environment: Contains the Pipes context, if any.
    """
    if PIPES_VARIABLE not in environment:
        yield PipesReport(None)
        return
    # Imported here: most programs are not started through Pipes.
    from dagster_pipes import PipesContext, open_dagster_pipes  # noqa: PLC0415

    is_ours = not PipesContext.is_initialized()
    context = open_dagster_pipes()
    is_over = threading.Event()

    def report_progress() -> None:
        last = None
        while not is_over.wait(interval_s):
            message = progress_message(catalog, stream_id)
            if message != last:
                context.log.info(message)
            last = message

    reporter = threading.Thread(target=report_progress, name=f"pipes-{stream_id}", daemon=True)
    reporter.start()
    try:
        with forwarded_log(context.log.log, stream_id=stream_id):
            yield PipesReport(context)
    except BaseException as error:
        # Pipes sends only the message, not a traceback.
        context.log.error(f"{stream_id}: ended by {type(error).__name__}: {error}")  # noqa: TRY400
        raise
    finally:
        is_over.set()
        reporter.join()
        if is_ours:
            context.close()


def progress_message(catalog: Catalog, stream_id: str) -> str:
    """The stream's progress, from the catalog."""
    try:
        execution = catalog.executions.latest(stream_id)
        snapshots = catalog.snapshots.completed(stream_id)
    except CkptError as error:
        return f"{stream_id}: the catalog did not answer ({type(error).__name__})"
    figures = (execution.progress if execution is not None else None) or {}
    newest = f"newest snapshot at batch {snapshots[0].batch_id}" if snapshots else "no snapshot yet"
    return f"{stream_id}: batch {figures.get('batch_id')}, {figures.get('input_rows')} input rows, {newest}"
