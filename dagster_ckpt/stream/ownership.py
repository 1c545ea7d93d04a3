"""Check that the storage locations of a stream belong to this deployment.

Two environments that share a folder by mistake, or a copied catalog, would delete each other's
data. Therefore the folder of live directories and every snapshot carry the id of their deployment,
and a start never writes outside the stream's folders, even if the catalog names such a location.
The one exception is an adopted directory, which has a claim of its own.
"""

from __future__ import annotations

from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.adopted import adopted_directory, refuse_without_claim
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom, StartPoint

OWNER = "deployment"
_LONGEST = 256
_RESUMES = frozenset({StartPoint.LATEST, StartPoint.BATCH})


def check_places(stream: StreamHandle, start_from: StartFrom | None, *, predecessor_ended: bool) -> None:
    """Refuse a verb that would use another deployment's files, or files that the catalog does not know.

    Starts, forks, imports and rollbacks call it before anything is written, killed or fenced.

    Args:
        stream: The stream, whose lease this process holds.
        start_from: The requested starting point of a start. None: the state comes from elsewhere.
        predecessor_ended: Whether the previous execution can write nothing more.
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
    """Refuse a catalog from a backup: the query has moved on to directories that it does not know."""
    if not stream.directories_ahead(record):
        return
    # Read again: if this process was paused, its successor has registered them, and the lease
    # refuses what comes next.
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
    """Mark the folder of the stream's live directories as this deployment's."""
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
    """Id of the deployment that owns the stream's folder of live directories; None if it is not marked."""
    try:
        return LiveDirectory(stream.live_folder).folder.read(OWNER, _LONGEST).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def lies_elsewhere(stream: StreamHandle, record: StreamRecord) -> bool:
    """Whether the live directory in the catalog is outside the stream's folder."""
    live = record.live_directory
    return live is not None and not same_folder(live.rstrip("/").rpartition("/")[0], stream.live_folder)


def other_owner_of_live_folder(stream: StreamHandle) -> str | None:
    """Id of another deployment that owns the stream's folder of live directories; None if there is none."""
    owner = owner_of_live_folder(stream)
    return owner if owner != stream.catalog.deployment_id else None


def disown_live_folder(stream: StreamHandle) -> None:
    """Remove this deployment's mark from the stream's folder of live directories."""
    if other_owner_of_live_folder(stream) is None:
        LiveDirectory(stream.live_folder).folder.delete(OWNER)
