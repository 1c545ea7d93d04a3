"""Whether Spark can load the state of a live directory, tried on a copy: for state files without any checksum.

A failure of the copy alone proves nothing: the code, the session or the environment may be its cause. It counts only
if the same Spark loads the state of a snapshot in the same way.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.errors import LiveDirectoryError, UnsupportedSparkError
from dagster_ckpt.recovery.prepare import restore_into, snapshot_location
from dagster_ckpt.recovery.scratch import scratch_directory
from dagster_ckpt.spark.checkpoint_dir.checksums import checksum_file
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, STATE, LiveDirectory, NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import parse_commit_entry, plan_without_data
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.spark.query.trial_batch import copy_for_trial, run_trial
from dagster_ckpt.spark.versions import Feature, release_of
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.stream.handle import StreamHandle, wall_clock_ms
from dagster_ckpt.stream.snapshots import holding

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_TIMEOUT_S = 900.0
_NOTES = ("/_metadata/", "/_stateSchema/")
# Files that carry checksums of their own: these, and those that begin like a stream of lz4-java.
_CARRYING = (".zip", ".crc")
_LZ4 = b"LZ4Block"


def unloadable_state(
    stream: StreamHandle,
    live: LiveDirectory,
    describe: Callable[[], DataStreamWriter] | None,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> str | None:
    """Why Spark cannot load the state of a live directory in which its files look good; None if that is not proven.

    Nothing is tried if each file that a resume loads has a checksum, or if there is no snapshot.

    Args:
        stream: The stream.
        live: The directory; no query is running in it.
        describe: Describes the query. On Spark 3.5, which has no reader of state, it runs a batch without data.
        interrupted: Polled while a batch runs; True ends it.

    Raises:
        CkptError: A copy cannot be made.
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
    """The state files that a resume loads, and that nothing but Spark's loading can judge."""
    needed = cut(live, carry_in_flight=False).needed
    state = [
        file
        for file in needed
        if file.source.startswith(f"{STATE}/") and not any(note in file.source for note in _NOTES)
    ]
    return [file.source for file in _unjudged(live, state)]


def _unjudged(live: LiveDirectory, files: Iterable[NeededFile]) -> Iterable[NeededFile]:
    names: dict[str, set[str]] = {}
    for file in files:
        directory, _, name = file.source.rpartition("/")
        if directory not in names:
            names[directory] = set(live.folder.list(directory, hidden=True))
        has_sum = {f"{name}.crc", checksum_file(name)} & names[directory]
        if has_sum or name.endswith(_CARRYING) or live.folder.read(file.source, len(_LZ4)) == _LZ4:
            continue
        yield file


@dataclass(frozen=True)
class _Trial:
    """Loads the state in a copy: with Spark's reader, which runs no code of the user, or in a batch without data."""

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
                # Of this format: a batch is run instead.
                pass
            else:
                return None
        offset, commit = f"{OFFSETS}/{batch_id}", f"{COMMITS}/{batch_id}"
        committed = parse_commit_entry(copy.folder.read(commit), f"{copy.url}/{commit}")
        plan = plan_without_data(copy.folder.read(offset), f"{copy.url}/{offset}", committed, now_ms=wall_clock_ms())
        copy.folder.write(f"{OFFSETS}/{batch_id + 1}", [plan])
        name, ends_at = f"trial of {copy.url.rpartition('/')[2]}", time.monotonic() + _TIMEOUT_S
        trial = run_trial(self.describe, copy, name, replays=True, timeout_s=_TIMEOUT_S, interrupted=self.interrupted)
        return None if self.interrupted() or time.monotonic() >= ends_at else trial.error
