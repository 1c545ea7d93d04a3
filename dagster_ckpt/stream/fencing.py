"""Fence the previous holder's query before a successor starts.

A JVM whose process hangs or has lost the catalog may keep writing. The lease fences its catalog writes
(`Database.writing_under`). This module blocks further batches in its live directory and kills a JVM of this machine.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import LeaseRecord
from dagster_ckpt.catalog.transitions import log_transition
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import fence
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease
from dagster_ckpt.stream.liveness import JVM_GRACE_S, Liveness, jvm_of
from dagster_ckpt.stream.ownership import adopted_directory

# Wait for a batch in flight: twice the duration of the previous batch, within these bounds.
SHORTEST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0


def fence_predecessor(
    stream: StreamHandle,
    acquired: AcquiredLease,
    *,
    still_mine: Callable[[], None] = lambda: None,
    own_jvm_pid: int | None = None,
) -> None:
    """Stop the query of a previous holder that may still be alive before it can plan another batch.

    Afterwards the next start continues in a new directory. Does nothing if every previous holder is proven to have
    ended. `still_mine`, called before each step, raises LeaseLostError.
    """
    if acquired.predecessor_ended:
        return
    put_up_fence(stream, acquired, still_mine=still_mine, own_jvm_pid=own_jvm_pid)
    stream.catalog.leases.fenced(acquired.record)


def put_up_fence(
    stream: StreamHandle,
    acquired: AcquiredLease,
    *,
    still_mine: Callable[[], None],
    own_jvm_pid: int | None = None,
    is_followed: bool = True,
) -> None:
    """`fence_predecessor` without recording that in the lease.

    If `is_followed`, a query will continue from this directory, so waiting for the batch in flight pays off.
    """
    before = acquired.predecessor
    jvm_is_dead = before is not None and _end_jvm(stream.catalog, before, own_jvm_pid, still_mine)
    record = stream.catalog.streams.get(stream.stream_id)
    adopted = adopted_directory(record)
    # No query of this stream has run in a directory that is not yet taken over.
    is_ours = adopted is None or not adopted.is_pending
    live = LiveDirectory(record.live_directory) if record.live_directory is not None and is_ours else None
    if live is not None and live.exists():
        done = fence(
            live.folder,
            by=f"{acquired.record.execution_id}, lease {acquired.record.token}",
            wait_s=0.0 if jvm_is_dead or not is_followed else _wait_s(stream),
            still_mine=still_mine,
        )
        late = "" if done.in_flight is None else f"; batch {done.in_flight} was not committed and may still be written"
        log_transition(
            stream.stream_id,
            f"Fenced the previous query of stream {stream.stream_id}: it cannot plan batch {done.batch_id} in "
            f"{live.url}{late}",
            level=logging.WARNING,
        )


def refuse_a_fenced_directory(live: LiveDirectory) -> None:
    batch = live.fenced_at()
    if batch is not None:
        raise LiveDirectoryError(
            f"{live.url} was fenced before batch {batch}, because a holder of the lease may still be alive: no query "
            "starts in it. Start the stream again; it continues in a new directory."
        )


def _wait_s(stream: StreamHandle) -> float:
    latest = stream.catalog.executions.latest(stream.stream_id)
    took_ms = (latest.progress or {}).get("batch_ms") if latest is not None else None
    expected_s = 2 * took_ms / 1000 if isinstance(took_ms, int) else 0.0
    return min(max(expected_s, SHORTEST_WAIT_S), LONGEST_WAIT_S)


def _end_jvm(
    catalog: Catalog,
    before: LeaseRecord,
    own_jvm_pid: int | None,
    still_mine: Callable[[], None],
) -> bool:
    """Kill the JVM of an expired lease's holder, if it runs on this machine. True if it has ended.

    Spares a JVM of this process or of another lease in force.
    """
    jvm = jvm_of(before)
    if jvm is None or jvm.liveness() is not Liveness.ALIVE:
        return jvm is not None and jvm.liveness() is Liveness.ENDED
    others = catalog.leases.in_force_of_jvm(before.host, before.boot_id, jvm.pid)
    if jvm.pid in (own_jvm_pid, os.getpid()) or any(other.stream_id != before.stream_id for other in others):
        return False
    still_mine()
    has_ended = jvm.kill(within_s=JVM_GRACE_S)
    if has_ended:
        log_transition(
            before.stream_id,
            f"Killed JVM {jvm.pid} of run {before.run_id} of stream {before.stream_id}: its lease had expired, and its "
            "query could have continued to write",
            level=logging.WARNING,
        )
    return has_ended
