"""The state that a described query has after input that another one has read, in a directory of its own.

One batch without output reads all of it. A second one has no input and the watermark of that query's newest batch, so
that what was complete then is complete here.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_ckpt.errors import StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import (
    parse_offset_entry,
    query_metadata,
    with_sources,
    with_watermark,
)
from dagster_ckpt.spark.checkpoint_dir.restore import Watch
from dagster_ckpt.spark.query.trial_batch import describe_trial_error, run_trial

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_BATCH_S = 24 * 3600.0


def make_fresh_state(
    describe: Callable[[], DataStreamWriter],
    live: LiveDirectory,
    target: LiveDirectory,
    *,
    reads_input: bool,
    watch: Watch,
) -> None:
    """Fill a new directory with the state of a query after the newest batch of `live`, or after no input.

    On an error, the caller deletes the directory. `watch` is called while Spark runs, and may raise.
    """
    newest = live.positions().commit
    if newest is None:
        raise StateRewriteError(f"{live.url} has no committed batch, so there is no state to migrate.")
    path = f"{OFFSETS}/{newest}"
    where = f"{live.url}/{path}"
    data = live.folder.read(path)
    planned = parse_offset_entry(data, where)
    if not reads_input:
        data = with_sources(data, where, dict.fromkeys(planned.sources))
    folder = target.folder
    folder.make()
    folder.place(METADATA, [query_metadata(str(uuid.uuid4()))])
    for name, _entry in list(live.folder.find(SOURCES)) if reads_input else ():
        folder.place(name, [live.folder.read(name)])
    _run(describe, target, 0, with_watermark(data, where, 0), watch)
    if reads_input and planned.watermark_ms > 0:
        _run(describe, target, 1, data, watch)


def _run(
    describe: Callable[[], DataStreamWriter], target: LiveDirectory, batch_id: int, plan: bytes, watch: Watch
) -> None:
    def stopped() -> bool:
        watch()
        return False

    target.folder.place(f"{OFFSETS}/{batch_id}", [plan])
    name = f"fresh state {uuid.uuid4()}"
    trial = run_trial(describe, target, name, replays=True, timeout_s=_BATCH_S, interrupted=stopped)
    if trial.batch_id == batch_id:
        return
    if trial.data_is_gone:
        raise StateRewriteError(
            f"The state cannot be built from its input, which is gone or was changed: {trial.error}. Nothing was "
            "changed. Bring the input back, or start from a point whose input is there."
        )
    why = describe_trial_error(trial.error) if trial.error is not None else "Spark ran no batch"
    raise StateRewriteError(f"The state of the new code cannot be made: {why}. Nothing was changed.")
