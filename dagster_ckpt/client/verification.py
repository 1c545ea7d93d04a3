"""Compares batches, run again with other code and without output.

Each batch starts from the state that the stream had before it, so one difference is not told again for every later
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.client.debugging import BatchDebug
from dagster_ckpt.client.preflight import MOST_ROWS, TRIAL_TIMEOUT_S
from dagster_ckpt.errors import LiveDirectoryError, RequestFailedError, UnsupportedSparkError
from dagster_ckpt.policies.upgrade import UnexpectedRows
from dagster_ckpt.recovery.live_directories import scratch_directory
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.state.diff import differences, paired
from dagster_ckpt.state.reading import StateReader
from dagster_ckpt.state.rewriter import readers_of
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.durations import rounded_duration

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

OUTPUT = "output"
_SHOWN = 3
# Beside the old code, and with cold caches, a batch takes longer.
_SLOWER, _TOLERATED_MS = 2, 5_000


class _DiffersError(Exception):
    """What the code does otherwise; ends the comparison."""


def verify_batches(
    stream: StreamHandle,
    describe: Callable[[], DataStreamWriter],
    count: int,
    *,
    unexpected: UnexpectedRows | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    report: Callable[[str], None],
) -> None:
    """Compare the newest `count` batches with the loaded code's; records the result like that of a preflight.

    What cannot be compared, such as the output of a sink that does not tell which batch a row is of, is reported and
    refuses nothing.
    """
    live = LiveDirectory(stream.catalog.streams.get(stream.stream_id).live_directory or "")
    newest = live.positions().commit
    batches = range(max(newest - count + 1, 0), newest + 1) if newest is not None else range(0)
    comparison = _Comparison(stream, describe, live, unexpected, report)
    found: list[str] = []
    differs: str | None = None
    pace: list[Pace] = []
    for batch_id in batches:
        if interrupted():
            raise RequestFailedError(f"The comparison for the start of stream {stream.stream_id!r} was interrupted.")
        try:
            told = ", ".join(comparison.of(batch_id, pace))
        except _DiffersError as difference:
            differs = f"batch {batch_id}: {difference}"
            break
        found.append(f"batch {batch_id}: {told}")
        report(found[-1])
    differs = differs or slower_than_input(pace)
    reason = differs or "; ".join(found) or "there is no batch to compare yet"
    compared = PreflightRecord(
        stream.code_version, differs is None, reason, max(batches, default=None), stream.catalog.now_ms()
    )
    stream.catalog.desired_states.note_preflight(stream.stream_id, compared)
    if differs is not None:
        raise RequestFailedError(
            f"Stream {stream.stream_id!r} is not started, nothing was changed: the loaded code does something else. "
            f"{differs}. If this is intended, return only what must not differ from unexpected_rows, or start the "
            "stream without verify_batches."
        )


@dataclass(frozen=True)
class Pace:
    """How long a batch took in the replay, and how long after the one before the stream had committed it."""

    batch_id: int
    took_ms: int
    every_ms: int

    @property
    def is_slow(self) -> bool:
        """Also where the old code leaves it room for what is cold."""
        return self.took_ms > _SLOWER * self.every_ms + _TOLERATED_MS


def committed_every_ms(stream: StreamHandle, live: LiveDirectory, batch_id: int) -> int | None:
    """Time between the commits of a batch and the one before, as the storage dated them.

    None if one is purged, or older than the execution: a restore gives all of them its own time.
    """
    running = stream.catalog.executions.latest(stream.stream_id)
    try:
        before, at = (live.folder.status(f"{COMMITS}/{each}").modified_at_ms for each in (batch_id - 1, batch_id))
    except FileNotFoundError:
        return None
    if at is None or before is None or running is None or before < running.started_at_ms:
        return None
    return at - before


def slower_than_input(pace: Sequence[Pace]) -> str | None:
    """Why the code would fall behind, if each batch says so."""
    if not pace or not all(each.is_slow for each in pace):
        return None
    best = min(pace, key=lambda each: each.took_ms - each.every_ms)
    return (
        f"it is slower than the input: batch {best.batch_id} takes {rounded_duration(best.took_ms)}, and the stream "
        f"committed it {rounded_duration(best.every_ms)} after the batch before it"
    )


@dataclass(frozen=True)
class _Comparison:
    stream: StreamHandle
    describe: Callable[[], DataStreamWriter]
    live: LiveDirectory
    unexpected: UnexpectedRows | None
    report: Callable[[str], None]

    def of(self, batch_id: int, pace: list[Pace]) -> Iterator[str]:
        with BatchDebug(
            self.stream,
            batch_id,
            lambda _session: self.describe(),
            spark=session_of(self.describe()),
            timeout_s=TRIAL_TIMEOUT_S,
            report=self.report,
        ) as batch:
            if batch.error is not None:
                raise _DiffersError(f"it fails: {batch.error}")
            every_ms = committed_every_ms(self.stream, self.live, batch_id)
            if batch.took_ms is not None and every_ms is not None:
                pace.append(Pace(batch_id, batch.took_ms, every_ms))
            if batch.sink.rows is None:
                yield f"its output is not compared, because {batch.sink.says}"
            else:
                self._refuse(OUTPUT, batch.difference)
                yield f"the same {batch.output.count():,} rows of output"
            yield from self._state_of(batch)

    def _state_of(self, batch: BatchDebug) -> Iterator[str]:
        after = batch.reader_after
        newest = self.stream.catalog.snapshots.newest_checkpoint(self.stream.stream_id)
        rows = (newest.state_rows if newest is not None else None) or 0
        if after is None:
            if batch.without_state is not None:
                yield f"its state is not compared: {batch.without_state}"
            return
        if rows > MOST_ROWS:
            yield f"its state is not compared: {rows:,} rows are more than {MOST_ROWS:,}"
            return
        try:
            with self._state_of_the_stream(batch) as before:
                for state in differences(before, after, paired(before.states, after.states)):
                    if state.note is not None and not state.is_empty:
                        raise _DiffersError(f"{state.name}: {state.note}")
                    self._refuse(str(state.name), state.rows)
        except (LiveDirectoryError, UnsupportedSparkError) as error:
            yield f"its state is not compared: {error}"
        else:
            yield "the same state"

    @contextmanager
    def _state_of_the_stream(self, batch: BatchDebug) -> Iterator[StateReader]:
        with scratch_directory(self.stream) as copy:
            clone(self.live, copy, at_batch=batch.batch_id, is_scratch=True)
            with readers_of(batch.spark, copy, [batch.batch_id]) as readers:
                yield readers[batch.batch_id]

    def _refuse(self, what: str, rows: DataFrame) -> None:
        left = rows if self.unexpected is None else self.unexpected(what, rows)
        shown = left.limit(_SHOWN).toJSON().collect()
        if shown:
            raise _DiffersError(f"{what} differs in {left.count():,} rows, such as {'; '.join(shown)}")
