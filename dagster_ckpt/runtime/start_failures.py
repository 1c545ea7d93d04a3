"""Examine what a failed start or query began from, and note damage in the catalog.

Spark loads state files without a checksum from a copy. A failure proves damage only if the same Spark loads a
snapshot's state in the same way; otherwise code, session or environment may be the cause.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_ckpt.errors import CkptError, LeaseLostError, LiveDirectoryError, UnsupportedSparkError
from dagster_ckpt.recovery.examination import Damage, Examiner, describe_point, is_suspicious, is_suspicious_end
from dagster_ckpt.recovery.live_directories import restore_into, scratch_directory, snapshot_location
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.recovery.recovery_points import NOT_LOADABLE, live_point, point_of_origin
from dagster_ckpt.runtime.run_request import QueryEnd, RunRequest
from dagster_ckpt.spark.checkpoint_dir.checksums import checksum_file
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.layout import OFFSETS, STATE, LiveDirectory, NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import plan_without_data
from dagster_ckpt.spark.doctor.contents import OPERATOR_NOTES
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.spark.query.trial_batch import copy_for_trial, run_trial
from dagster_ckpt.spark.versions import Feature, release_of
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.lease import LeaseKeeper
from dagster_ckpt.stream.snapshots import holding
from dagster_ckpt.values.durations import wall_clock_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


class StartFailures:
    def __init__(
        self, stream: StreamHandle, request: RunRequest, lease: LeaseKeeper, execution_id: str, examiner: Examiner
    ) -> None:
        self._stream = stream
        self._request = request
        self._lease = lease
        self._execution_id = execution_id
        self._examiner = examiner

    def passes_over(self, plan: RecoveryPlan, live: LiveDirectory | None, error: Exception) -> bool:
        """Whether a start failed because its point is damaged, which is then noted.

        If the point is good, the error says so in a note.
        """
        if not is_suspicious(error) or (live is None and not isinstance(error, CkptError)):
            # Before a directory is prepared, any other error comes from the description of the query.
            return False
        try:
            damage = self._examiner.damage_of_point(plan) if live is None else self._examine(live)
        except CkptError as trouble:
            error.add_note(f"What the start began from could not be examined after the failure: {trouble}")
            return False
        if damage is None:
            error.add_note(_conclusion(describe_point(plan, live), None))
            return False
        if live is None:
            self._note_failure(plan.point or "", damage, plan.to_batch, plan=plan)
        return True

    def examined(self, live: LiveDirectory, end: QueryEnd) -> QueryEnd:
        """Append to a failure what an examination of the live directory found; damage is noted."""
        if self._request.interrupted() or not is_suspicious_end(end.trace or end.reason):
            return end
        try:
            damage = self._examine(live)
            found = _conclusion(f"The live directory {live.url}", damage)
        except CkptError as error:
            found = f"The live directory {live.url} could not be examined after the failure: {error}"
        return replace(end, reason=f"{end.reason}\n{found}")

    def _examine(self, live: LiveDirectory) -> Damage | None:
        """Note damage of a live directory, and of its origin."""
        damage = self._examiner.damage_of_live(live)
        if damage is None:
            request = self._request
            trouble = unloadable_state(self._stream, live, request.describe, interrupted=request.interrupted)
            damage = Damage(NOT_LOADABLE, trouble) if trouble is not None else None
        if damage is None:
            return None
        with suppress(LeaseLostError):
            self._note_failure(live_point(live.url), damage, None)
            record = self._stream.catalog.streams.get(self._stream.stream_id)
            origin = record.origin if record.live_directory == live.url else None
            point = point_of_origin(origin)
            # If the origin is damaged, so is each directory that is made from it.
            inherited = self._examiner.damage_of_origin(record) if point is not None else None
            if origin is not None and point is not None and inherited is not None:
                self._note_failure(point, inherited, origin.batch_id)
        return damage

    def _note_failure(
        self, point: str, damage: Damage, batch_id: int | None, *, plan: RecoveryPlan | None = None
    ) -> None:
        self._stream.catalog.recoveries.failed(
            self._lease.record,
            self._execution_id,
            point,
            error=damage.error,
            detail=damage.detail,
            batch_id=batch_id,
            rewound_batches=plan.rewound_batches if plan is not None else None,
            rewound_ms=plan.rewound_ms if plan is not None else None,
        )


def _conclusion(what: str, damage: Damage | None) -> str:
    if damage is not None:
        return f"{what} was examined after the failure and is damaged: {damage.detail}"
    return (
        f"{what} was examined after the failure and is intact, so the stream stays there: the cause lies in the "
        "code, a source, a sink or the environment."
    )


_TIMEOUT_S = 900.0
# Formats that contain checksums: these, and files that begin like a stream of lz4-java.
_WITH_CHECKSUM = (".zip", ".crc")
_LZ4 = b"LZ4Block"


def unloadable_state(
    stream: StreamHandle,
    live: LiveDirectory,
    describe: Callable[[], DataStreamWriter] | None,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> str | None:
    """Why Spark cannot load the state of a live directory whose files look good; None if not proven.

    Nothing is tried without a snapshot, or if all state files have checksums.
    """
    snapshot = next(iter(stream.catalog.snapshots.restorable(stream.stream_id)), None)
    if describe is None or snapshot is None or not _without_checksum(live):
        return None
    try:
        session = session_of(describe())
        has_reader = release_of(session.version).has(Feature.STATE_READER)
    except Exception:  # noqa: BLE001 - of the user's code, which says nothing about the state
        return None
    how = _Trial(session, has_reader, describe, interrupted)
    with scratch_directory(stream) as copy:
        copy_for_trial(live, copy, before_last_batch=False)
        trouble = how.trouble(copy)
    if trouble is None:
        return None
    with ExitStack() as used:
        copy = used.enter_context(scratch_directory(stream))
        used.enter_context(holding(stream.catalog, [snapshot], "trial after a failure"))
        restore_into(stream, snapshot_location(snapshot), copy, new_query_id=str(uuid.uuid4()), is_scratch=True)
        return trouble if how.trouble(copy) is None else None


def _without_checksum(live: LiveDirectory) -> list[str]:
    needed = cut(live, carry_in_flight=False).needed
    state = [
        file
        for file in needed
        if file.source.startswith(f"{STATE}/") and not any(note in file.source for note in OPERATOR_NOTES)
    ]
    return [file.source for file in _unjudged(live, state)]


def _unjudged(live: LiveDirectory, files: Iterable[NeededFile]) -> Iterable[NeededFile]:
    names: dict[str, set[str]] = {}
    for file in files:
        directory, _, name = file.source.rpartition("/")
        if directory not in names:
            names[directory] = set(live.folder.list(directory, hidden=True))
        has_sum = {f"{name}.crc", checksum_file(name)} & names[directory]
        if has_sum or name.endswith(_WITH_CHECKSUM) or live.folder.read(file.source, len(_LZ4)) == _LZ4:
            continue
        yield file


@dataclass(frozen=True)
class _Trial:
    """Loads state with Spark's reader, which runs no code of the user, or else in a batch without data."""

    session: SparkSession
    has_reader: bool
    describe: Callable[[], DataStreamWriter]
    interrupted: Callable[[], bool]

    def trouble(self, copy: LiveDirectory) -> str | None:
        """Why the state cannot be loaded; None if it can, or if that took too long."""
        batch_id = copy.positions().commit or 0
        if self.has_reader:
            try:
                StateReader(self.session, copy, batch_id).count()
            except LiveDirectoryError as trouble:
                return str(trouble)
            except UnsupportedSparkError:
                # The reader does not support this format.
                pass
            else:
                return None
        plan = plan_without_data(copy.folder, batch_id, now_ms=wall_clock_ms())
        copy.folder.write(f"{OFFSETS}/{batch_id + 1}", [plan])
        name, ends_at = f"trial of {copy.url.rpartition('/')[2]}", time.monotonic() + _TIMEOUT_S
        trial = run_trial(self.describe, copy, name, replays=True, timeout_s=_TIMEOUT_S, interrupted=self.interrupted)
        return None if self.interrupted() or time.monotonic() >= ends_at else trial.error
