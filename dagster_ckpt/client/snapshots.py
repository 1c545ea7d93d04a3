"""Methods of the client that take snapshots, keep them and prove that they can be restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_ckpt.catalog.requests import REQUEST_TIMEOUT_S
from dagster_ckpt.client.connection import Connection, given_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_ckpt.catalog.records import RequestRecord, SnapshotRecord
    from dagster_ckpt.operations.verification import Progress, SnapshotVerification


class SnapshotMethods(Connection):
    """Checkpoints and savepoints."""

    def trigger_checkpoint(self, stream: str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> SnapshotRecord:
        """Take a checkpoint of a running stream now, and wait until it is complete.

        Raises:
            RequestFailedError: The stream is not running, or the attempt failed.
            RequestTimeoutError: No answer in time; the request was withdrawn.
        """
        from dagster_ckpt.operations import snapshots

        return snapshots.trigger_checkpoint(self._open(stream), origin=self._origin, timeout_s=timeout_s)

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
        """Take a savepoint of a running, stopped or failed stream, and wait until it is complete.

        Args:
            stream: The stream. If it is running, it continues.
            label: A name to start from later.
            target_directory: Folder for it, instead of the configured one.
            schedule: Name of the schedule that takes it, whose history may delete it later; None: nothing
                deletes it.
            timeout_s: How long to wait for a running stream's answer.
            progress: Called now and then with the number of files that were written, and of those to write,
                if the stream is not running.

        Raises:
            NothingCommittedError: The stream has not committed a batch yet.
            OptionError: The label means another starting point, or the folder is a relative path.
            RequestFailedError: The attempt failed.
            RequestTimeoutError: No answer in time; the request was withdrawn.
        """
        from dagster_ckpt.operations import snapshots

        return snapshots.trigger_savepoint(
            self._open(stream),
            origin=self._origin,
            label=label,
            target_directory=given_folder(target_directory),
            schedule=schedule,
            timeout_s=timeout_s,
            progress=progress or (lambda _done, _total: None),
        )

    def request_checkpoint(self, stream: str) -> RequestRecord:
        """Request a checkpoint of a running stream without waiting for it; see `await_request`.

        Raises:
            RequestFailedError: The stream is not running.
        """
        from dagster_ckpt.operations import snapshots

        return snapshots.request_checkpoint(self._open(stream), origin=self._origin)

    def request_savepoint(
        self, stream: str, *, label: str | None = None, target_directory: str | None = None
    ) -> RequestRecord:
        """Request a savepoint of a running stream without waiting for it; see `await_request`.

        Raises:
            RequestFailedError: The stream is not running: `trigger_savepoint` takes it here.
            OptionError: The label means another starting point, or the folder is a relative path.
        """
        from dagster_ckpt.operations import snapshots

        return snapshots.request_savepoint(
            self._open(stream),
            origin=self._origin,
            label=label,
            target_directory=given_folder(target_directory),
        )

    def await_request(self, request: RequestRecord | str, *, timeout_s: float = REQUEST_TIMEOUT_S) -> RequestRecord:
        """Wait until a request is answered. If it is not answered in time, it is withdrawn.

        Args:
            request: The request or its id.
            timeout_s: How long to wait.

        Raises:
            RequestFailedError: It failed or was withdrawn.
            RequestTimeoutError: No answer in time.
        """
        from dagster_ckpt.catalog.records import RequestKind
        from dagster_ckpt.operations import requests

        asked = self.catalog.requests.get(request if isinstance(request, str) else request.request_id)
        opened = self._open(asked.stream_id)
        if asked.kind is RequestKind.START:
            return requests.await_answer(opened, asked, timeout_s=timeout_s)
        return requests.await_process(opened, asked, timeout_s=timeout_s)

    def list_requests(self, stream: str | None = None) -> list[RequestRecord]:
        """Requests that are neither answered nor withdrawn, oldest first.

        Args:
            stream: The stream; None for all streams.
        """
        return self.catalog.requests.unanswered(self._id_of(stream) if stream is not None else None)

    def withdraw_request(self, request: RequestRecord | str) -> RequestRecord:
        """Withdraw a request, so that nothing carries it out later. One that was answered before stays as it is.

        Args:
            request: The request or its id.

        Raises:
            CatalogError: There is no such request.
        """
        request_id = request if isinstance(request, str) else request.request_id
        self.catalog.requests.withdraw(request_id)
        return self.catalog.requests.get(request_id)

    def tag(self, stream: str, snapshot: str, *, label: str | None = None) -> SnapshotRecord:
        """Keep a checkpoint: it is neither subsumed nor deleted when the stream ends, until it is released."""
        from dagster_ckpt.operations import snapshots

        return snapshots.tag_checkpoint(self._open(stream), snapshot, label=label, origin=self._origin)

    def release(self, stream: str, snapshot: str) -> SnapshotRecord:
        """Return a tagged checkpoint, or a savepoint taken before a rewind, to the stream's retention."""
        from dagster_ckpt.operations import snapshots

        return snapshots.release_checkpoint(self._open(stream), snapshot)

    def promote(
        self, stream: str, snapshot: str, *, label: str | None = None, target_directory: str | None = None
    ) -> SnapshotRecord:
        """Copy a checkpoint into a savepoint, which depends on no other snapshot and is never deleted by the stream."""
        from dagster_ckpt.operations import snapshots

        return snapshots.promote_checkpoint(
            self._open(stream),
            snapshot,
            label=label,
            target_directory=given_folder(target_directory),
        )

    def prefer_savepoint(self, stream: str, savepoint: str) -> SnapshotRecord:
        """Select the savepoint that `start_from="preferred-savepoint"` refers to."""
        from dagster_ckpt.operations import snapshots

        return snapshots.prefer_savepoint(self._open(stream), savepoint)

    def verify(
        self,
        stream: str,
        snapshot: str = "latest",
        *,
        deep: bool = True,
        spark: SparkSession | None = None,
        progress: Progress | None = None,
    ) -> list[SnapshotVerification]:
        """Prove that snapshots can be restored, and record the result for health checks and recoveries.

        Args:
            stream: The stream.
            snapshot: The snapshot, or `all`.
            deep: Compare every byte with its digest; otherwise check only lengths and completeness.
            spark: A session to read the state of every operator with, from a temporary copy.
            progress: Called after each snapshot with the number of verified snapshots and of all.
        """
        from dagster_ckpt.operations.verification import verify_snapshots

        return verify_snapshots(self._open(stream), snapshot, deep=deep, spark=spark, progress=progress)
