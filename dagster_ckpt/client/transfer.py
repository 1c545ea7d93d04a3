"""Methods of the client that fork, import, adopt and export: state moves between streams, deployments and Spark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_ckpt.client.connection import Connection, given_folder

if TYPE_CHECKING:
    from dagster_ckpt.client.export import Export
    from dagster_ckpt.recovery.adopt import Adoption
    from dagster_ckpt.recovery.fork import Fork
    from dagster_ckpt.spark.checkpoint_dir.restore import Progress


class TransferMethods(Connection):
    """Forks, imports, adoptions, exports."""

    def fork(
        self,
        stream: str,
        *,
        into: str,
        start_from: str = "latest",
        outputs: Mapping[str, str] | None = None,
        replace_state: bool = False,
        accept_loss: bool = False,
    ) -> Fork:
        """Fork a stream into another one, an independent query whose next start continues from there.

        Args:
            stream: The stream to fork; it may be running and is not changed.
            into: The stream that continues from it; it must not be running.
            start_from: `latest` (the newest committed batch), `batch-<n>`, or the name of a snapshot.
            outputs: Folders of the original's file sinks, mapped to folders of the fork, which receive their rows.
            replace_state: Discard what the other stream itself has committed.
            accept_loss: Fork even if files that the original read since are gone.
        """
        from dagster_ckpt.recovery.fork import fork
        from dagster_ckpt.stream.start_from import StartFrom

        start = StartFrom(start_from, accept_loss=accept_loss)
        original = self._open(stream)
        made = self._open(into, new_like=original.stream_id)
        return fork(original, made, start, origin=self._origin, outputs=outputs, replace_state=replace_state)

    def import_snapshot(
        self,
        location: str,
        *,
        into: str,
        outputs: Mapping[str, str],
        with_rows: bool = False,
        replace_state: bool = False,
        progress: Progress | None = None,
    ) -> Fork:
        """Import a snapshot of another deployment into a stream, whose next start continues from there.

        Args:
            location: Location of the snapshot; it is read and not changed.
            into: The stream that continues from it; it must not be running.
            outputs: Each sink that the snapshot names, mapped to where the stream writes instead.
            with_rows: Copy the rows of the original's file sinks up to the snapshot.
            replace_state: Discard what the stream itself has committed.
            progress: Called with (done, all) after each file.
        """
        from dagster_ckpt.recovery.fork import import_snapshot

        return import_snapshot(
            self._open(into, new_like=into),
            location,
            outputs=outputs,
            origin=self._origin,
            with_rows=with_rows,
            replace_state=replace_state,
            progress=progress,
        )

    def adopt(
        self,
        stream: str,
        *,
        checkpoint_location: str,
        sinks: Sequence[str] = (),
        in_place: bool = False,
        label: str | None = None,
        dry_run: bool = False,
    ) -> Adoption:
        """Take the checkpoint directory of a plain Spark query under management; the stream's next start continues it.

        The directory is only read, for the first snapshot; the query may run until that start, which fences it. After
        an interruption, repeat it, or use `undo_adoption`.

        Args:
            stream: The stream that continues the query; it must not have any state yet.
            checkpoint_location: The `checkpointLocation` of the query.
            sinks: Where the query writes: a folder of files, a Delta table by its path, an Iceberg table as
                `IcebergTable[lake.sales.orders]`, or another sink by Spark's name.
            in_place: Continue in the directory itself, instead of in a copy.
            label: A name of the first snapshot.
            dry_run: Only examine the directory.

        Raises:
            LiveDirectoryError: The directory is damaged, or belongs to a stream.
            SharedSinkError: The log of a named sink is not that of this query.
            RequestFailedError: The stream already has state, or has adopted another directory.
        """
        from dagster_ckpt.recovery.adopt import adopt
        from dagster_ckpt.stream.start_from import checked_label

        location = given_folder(checkpoint_location, "checkpoint_location") or ""
        return adopt(
            self._open(stream, new_like=stream),
            location,
            sinks=sinks,
            in_place=in_place,
            label=checked_label(label),
            dry_run=dry_run,
            origin=self._origin,
        )

    def undo_adoption(self, stream: str) -> list[str]:
        """Drop an adoption, finished or not, that no start has taken over; returns what was done.

        Deletes the snapshots taken of the directory, which is not touched.
        """
        from dagster_ckpt.recovery.adopt import undo_adoption

        return undo_adoption(self._open(stream), origin=self._origin)

    def export(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        to: str,
        outputs: Mapping[str, str] | None = None,
        progress: Progress | None = None,
    ) -> Export:
        """Export a snapshot as a checkpoint directory in which plain Spark continues, without this package.

        The exported query keeps the id of the original, so that sinks that remember it continue. An interrupted export
        can be repeated.

        Args:
            stream: The stream; it may be running and is not changed.
            snapshot: `latest`, or the name of a snapshot.
            to: The directory to create; it must not exist.
            outputs: Folders of the snapshot's file sinks, mapped to new folders, which receive their rows.
            progress: As in `import_snapshot`.

        Raises:
            OptionError: The directory lies among those of a stream.
            RestoreError: The directory exists, or Spark could not start from the snapshot.
            SharedSinkError: An output is unknown to the snapshot, or its new folder is in use.
        """
        from dagster_ckpt.client.export import export_snapshot

        folder = given_folder(to, "to") or ""
        for new in (outputs or {}).values():
            given_folder(new, "outputs")
        return export_snapshot(self._open(stream), snapshot, folder, outputs=outputs, progress=progress)
