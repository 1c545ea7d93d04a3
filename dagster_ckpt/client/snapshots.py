"""Client methods that take snapshots, keep them and prove that they can be restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import RequestKind, SnapshotTrigger
from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.connection import Connection, checked_target, given_folder
from dagster_ckpt.client.requests import (
    await_answer,
    await_process,
    has_query,
    is_running,
    require_running,
    snapshot_of,
)
from dagster_ckpt.errors import RequestFailedError, SnapshotCorruptError, SnapshotNotFoundError, StorageAccessError
from dagster_ckpt.values.modes import SnapshotKind

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_ckpt.catalog.records import RequestRecord, SnapshotRecord
    from dagster_ckpt.client.derived_savepoint import SavepointIdentity
    from dagster_ckpt.client.examination import SnapshotVerification
    from dagster_ckpt.snapshot.manifest import SnapshotHeader
    from dagster_ckpt.snapshot.store import StoredSnapshot
    from dagster_ckpt.snapshot.writer import Progress
    from dagster_ckpt.stream.handle import StreamHandle


_PROMOTED_FROM = "promoted_from"


class SnapshotMethods(Connection):
    def trigger_checkpoint(self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> SnapshotRecord:
        """Take a checkpoint of a running stream now, despite the minimum pause, and wait for it."""
        return self._answer(self.request_checkpoint(stream), timeout_s)

    def trigger_savepoint(
        self,
        stream: str,
        *,
        label: str | None = None,
        target_directory: str | None = None,
        schedule: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        progress: Progress | None = None,
    ) -> SnapshotRecord:
        """Take a savepoint of a running, stopped or failed stream, and wait for it. A running one continues.

        Args:
            schedule: The schedule that takes it and may delete it later; None: nothing deletes it.
            progress: Called with (written, all) files, if the stream is not running.

        Raises:
            NothingCommittedError: The stream has not committed a batch yet.
            OptionError: The label is reserved or taken, or the folder is relative.
        """
        opened = self._open(stream)
        target = checked_target(label, target_directory)
        opened.catalog.streams.get(opened.stream_id)
        self._refuse_taken(opened.stream_id, label)
        return self._take_savepoint(opened, label, target, schedule, timeout_s=timeout_s, progress=progress)

    def _take_savepoint(
        self,
        opened: StreamHandle,
        label: str | None,
        target: str | None = None,
        schedule: str | None = None,
        *,
        timeout_s: float,
        progress: Progress | None = None,
    ) -> SnapshotRecord:
        from dagster_ckpt.stream.snapshotting import savepoint_of_stopped_stream

        # A query that keeps failing answers no request, so its state is read as that of a stopped stream.
        if has_query(opened):
            try:
                return self._answer(self._ask_for_savepoint(opened, label, target, schedule), timeout_s)
            except RequestFailedError:
                if has_query(opened):
                    raise
        return savepoint_of_stopped_stream(
            opened,
            label=label,
            target_directory=target,
            schedule=schedule,
            progress=progress or (lambda _done, _total: None),
        )

    def request_checkpoint(self, stream: str) -> RequestRecord:
        """Request a checkpoint of a running stream; see `await_request`."""
        opened = self._open(stream)
        opened.catalog.streams.get(opened.stream_id)
        if not is_running(opened):
            raise RequestFailedError(
                f"Stream {opened.stream_id!r} is not running, and only a running stream takes checkpoints. Take a "
                "savepoint instead: that works for a stopped stream too."
            )
        return self._catalog.requests.submit(
            opened.stream_id, RequestKind.CHECKPOINT, arguments={}, origin=self._origin
        )

    def request_savepoint(
        self, stream: str, *, label: str | None = None, target_directory: str | None = None
    ) -> RequestRecord:
        """Request a savepoint of a running stream; see `await_request`. For a stopped one, use `trigger_savepoint`."""
        opened, target = self._open(stream), checked_target(label, target_directory)
        self._refuse_taken(opened.stream_id, label)
        return self._ask_for_savepoint(opened, label, target, None)

    def _ask_for_savepoint(
        self, stream: StreamHandle, label: str | None, target: str | None, schedule: str | None
    ) -> RequestRecord:
        require_running(stream, "asked for a savepoint without waiting; trigger_savepoint takes it here")
        arguments = {"label": label, "target_directory": target, "schedule": schedule}
        return self._catalog.requests.submit(
            stream.stream_id, RequestKind.SAVEPOINT, arguments=arguments, origin=self._origin
        )

    def _answer(self, request: RequestRecord, timeout_s: float) -> SnapshotRecord:
        opened = self._open(request.stream_id)
        return snapshot_of(opened, await_process(opened, request, timeout_s=timeout_s))

    def await_request(self, request: RequestRecord | str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> RequestRecord:
        """Wait until a request, which may be given by its id, is answered. After the timeout it is withdrawn."""
        asked = self.catalog.requests.get(request if isinstance(request, str) else request.request_id)
        opened = self._open(asked.stream_id)
        if asked.kind is RequestKind.START:
            return await_answer(opened, asked, timeout_s=timeout_s)
        return await_process(opened, asked, timeout_s=timeout_s)

    def list_requests(self, stream: str | None = None) -> list[RequestRecord]:
        """List requests that are neither answered nor withdrawn, oldest first; of all streams if none is named."""
        return self.catalog.requests.unanswered(self._id_of(stream) if stream is not None else None)

    def withdraw_request(self, request: RequestRecord | str) -> RequestRecord:
        """Withdraw a request, so that nothing carries it out later; an answered one stays as it is."""
        request_id = request if isinstance(request, str) else request.request_id
        self.catalog.requests.withdraw(request_id)
        return self.catalog.requests.get(request_id)

    def tag(self, stream: str, snapshot: str, *, label: str | None = None) -> SnapshotRecord:
        """Keep a snapshot: it is neither subsumed nor deleted when the stream ends, until it is released.

        It does not count towards `num_retained`.
        """
        from dagster_ckpt.stream.snapshots import write_notes
        from dagster_ckpt.stream.start_from import checked_label

        checked_label(label)
        opened = self._open(stream)
        found = self._snapshot(opened, snapshot)
        if label != found.label:
            self._refuse_taken(found.stream_id, label)
        self._catalog.holds.tag(found.snapshot_id, label=label, holder=self._origin)
        write_notes(opened, found.snapshot_id)
        return self._catalog.snapshots.get(found.snapshot_id)

    def release(self, stream: str, snapshot: str) -> SnapshotRecord:
        """Return a tagged checkpoint, or a savepoint taken before a rewind, to the stream's retention.

        A user's savepoint cannot be released: to remove it, delete its folder.
        """
        from dagster_ckpt.stream.snapshots import describe_snapshot, is_owned_by_stream, write_notes

        opened = self._open(stream)
        found = self._snapshot(opened, snapshot)
        released = self._catalog.holds.release_tag(found.snapshot_id)
        write_notes(opened, found.snapshot_id)
        if found.trigger is SnapshotTrigger.REWIND and not is_owned_by_stream(found):
            self._catalog.snapshots.give_to_stream(found.snapshot_id)
            released = True
        if not released:
            raise RequestFailedError(
                f"{describe_snapshot(found)} of stream {found.stream_id!r} is not tagged, and was not taken before a "
                "rewind: there is nothing to release."
            )
        return self._catalog.snapshots.get(found.snapshot_id)

    def promote(
        self, stream: str, snapshot: str, *, label: str | None = None, target_directory: str | None = None
    ) -> SnapshotRecord:
        """Copy a checkpoint into a savepoint, which depends on no other snapshot and is never deleted by the stream.

        Bytes are linked on the same disk, and copied by the store within one object store. With a label, an interrupted
        call can be repeated.
        """
        from dagster_ckpt.client.derived_savepoint import derive_savepoint
        from dagster_ckpt.stream.start_from import checked_label
        from dagster_ckpt.values.durations import wall_clock_ms

        opened, target = self._open(stream), given_folder(target_directory)
        checked_label(label)
        found = self._snapshot(opened, snapshot)
        for each in self._catalog.snapshots.completed(opened.stream_id) if label is not None else ():
            if each.label == label and each.properties.get(_PROMOTED_FROM) == found.snapshot_id:
                # An interrupted call has already made it.
                return each
        self._refuse_taken(opened.stream_id, label)
        return derive_savepoint(
            opened,
            found,
            lambda identity: _copy(opened, found, identity, target),
            trigger=SnapshotTrigger.MANUAL,
            label=label,
            target_directory=target,
            purpose="promotion to savepoint",
            state_rows=found.state_rows,
            began_ms=wall_clock_ms(),
        )

    def prefer_savepoint(self, stream: str, savepoint: str) -> SnapshotRecord:
        """Select the savepoint that `start_from="preferred-savepoint"` refers to."""
        from dagster_ckpt.client.preflight import listed_snapshot, planned_start
        from dagster_ckpt.stream.start_from import StartFrom

        opened = self._open(stream)
        found = planned_start(opened, StartFrom(savepoint)).snapshot
        if found is None or found.kind is not SnapshotKind.SAVEPOINT:
            raise SnapshotNotFoundError(
                f"{savepoint!r} of stream {opened.stream_id!r} is not a savepoint: checkpoints belong to the system "
                "and may be subsumed at any time. Take a savepoint and prefer that."
            )
        if listed_snapshot(opened, found) is None:
            raise SnapshotNotFoundError(
                f"The catalog of stream {opened.stream_id!r} does not list a savepoint at {savepoint!r}, so a later "
                "start would not find it. Start from its location, or prefer one that is listed."
            )
        self._catalog.streams.prefer_savepoint(opened.stream_id, found.snapshot_id)
        return found

    def verify(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        deep: bool = True,
        spark: SparkSession | None = None,
        progress: Progress | None = None,
    ) -> list[SnapshotVerification]:
        """Prove that snapshots can be restored, and record it for health checks and recoveries.

        Args:
            snapshot: The snapshot, or `all`. Its location may be one that the catalog does not list.
            deep: Compare every byte with its digest, not only lengths and completeness.
            spark: A session that reads the state of every operator, from a temporary copy.

        Raises:
            StorageAccessError: A snapshot could not be read; the results of the others are recorded.
            SnapshotNotFoundError: There is none; of `all`, those deleted meanwhile are left out.
            UnsupportedSparkError: The session's Spark cannot read the state.
        """
        from dagster_ckpt.client.examination import locations_of, record_verification, verify_snapshot

        opened = self._open(stream)
        locations = locations_of(opened, snapshot)
        verified: list[SnapshotVerification] = []
        unread: list[StorageAccessError] = []
        gone: list[SnapshotNotFoundError] = []
        for done, location in enumerate(locations, start=1):
            try:
                found = verify_snapshot(opened, location, deep=deep, spark=spark)
                verified.append(record_verification(opened, found))
            except StorageAccessError as error:
                unread.append(error)
            except SnapshotNotFoundError as error:
                # Deleted since it was listed.
                gone.append(error)
            if progress is not None:
                progress(done, len(locations))
        if unread and verified:
            broken = [item for item in verified if not item.passed]
            raise StorageAccessError(
                f"{len(unread)} of {len(locations)} snapshots could not be read. What the others are is recorded: "
                f"{len(broken)} of them cannot be restored. The first that could not be read: {unread[0]}"
            )
        if not verified and (unread or gone):
            raise [*unread, *gone][0]
        return verified

    def _snapshot(self, stream: StreamHandle, reference: str) -> SnapshotRecord:
        from dagster_ckpt.client.description import find_snapshot

        return find_snapshot(stream.catalog, stream.stream_id, reference)


def _copy(
    stream: StreamHandle, snapshot: SnapshotRecord, identity: SavepointIdentity, target: str | None
) -> tuple[StoredSnapshot, SnapshotHeader]:
    from dagster_ckpt.recovery.live_directories import snapshot_location
    from dagster_ckpt.snapshot.store import sources_in

    location = snapshot_location(snapshot)
    problem = next(iter(stream.store.verify(location)), snapshot.verified_problem)
    if problem is not None:
        raise SnapshotCorruptError(
            f"{location} cannot be promoted: {problem}. Promote another checkpoint; if this one was repaired, verify "
            "it first, with verify_state_job if Spark found the problem."
        )
    manifest = stream.store.manifest(location)
    header = identity.header(manifest.header, properties={_PROMOTED_FROM: snapshot.snapshot_id})
    sources = sources_in(stream.store, location, manifest.files)
    return stream.store.write_savepoint(header, sources, target_directory=target, base=location), header
