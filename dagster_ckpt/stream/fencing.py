"""Before a successor starts: the query of a holder that is not proven to have ended is kept from writing on.

A holder whose Python process hangs, or whose machine is cut off from the catalog, may have a JVM that goes on. Its
lease fences its catalog writes; here its query is fenced, by its own live directory and, on the same machine, by ending
its JVM.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import LeaseRecord
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.fence import fence
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease
from dagster_ckpt.stream.liveness import JVM_GRACE_S, Liveness, ProcessIdentity, jvm_of

# A batch in flight is waited for as long as twice what the batch before it took, within these.
SHORTEST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0


def fence_predecessor(
    stream: StreamHandle,
    acquired: AcquiredLease,
    *,
    still_mine: Callable[[], None] = lambda: None,
    own_jvm_pid: int | None = None,
    report: Callable[[str], None] = lambda _sentence: None,
) -> None:
    """Let the query of a holder that may still live end before it can plan another batch.

    Does nothing where every holder before is proven to have ended. After it the live directory is one to go on from,
    never one to start in, whoever starts next: also where this process dies.

    Args:
        stream: The stream, whose lease this process holds.
        acquired: That lease, and what is known of the holder before.
        still_mine: Called before each step; raises LeaseLostError where another has the lease by now.
        own_jvm_pid: The JVM that works for this process.
        report: Told what was done.

    Raises:
        LeaseLostError: Another execution has taken the lease.
        StorageAccessError: The live directory cannot be read or written.
    """
    if acquired.predecessor_ended:
        return
    put_up_fence(stream, acquired, still_mine=still_mine, own_jvm_pid=own_jvm_pid, report=report)
    stream.catalog.leases.fenced(acquired.record)


def put_up_fence(
    stream: StreamHandle,
    acquired: AcquiredLease,
    *,
    still_mine: Callable[[], None],
    own_jvm_pid: int | None = None,
    report: Callable[[str], None] = lambda _sentence: None,
    is_followed: bool = True,
) -> None:
    """As `fence_predecessor`, where a holder before is not proven to have ended; the lease goes on saying so.

    Args:
        stream: The stream, whose lease this process holds.
        acquired: That lease, and what is known of the holder before.
        still_mine: Called before each step; raises LeaseLostError where another has the lease by now.
        own_jvm_pid: The JVM that works for this process.
        report: Told what was done.
        is_followed: A query is to go on from here, so the batch in flight is waited for.

    Raises:
        LeaseLostError: Another execution has taken the lease.
        StorageAccessError: The live directory cannot be read or written.
    """
    before = acquired.predecessor
    jvm_is_dead = before is not None and _end_jvm(stream.catalog, before, own_jvm_pid, still_mine, report)
    url = stream.catalog.streams.get(stream.stream_id).live_directory
    live = LiveDirectory(url) if url is not None else None
    if live is not None and live.exists():
        done = fence(
            live.folder,
            by=f"{acquired.record.execution_id}, lease {acquired.record.token}",
            wait_s=0.0 if jvm_is_dead or not is_followed else _wait_s(stream),
            still_mine=still_mine,
        )
        late = "" if done.in_flight is None else f"; batch {done.in_flight} was not committed and may still be written"
        report(f"{live.url} is fenced: its query cannot begin batch {done.batch_id}{late}")


def refuse_a_fenced_directory(live: LiveDirectory) -> None:
    """Make sure that a query is never started where one was fenced off.

    Raises:
        LiveDirectoryError: It was.
    """
    batch = live.fenced_at()
    if batch is not None:
        raise LiveDirectoryError(
            f"{live.url} was fenced before batch {batch}, as a holder of the lease may still live: nothing starts in "
            "it. Start the stream again; it goes on in a fresh directory."
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
    report: Callable[[str], None],
) -> bool:
    """End the JVM of a holder whose lease has run out, where it runs on this machine; True once it has ended.

    One that works for this process, or for another lease that is in force, is left alone.
    """
    jvm = jvm_of(before)
    if jvm is None or jvm.liveness() is not Liveness.ALIVE:
        return jvm is not None and jvm.liveness() is Liveness.ENDED
    others = catalog.leases.in_force_of_jvm(before.host, before.boot_id, jvm.pid)
    if jvm.pid in (own_jvm_pid, os.getpid()) or any(other.stream_id != before.stream_id for other in others):
        return False
    still_mine()
    # Asked once more by the handle of the process itself, which is of no other that has its number later.
    with suppress(ProcessLookupError, PermissionError):
        _kill(jvm)
    deadline = time.monotonic() + JVM_GRACE_S
    while jvm.liveness() is Liveness.ALIVE and time.monotonic() < deadline:
        time.sleep(0.05)
    has_ended = jvm.liveness() is Liveness.ENDED
    if has_ended:
        report(
            f"the JVM {jvm.pid} of run {before.run_id} was killed: its lease had run out, and its query might have "
            "written on"
        )
    return has_ended


def _kill(process: ProcessIdentity) -> None:
    if not hasattr(os, "pidfd_open"):
        os.kill(process.pid, signal.SIGKILL)
        return
    handle = os.pidfd_open(process.pid)
    try:
        if process.liveness() is Liveness.ALIVE:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
