"""The transitions of streams in the log of a Dagster run."""

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg

from dagster_ckpt.catalog.transitions import PACKAGE_LOGGER, forwarded_log


@contextmanager
def transitions_in_run_log(
    context: dg.OpExecutionContext | dg.AssetExecutionContext, stream_id: str | None = None
) -> Iterator[None]:
    """Show the transitions of a stream, or of every stream that this process changes, in the log of a run.

    Does nothing if Dagster captures this package's logger itself (`managed_python_loggers` in
    `dagster.yaml`), so that no line is shown twice.
    """
    managed = context.instance.managed_python_loggers
    if any(name == "root" or name.split(".")[0] == PACKAGE_LOGGER for name in managed):
        yield
        return
    with forwarded_log(context.log.log, stream_id=stream_id):
        yield
