"""Snapshots that the catalog does not list: moved savepoints, and snapshots whose recording was interrupted."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog.records import SnapshotRecord, SnapshotStatus, SnapshotTrigger
from dagster_ckpt.config.modes import RecoveryClaimMode
from dagster_ckpt.config.redaction import refuse_user_info
from dagster_ckpt.errors import OptionError, SnapshotNotFoundError
from dagster_ckpt.snapshot.manifest import SnapshotHeader
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.snapshot_names import is_named
from dagster_ckpt.stream.start_from import StartFrom, is_location

# Property of a snapshot: the deployment whose catalog recorded it.
DEPLOYMENT = "deployment_id"


def unregistered_snapshot(
    stream: StreamHandle, start_from: StartFrom, listed: Sequence[SnapshotRecord]
) -> SnapshotRecord | None:
    """The snapshot at the location that a start names; None if it names a listed snapshot or no location.

    Args:
        stream: The stream to start.
        start_from: The requested starting point.
        listed: The snapshots that the catalog lists.

    Raises:
        SnapshotNotFoundError: The snapshot belongs to another stream or deployment, or was to be
            claimed.
        SnapshotCorruptError: Its metadata is truncated or altered.
        StorageAccessError: The location cannot be reached.
    """
    location = (start_from.reference or "").rstrip("/").removesuffix("/_metadata")
    if not is_location(location) or any(is_named(snapshot, location) for snapshot in listed):
        return None
    try:
        header = stream.store.manifest(location).header
    except SnapshotNotFoundError:
        # The plan's own error lists the available snapshots.
        return None
    if start_from.claim_mode is RecoveryClaimMode.CLAIM:
        raise SnapshotNotFoundError(
            f"{location} cannot be claimed by stream {stream.stream_id!r}: the catalog does not list it, so nobody "
            "could say "
            "who else starts from it. Start from it with NO_CLAIM; once a checkpoint is complete it may be deleted."
        )
    if header.stream_id != stream.stream_id:
        raise SnapshotNotFoundError(
            f"{location} is a snapshot of stream {header.stream_id!r}, not of {stream.stream_id!r}. A restore rolls "
            "back the file "
            "sinks that the snapshot names, and those are the other stream's. Name a snapshot of this stream. To go "
            "on from it as "
            "a query of its own use fork_stream_job, or, if it is another deployment's, import_stream_job."
        )
    of_deployment = header.properties.get(DEPLOYMENT)
    if of_deployment != stream.catalog.deployment_id:
        raise SnapshotNotFoundError(
            f"{location} is a snapshot of stream {header.stream_id!r} in "
            + (f"deployment {of_deployment}" if of_deployment else "a deployment that it does not name")
            + f", and this catalog is that of deployment {stream.catalog.deployment_id}. Nothing was changed: the "
            "sinks that the snapshot names are the other deployment's. To go on from it as a query of its own, with "
            "sinks "
            "of its own, use import_stream_job (import_snapshot). If this catalog takes the place of one that was "
            "lost, let it go on as the record of that deployment first: "
            f"Catalog(url).take_over_deployment({str(of_deployment)!r})."
        )
    return _record(header, location, timeline=stream.catalog.streams.get(stream.stream_id).timeline)


def foreign_snapshot(stream: StreamHandle, location: str) -> SnapshotRecord:
    """The snapshot of another deployment at a location.

    Args:
        stream: The stream that will continue from it. Its storage must be able to reach the location.
        location: URL of the snapshot's folder, or of the `_metadata` file in it.

    Raises:
        OptionError: The value is not a location, or contains user credentials.
        SnapshotNotFoundError: There is no snapshot, or it belongs to this deployment.
        SnapshotCorruptError: Its metadata is truncated or altered.
        StorageAccessError: The location cannot be reached.
    """
    refuse_user_info("The location of the snapshot", location)
    folder = location.strip().rstrip("/").removesuffix("/_metadata")
    if not is_location(folder):
        raise OptionError(
            f"{location!r} is no location of a snapshot, and this catalog knows no other name of another deployment's. "
            "Give the URL of its folder."
        )
    header = stream.store.manifest(folder).header
    if header.properties.get(DEPLOYMENT) == stream.catalog.deployment_id or stream.catalog.snapshots.by_id(
        [header.snapshot_id]
    ):
        raise SnapshotNotFoundError(
            f"{folder} is a snapshot of stream {header.stream_id!r} of this very deployment. Start stream "
            f"{header.stream_id!r} from "
            "it, or let another stream go on from it by fork_stream_job."
        )
    return _record(header, folder, timeline=0)


def _record(header: SnapshotHeader, location: str, *, timeline: int) -> SnapshotRecord:
    return SnapshotRecord(
        snapshot_id=header.snapshot_id,
        stream_id=header.stream_id,
        execution_id=None,
        kind=header.kind.value,
        number=header.number,
        status=SnapshotStatus.COMPLETED,
        trigger=SnapshotTrigger.UNKNOWN,
        timeline=timeline,
        location=location,
        batch_id=header.batch_id,
        query_id=header.query_id,
        properties=dict(header.properties),
        created_at_ms=header.created_at_ms,
    )
