"""Taking over an adopted checkpoint directory: the query that wrote it can plan no further batch.

That query runs outside of this deployment, or did: no lease and no process id shows whether it has
ended. The fence of a lost holder works here too. Once it is up, the query's next write to its offset
log fails and ends it; the batch that it was running may still be written to the sink.

The stream then continues in a clone, or in place. In place, the fence is replaced by the plan of one
batch without data: at no moment can the other query plan that batch, even if it is idle until then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dagster_ckpt.catalog.transitions import log_transition
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.fence import Fence, fence, lift_fence, open_fence
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_commit_entry, plan_without_data
from dagster_ckpt.stream.adopted import adopted_directory, claim
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.values.durations import wall_clock_ms

# How long a batch in flight may take until it is committed. Nothing says how long it takes.
WAIT_S = 30.0


def take_over(
    stream: StreamHandle,
    lease: LeaseKeeper,
    *,
    resumes: bool,
    still_mine: Callable[[], None],
    wait_s: float = WAIT_S,
) -> bool:
    """Take over the adopted directory of a stream, if no start has done so yet. May be repeated.

    Args:
        stream: The stream.
        lease: Its lease.
        resumes: The start continues in the adopted directory itself, if it was adopted in place.
        still_mine: Called before each step; raises if the start has to stop.
        wait_s: How long to wait for a batch in flight.

    Returns:
        Whether the directory may have changed, so that a plan made before has to be made again.

    Raises:
        LiveDirectoryError: Another stream has taken the directory over, or it cannot be continued in place.
        LeaseLostError: The lease is no longer held.
        StorageAccessError: The directory cannot be read or written.
    """
    adopted = adopted_directory(stream.catalog.streams.get(stream.stream_id))
    if adopted is None or not adopted.is_pending:
        return False
    live = LiveDirectory(adopted.directory)
    if not live.exists():
        # Its query fails at its next write to a log.
        return False
    still_mine()
    with lease.step():
        claim(stream, live)
    by = f"stream {stream.stream_id} of deployment {stream.catalog.deployment_id}, lease {lease.record.token}"
    done = fence(live.folder, by=by, wait_s=wait_s, still_mine=still_mine, step=lease.step)
    late = "" if done.in_flight is None else f"; batch {done.in_flight} was not committed and may still be written"
    log_transition(
        stream.stream_id,
        f"Fenced the query that wrote {live.url}: it cannot plan batch {done.batch_id}{late}",
        level=logging.WARNING,
    )
    if adopted.in_place and resumes:
        _continue_in_place(stream, lease, live, done)
    return True


def _continue_in_place(stream: StreamHandle, lease: LeaseKeeper, live: LiveDirectory, done: Fence) -> None:
    if done.in_flight is not None or done.batch_id == 0:
        with lease.step():
            lift_fence(live.folder, done.batch_id)
        raise LiveDirectoryError(
            f"Stream {stream.stream_id!r} cannot continue in {live.url}: its batch {done.batch_id - 1} was planned and "
            "not committed while the start waited, and its query may still commit it. The fence was removed. "
            "Start again when that batch is committed. If its query was killed, adopt the directory "
            "without in_place: the batch is then run again in a copy."
        )
    batch_id = done.batch_id - 1
    offset, commit = f"{OFFSETS}/{batch_id}", f"{COMMITS}/{batch_id}"
    committed = parse_commit_entry(live.folder.read(commit), f"{live.url}/{commit}")
    entry = plan_without_data(live.folder.read(offset), f"{live.url}/{offset}", committed, now_ms=wall_clock_ms())
    # First the catalog: a start that dies in between leaves a fenced directory, from which the next one
    # continues in a clone.
    stream.catalog.streams.restore_finished(lease.record)
    with lease.step():
        open_fence(live.folder, done.batch_id, entry)
