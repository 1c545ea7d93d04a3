"""What new code makes of the state, compared with the code that runs: both have processed the same batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError
from dagster_ckpt.recovery.live_directories import scratch_directory
from dagster_ckpt.spark.checkpoint_dir.layout import STATE, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.state.diff import StateDifference, differences, paired
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.stream.handle import StreamHandle

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# A comparison reads the whole state twice, which a preflight must not take hours for.
MOST_ROWS = 1_000_000


def compare_trial(
    stream: StreamHandle, session: Callable[[], SparkSession], live: LiveDirectory, tried: LiveDirectory, batch_id: int
) -> list[str]:
    """Compare the state that new code computed for a batch with that of the running code.

    Never fails: what cannot be compared is reported.

    Args:
        stream: The stream.
        session: Returns the session to read with.
        live: The live directory, in which the running code has committed the batch.
        tried: The copy, in which the new code has committed it.
        batch_id: The batch.

    Returns:
        Messages; none for a stateless query.
    """
    if not tried.folder.list(STATE):
        return []
    newest = stream.catalog.snapshots.newest_checkpoint(stream.stream_id)
    rows = newest.state_rows if newest is not None else None
    if rows is not None and rows > MOST_ROWS:
        return [f"the state of {rows:,} rows is not compared with that of the running code: more than {MOST_ROWS:,}"]
    try:
        with scratch_directory(stream) as copy:
            clone(live, copy, at_batch=batch_id, is_scratch=True)
            spark = session()
            before, after = StateReader(spark, copy, batch_id), StateReader(spark, tried, batch_id)
            found = differences(before, after, paired(before.states, after.states))
            return _messages(batch_id, found)
    except CkptError as error:
        return [f"the state after batch {batch_id} was not compared with that of the running code: {error}"]


def _messages(batch_id: int, found: list[StateDifference]) -> list[str]:
    changed = [state for state in found if not state.is_empty]
    if not changed:
        return [f"after batch {batch_id} the new code has the same state as the running code"]
    messages = []
    for state in changed:
        counts = ", ".join(f"{number} rows {change.lower()}" for change, number in state.counts.items() if number)
        note = f" ({state.note})" if state.note is not None else ""
        messages.append(
            f"after batch {batch_id} the new code has different state than the running code: "
            f"{state.name}: {counts}{note}"
        )
    return messages
