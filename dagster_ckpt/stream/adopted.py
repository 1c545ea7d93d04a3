"""An adopted checkpoint directory: one that plain Spark wrote, and from which a stream continues.

Until the stream's first start, the query that wrote the directory may still run; adopting only reads.
The start takes the directory over. It first leaves a claim there, which names the stream and its
deployment: two deployments may have adopted the same directory, and only one may continue from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.catalog.state_origin import OriginKind
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.handle import StreamHandle

CLAIM = "adopted-by"
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
    pending = record.pending_restore or {}
    return Adopted(live, bool(pending.get("in_place", True)), is_pending="adopts" in pending)


def pending_adoption(adopted: Adopted, batch_id: int) -> dict[str, object]:
    """What the catalog keeps of an adoption until a start takes the directory over."""
    return {"adopts": adopted.directory, "in_place": adopted.in_place, "batch_id": batch_id}


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
