"""Decide who may write a stream's directories.

Environments that share a folder by mistake, or a copied catalog, would delete each other's data. So the folder of live
directories and every snapshot carry the id of their deployment, and a start writes only to the stream's folders or to
an adopted directory.

The query of an adopted directory may run until the stream's first start leaves its claim there, as only one deployment
can. Until then, its snapshots are no recovery points: a restore would roll back that query's sinks.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.event_log import log_transition
from dagster_ckpt.catalog.pending_restore import Adopting, ToTakeOver
from dagster_ckpt.catalog.records import LeaseRecord, OriginKind, SnapshotRecord, StreamRecord
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import fence
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import AcquiredLease
from dagster_ckpt.stream.liveness import JVM_GRACE_S, Liveness, jvm_of
from dagster_ckpt.stream.snapshots import describe_snapshot
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

OWNER = "deployment"
_LONGEST_OWNER = 256
_RESUMES = frozenset({StartPoint.LATEST, StartPoint.BATCH})


def check_places(stream: StreamHandle, start_from: StartFrom | None, *, predecessor_ended: bool) -> None:
    """Refuse an operation on another deployment's files, or on files that the catalog does not know.

    Call it before anything is written, killed or fenced. Without `start_from`, the state comes from elsewhere.
    """
    record = stream.catalog.streams.get(stream.stream_id)
    resumes = start_from is not None and start_from.point in _RESUMES
    adopted = adopted_directory(record)
    if adopted is not None:
        if resumes and not adopted.is_pending:
            refuse_without_claim(stream, LiveDirectory(adopted.directory))
    elif lies_elsewhere(stream, record) and (resumes or not predecessor_ended):
        raise LiveDirectoryError(
            f"According to the catalog, the live directory of stream {stream.stream_id!r} is {record.live_directory}, "
            f"but those of this code location are below {stream.live_folder}. Nothing was changed. If the catalog is "
            "a copy from another environment, that directory belongs to the other environment: use a new catalog. If "
            "only the folder of live directories was changed, set it back, or name a snapshot with start_from (such "
            "as chk-7): it is restored into the new folder."
        )
    _refuse_anothers_folder(stream)
    if start_from is None or not start_from.discard_state:
        _refuse_older_catalog(stream, record)


def _refuse_older_catalog(stream: StreamHandle, record: StreamRecord) -> None:
    """Refuse a catalog from a backup if the query has since used directories that it does not know."""
    if not stream.directories_ahead(record):
        return
    # If this process was paused, its successor has registered them, and the lease refuses what comes next.
    record = stream.catalog.streams.get(stream.stream_id)
    ahead = stream.directories_ahead(record)
    if not ahead:
        return
    listed = "\n".join(f"- {built.live.url}, up to batch {built.live.positions().commit}" for built in ahead)
    raise LiveDirectoryError(
        f"The catalog is older than the live directories of stream {stream.stream_id!r}: it lists "
        f"{record.live_directory or 'none any more'}, number {record.live_generation}, but the query has since moved "
        "to later ones. The catalog was restored from a backup, or it is a copy. Nothing was changed. Found:\n"
        f"{listed}\n"
        "Restore the newest backup, or register these directories with rebuild_catalog_job or dagster-ckpt rebuild: "
        "the next start continues in the newest one. To discard all of this, start with start_from=empty and "
        "discard_state."
    )


def claim_live_folder(stream: StreamHandle) -> None:
    if owner_of_live_folder(stream) is None:
        LiveDirectory(stream.live_folder).folder.create_if_absent(OWNER, stream.catalog.deployment_id.encode())
    _refuse_anothers_folder(stream)


def _refuse_anothers_folder(stream: StreamHandle) -> None:
    owner = other_owner_of_live_folder(stream)
    if owner is not None:
        raise LiveDirectoryError(
            f"{stream.live_folder} contains the live directories of deployment {owner}, but this catalog belongs to "
            f"deployment {stream.catalog.deployment_id}. Nothing was changed. If the other deployment still exists, "
            f"both use the same folder by mistake: give this one its own folder. {IF_LOST.format(owner=owner)}"
        )


IF_LOST = (
    "If its catalog was lost and none of its streams is running, register its state: rebuild_catalog_job with "
    "take_over_deployment: {owner}, or dagster-ckpt rebuild --take-over-deployment {owner}."
)


def owner_of_live_folder(stream: StreamHandle) -> str | None:
    try:
        return LiveDirectory(stream.live_folder).folder.read(OWNER, _LONGEST_OWNER).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def lies_elsewhere(stream: StreamHandle, record: StreamRecord) -> bool:
    live = record.live_directory
    return live is not None and not same_folder(live.rstrip("/").rpartition("/")[0], stream.live_folder)


def other_owner_of_live_folder(stream: StreamHandle) -> str | None:
    owner = owner_of_live_folder(stream)
    return owner if owner != stream.catalog.deployment_id else None


def disown_live_folder(stream: StreamHandle) -> None:
    if other_owner_of_live_folder(stream) is None:
        LiveDirectory(stream.live_folder).folder.delete(OWNER)


CLAIM = "adopted-by"
# Property of a snapshot taken before a start took the directory over: the directory.
ADOPTED_FROM = "adopted_from"
_LONGEST_CLAIM = 1024


@dataclass(frozen=True)
class Adopted:
    """The adopted directory that is a stream's current live directory.

    Attributes:
        in_place: The stream's query runs in it, instead of in a clone.
        is_pending: No start of the stream has taken it over yet.
    """

    directory: str
    in_place: bool
    is_pending: bool


def adopted_directory(record: StreamRecord) -> Adopted | None:
    origin, live = record.origin, record.live_directory
    if origin is None or origin.kind is not OriginKind.ADOPTED or origin.directory is None or live is None:
        return None
    if not same_folder(live, origin.directory):
        return None
    pending = record.pending_restore
    finished = pending.before if isinstance(pending, Adopting) else pending
    if isinstance(finished, ToTakeOver):
        return Adopted(live, finished.in_place, is_pending=True)
    return Adopted(live, in_place=True, is_pending=False)


def refuse_unfinished_adoption(record: StreamRecord) -> None:
    if isinstance(record.pending_restore, Adopting):
        directory = record.pending_restore.directory
        raise LiveDirectoryError(
            f"The adoption of {directory} for stream {record.stream_id!r} was begun and not finished, so nothing would "
            "fence the query that wrote it. Nothing was changed. Repeat the adoption, which finishes it "
            f"(adopt_stream_job, or dagster-ckpt adopt {record.stream_id} {directory} with the same options), or drop "
            f"it: dagster-ckpt adopt {record.stream_id} {directory} --undo."
        )


def unclaimed_directory(stream: StreamHandle, snapshot: SnapshotRecord | None) -> str | None:
    """The adopted directory if its query may still run: it exists, and was never taken over."""
    directory = (snapshot.properties if snapshot is not None else {}).get(ADOPTED_FROM)
    if not isinstance(directory, str):
        return None
    live = LiveDirectory(directory)
    return directory if live.exists() and claim_of(live) != _claim(stream) else None


def refuse_unclaimed(stream: StreamHandle, snapshot: SnapshotRecord | None) -> None:
    """Refuse a snapshot of an adopted directory that the stream has not taken over, and will not.

    Its restore would run at the same time as the query that wrote it.
    """
    if stream.catalog.streams.get(stream.stream_id).live_directory is not None:
        # The adopted directory, which this start takes over, or one of the stream's own, after that.
        return
    directory = unclaimed_directory(stream, snapshot)
    if snapshot is not None and directory is not None:
        raise LiveDirectoryError(
            f"Stream {stream.stream_id!r} is not started from {describe_snapshot(snapshot)}, nothing was changed: it "
            f"was taken when {directory} was adopted, and no start has taken that directory over. Its query may still "
            f"write to the sinks that the restore would roll back. Adopt the directory again (dagster-ckpt adopt "
            f"{stream.stream_id} {directory}) and then start from latest or from that snapshot."
        )


def claim_of(live: LiveDirectory) -> str | None:
    try:
        data = live.folder.read(CLAIM, _LONGEST_CLAIM)
    except FileNotFoundError:
        return None
    return data.decode(errors="replace").strip()


def claim(stream: StreamHandle, live: LiveDirectory) -> None:
    """Leave the stream's claim in a directory; LiveDirectoryError if it has another one."""
    if claim_of(live) is None:
        live.folder.create_if_absent(CLAIM, _claim(stream).encode())
    refuse_without_claim(stream, live)


def refuse_without_claim(stream: StreamHandle, live: LiveDirectory) -> None:
    found = claim_of(live)
    if found != _claim(stream):
        raise LiveDirectoryError(
            f"{live.url} was adopted for stream {stream.stream_id!r} of deployment {stream.catalog.deployment_id}, but "
            f"its file {CLAIM} says: {found or 'there is none'}. Nothing was started there. If that one continues the "
            "query, import one of its snapshots with other outputs instead (import_stream_job). If it no longer "
            "exists, delete that file and start again."
        )


def _claim(stream: StreamHandle) -> str:
    return json.dumps({"deployment": stream.catalog.deployment_id, "stream": stream.stream_id})


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

    The next start then continues in a new directory. Before each step, `still_mine` may raise LeaseLostError.
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
    """Fence a predecessor without recording that in the lease.

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


def _end_jvm(catalog: Catalog, before: LeaseRecord, own_jvm_pid: int | None, still_mine: Callable[[], None]) -> bool:
    """Kill the JVM of an expired lease's holder, if it runs on this machine; return whether it has ended.

    JVMs of this process and of other leases are spared.
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
