"""`Client`: every operation on the streams of a catalog, from any Python process.

It needs neither Dagster nor Spark to run: a running stream receives a request through the catalog, and a stream that
is not running is modified directly, under the lease that a run would take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import SnapshotStatus
from dagster_ckpt.client.lifecycle import LifecycleMethods
from dagster_ckpt.client.maintenance import MaintenanceMethods
from dagster_ckpt.client.snapshots import SnapshotMethods
from dagster_ckpt.client.state import StateMethods
from dagster_ckpt.client.transfer import TransferMethods

if TYPE_CHECKING:
    from dagster_ckpt.catalog.records import SnapshotRecord
    from dagster_ckpt.client.description import SnapshotDescription, StreamDescription, StreamSummary
    from dagster_ckpt.values.modes import SnapshotKind


class Client(SnapshotMethods, LifecycleMethods, TransferMethods, MaintenanceMethods, StateMethods):
    """Every operation on the streams of a catalog.

    The catalog records places and options of each stream that has run, so it is enough unless the storage needs
    credentials or the catalog was lost. A stream is named by its stream id, or by the key of an asset that it writes.
    A snapshot is named by its id, number (`chk-7`), label or location, or by `latest`.

    Args:
        catalog: SQLAlchemy URL of the catalog, or an open `Catalog`, which the client does not close.
        storage: Credentials for the storage, and where the snapshots are of streams that the catalog does not know: a
            path, a URL or a storage object.
        live_root: Folder of live directories of streams that the catalog does not know.
        checkpointing: Checkpointing options by stream id, instead of the recorded ones.
        origin: Who operates, as the catalog shows it; default: user and host.

    Example:
        >>> with Client("sqlite:////var/lib/streams/catalog.db") as client:
        ...     client.trigger_savepoint("orders", label="before-release-42")
        SnapshotRecord(savepoint before-release-42 of orders at batch 812, COMPLETED, 12.3 MB, 0.4 MB new)
    """

    def list_streams(self) -> list[StreamSummary]:
        """All streams that the catalog knows, by id."""
        from dagster_ckpt.client import description

        return description.summarize_streams(self._catalog)

    def describe_stream(self, stream: str, *, limit: int = 20) -> StreamDescription:
        """Settings, up to `limit` executions and snapshots, desired state, open requests."""
        from dagster_ckpt.client import description

        return description.describe_stream(self._catalog, self._id_of(stream), limit=limit)

    def list_snapshots(
        self,
        stream: str,
        *,
        kind: SnapshotKind | str | None = None,
        status: SnapshotStatus | str | None = SnapshotStatus.COMPLETED,
    ) -> list[SnapshotRecord]:
        """Snapshots of a stream, newest first.

        `status` None: also failed and deleted ones.
        """
        return self._catalog.snapshots.of_stream(
            self._id_of(stream),
            kind=_kind(kind) if kind is not None else None,
            status=SnapshotStatus(status) if status is not None else None,
        )

    def describe_snapshot(self, stream: str, snapshot: str = "latest") -> SnapshotDescription:
        """What the metadata of a snapshot says, and what protects it from deletion."""
        from dagster_ckpt.client import description

        return description.describe_snapshot_of(self._open(stream), snapshot)


def _kind(kind: SnapshotKind | str) -> SnapshotKind:
    from dagster_ckpt.values.modes import SnapshotKind

    return SnapshotKind(kind)
