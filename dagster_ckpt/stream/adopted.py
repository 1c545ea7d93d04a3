"""An adopted checkpoint directory: one that plain Spark wrote, and from which a stream continues.

Until the stream's first start, the query that wrote the directory may still run; adopting only reads.
A snapshot of it is then no recovery point: a restore would roll back the sinks of that query. So an
adoption is registered as begun before its snapshot is taken, and until it is finished or dropped every
start is refused. The start takes the directory over. It first leaves a claim there, which names the stream and its
deployment: two deployments may have adopted the same directory, and only one may continue from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dagster_ckpt.catalog.pending_restore import Adopting, ToTakeOver
from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, StreamRecord
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshots import describe_snapshot

CLAIM = "adopted-by"
# Property of a snapshot that was taken before a start took the directory over: the directory.
ADOPTED_FROM = "adopted_from"
_LONGEST = 1024


@dataclass(frozen=True)
class Adopted:
    """The adopted directory that is a stream's current live directory.

    Attributes:
        directory: The directory.
        in_place: The stream's query runs in this very directory, instead of in a clone.
        is_pending: No start of the stream has taken it over yet.
    """

    directory: str
    in_place: bool
    is_pending: bool


def adopted_directory(record: StreamRecord) -> Adopted | None:
    """The adopted directory of a stream; None if its live directory is one that it created."""
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
    """Refuse to use a stream whose adoption was begun and not finished.

    Raises:
        LiveDirectoryError: It was.
    """
    if isinstance(record.pending_restore, Adopting):
        directory = record.pending_restore.directory
        raise LiveDirectoryError(
            f"The adoption of {directory} for stream {record.stream_id!r} was begun and not finished, so nothing would "
            "fence the query that wrote it. Nothing was changed. Repeat the adoption, which finishes it "
            f"(adopt_stream_job, or dagster-ckpt adopt {record.stream_id} {directory} with the same options), or drop "
            f"it: dagster-ckpt adopt {record.stream_id} {directory} --undo."
        )


def unclaimed_directory(stream: StreamHandle, snapshot: SnapshotRecord | None) -> str | None:
    """The adopted directory of a snapshot if its query may still run: it exists, and the stream never took it over.

    Raises:
        StorageAccessError: The directory cannot be reached.
    """
    directory = (snapshot.properties if snapshot is not None else {}).get(ADOPTED_FROM)
    if not isinstance(directory, str):
        return None
    live = LiveDirectory(directory)
    return directory if live.exists() and claim_of(live) != _claim(stream) else None


def refuse_unclaimed(stream: StreamHandle, snapshot: SnapshotRecord | None) -> None:
    """Refuse to restore a snapshot of an adopted directory beside the query that wrote it.

    Raises:
        LiveDirectoryError: The stream has not taken that directory over, and will not.
        StorageAccessError: The directory cannot be reached.
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
    """The claim in a checkpoint directory: who has taken it over, as text; None if there is none.

    Raises:
        StorageAccessError: The directory cannot be reached.
    """
    try:
        data = live.folder.read(CLAIM, _LONGEST)
    except FileNotFoundError:
        return None
    return data.decode(errors="replace").strip()


def claim(stream: StreamHandle, live: LiveDirectory) -> None:
    """Leave the claim of a stream in the directory that it is about to take over.

    Raises:
        LiveDirectoryError: Another stream or deployment has taken it over.
        StorageAccessError: The directory cannot be reached.
    """
    if claim_of(live) is None:
        live.folder.create_if_absent(CLAIM, _claim(stream).encode())
    refuse_without_claim(stream, live)


def refuse_without_claim(stream: StreamHandle, live: LiveDirectory) -> None:
    """Refuse to run a query in an adopted directory that another stream has taken over since.

    Raises:
        LiveDirectoryError: One has, or there is no claim.
        StorageAccessError: The directory cannot be reached.
    """
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
