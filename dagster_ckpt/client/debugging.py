"""Replays one batch of a stream into memory."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NoReturn

from dagster_ckpt.client.state_browsing import (
    DEFAULT_LIMIT,
    ShownDifference,
    session_of_process,
    show_difference,
    texts,
    write_frames,
)
from dagster_ckpt.errors import InputGoneError, LiveDirectoryError, OptionError, UnsupportedSparkError
from dagster_ckpt.recovery.live_directories import scratch_directory
from dagster_ckpt.recovery.replay import ReplayPoint, query_of, replay_points, sources_of
from dagster_ckpt.recovery.source_check import gone_records
from dagster_ckpt.recovery.source_inputs import changed
from dagster_ckpt.sinks.registry import described_sink, sinks_of
from dagster_ckpt.sinks.sink import AskedBatch, BatchRows, Sink
from dagster_ckpt.spark.checkpoint_dir.file_source import existing_files, files_in_entries
from dagster_ckpt.spark.checkpoint_dir.layout import BEFORE_THE_FIRST_BATCH, OFFSETS, STATE
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.planned_batches import plan_again
from dagster_ckpt.spark.checkpoint_dir.restore import give_query_id
from dagster_ckpt.spark.query.description import described_options, is_described_query, quoted, session_of
from dagster_ckpt.spark.query.output import FOREACH_BATCH, NamedOutput, named_output
from dagster_ckpt.spark.query.session import active_in_thread, settings_for_a_while
from dagster_ckpt.spark.query.trial_batch import (
    Captured,
    SourceToRead,
    capture_batch,
    cloned_session,
    directory_of_source,
    run_trial,
    settings_of,
    sources_to_read,
)
from dagster_ckpt.state.diff import StateDifference, comparable, differences, paired
from dagster_ckpt.state.reading import StateName, StateReader
from dagster_ckpt.state.rewriter import readers_of
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import sinks_written
from dagster_ckpt.stream.snapshots import holding

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    Query = Callable[[SparkSession], DataStreamWriter]

REPLAYED = "replayed"
IN_SINK = "in_sink"
# The output may have columns of the names above.
_REPLAYED, _IN_SINK = "_ckpt_replayed", "_ckpt_in_sink"
_SHOWN = 5


class BatchDebug(ExitStack):
    """Result of `Client.debug_batch`.

    Input and output are in the memory of the executors, the state in a temporary copy: use its frames before `close`.

    Attributes:
        replayed_from: From where its state was restored.
        inputs: The rows of each source, by its name in the offset log (`0`, `1`, … without names).
        error: Why the query failed at the batch; there is no output then.
    """

    def __init__(
        self,
        stream: StreamHandle,
        batch_id: int,
        query: Query,
        *,
        spark: SparkSession | None = None,
        timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.spark = spark if spark is not None else session_of_process()
        self.batch_id = batch_id
        self.notes: list[str] = []
        self._stream, self._report, self._timeout_s = stream, report, timeout_s
        self._name = f"{stream.name} batch {batch_id}"
        session = cloned_session(self.spark)
        try:
            with active_in_thread(session):
                self._writer = query(session)
                self._describe = lambda: query(session)
                if not is_described_query(self._writer):
                    raise OptionError(
                        f"query returned {type(self._writer).__name__}, but must return what run_stream takes: a "
                        "DataStreamWriter that is not started."
                    )
                self._live = self.enter_context(scratch_directory(stream))
                self._written = self._live.sibling(".written")
                self.callback(self._written.delete)
                self._point = self._restored()
                with settings_for_a_while(session_of(self._writer), settings_of(self._live), "the batch"):
                    self._catch_up()
                    self.inputs: Mapping[str, DataFrame] = self._read_inputs()
                    self._captured = self._run()
            self.replayed_from = str(self._point)
            self.error = self._captured.trial.error
            self._read_state()
        except BaseException:
            self.close()
            raise

    @property
    def input(self) -> DataFrame:
        if len(self.inputs) != 1:
            raise OptionError(
                f"The query has {len(self.inputs)} sources. Name one: inputs[{next(iter(self.inputs))!r}]."
            )
        return next(iter(self.inputs.values()))

    @property
    def output(self) -> DataFrame:
        """The rows that the query gave its sink or its `foreachBatch` function, which is not called."""
        if self._captured.rows is None:
            raise OptionError(f"Batch {self.batch_id} has no output: it failed. {self.error}")
        return self._captured.rows

    def state_before(self, operator: int | str | None = None, state: str | None = None) -> DataFrame:
        """Return the rows of one state before the batch, as `StreamState.rows`."""
        return self._rows(self._before, operator, state)

    def state_after(self, operator: int | str | None = None, state: str | None = None) -> DataFrame:
        """Return the rows of one state after the batch."""
        return self._rows(self._after, operator, state)

    @property
    def took_ms(self) -> int | None:
        return self._captured.trial.took_ms

    @property
    def reader_after(self) -> StateReader | None:
        return self._after

    @cached_property
    def state_changes(self) -> Sequence[StateDifference]:
        if self._after is None:
            return ()
        if self._before is None:
            return differences(self._after, self._after, [(None, name) for name in self.states])
        return differences(self._before, self._after, paired(self._before.states, self._after.states))

    @property
    def state_frames(self) -> Mapping[str, Mapping[StateName, DataFrame]]:
        readers = {"state_before": self._before, "state_after": self._after}
        frames = {
            part: {name: reader.frame(name).rows for name in reader.states}
            for part, reader in readers.items()
            if reader is not None
        }
        return {**frames, "state_changes": {each.name: each.rows for each in self.state_changes}}

    @cached_property
    def sink(self) -> BatchRows:
        """What the sink has of the batch; `rows` is None if it cannot tell."""
        sink = self._sink
        if sink is None or self._captured.rows is None:
            return BatchRows(
                None, "the query's sink is not known" if sink is None else "the batch failed in the replay"
            )
        output = self._output
        asked = AskedBatch(
            self.spark,
            self.batch_id,
            query_of(self._point),
            self._captured.rows,
            output.format if output is not None else "",
            described_options(self._writer),
            self._written.spark_location,
        )
        return sink.rows_of_batch(asked)

    @cached_property
    def difference(self) -> DataFrame:
        """Rows that the replay gave another number of times (`replayed`) than the sink has them (`in_sink`)."""
        found = self.sink
        if found.rows is None:
            raise OptionError(f"The output of batch {self.batch_id} cannot be compared: {found.says}.")
        return _difference(found.replayed if found.replayed is not None else self.output, found.rows)

    @cached_property
    def sink_name(self) -> str | None:
        return self._sink.name if self._sink is not None else None

    @cached_property
    def _output(self) -> NamedOutput | None:
        return named_output(self._writer)

    @cached_property
    def _sink(self) -> Sink | None:
        written = sinks_of(sinks_written(self._stream))
        described = described_sink(self._output)
        if described is not None:
            # The recorded sink has the identity that the stream knows.
            return next((sink for sink in written if sink.is_same(described)), described)
        return next(iter(written), None)

    def _restored(self) -> ReplayPoint:
        problem: LiveDirectoryError | None = None
        for point in replay_points(self._stream, self.batch_id):
            self._report(f"batch {self.batch_id}: restoring {point} to a temporary directory")
            self.enter_context(holding(self._stream.catalog, [point.snapshot], "debugger of a batch"))
            try:
                point.restore(self._stream, self._live)
            except LiveDirectoryError as error:
                # The query has purged it meanwhile.
                problem = error
                self._live.delete()
                continue
            self._refuse_gone(point)
            return point
        assert problem is not None
        raise problem

    def _refuse_gone(self, point: ReplayPoint) -> None:
        files = files_in_entries(dict(sources_of(point)))
        existing = existing_files([each.path for each in files], session_of(self._writer)) or {}
        missing = sorted({each.path for each in files} - existing.keys())
        gone = (
            [f"{len(missing)} of {len(files)} files no longer exist: {', '.join(missing[:_SHOWN])}."] if missing else []
        )
        path = f"{OFFSETS}/{point.after}"
        if not gone and point.after != BEFORE_THE_FIRST_BATCH:
            entry = parse_offset_entry(self._live.folder.read(path), f"{self._live.url}/{path}")
            gone = gone_records(self._writer, lambda: entry.sources)
        if gone:
            self._refuse_input(" ".join(gone), point)
        altered = changed(files, existing)
        if altered:
            self.notes.append(
                f"{len(altered)} input files have another modification time than when they were read, and may have "
                f"other rows: {', '.join(altered[:_SHOWN])}"
            )

    def _refuse_input(self, gone: str, point: ReplayPoint) -> NoReturn:
        reads = f"batches {point.after + 1} to {self.batch_id}" if len(point.batches) > 1 else f"batch {self.batch_id}"
        raise InputGoneError(
            f"Batch {self.batch_id} of stream {self._stream.stream_id!r} cannot be replayed from {point}: the sources "
            f"no longer have the input of {reads}. {gone} Put it back, or name a later batch.",
            gone,
        )

    def _catch_up(self) -> None:
        for batch in self._point.batches:
            plan_again(self._live, batch)
            # A new id, because the stream's own query may run in this session.
            give_query_id(self._live, str(uuid.uuid4()))
            if batch.batch_id == self.batch_id:
                return
            self._report(f"replaying batch {batch.batch_id}, which leads to the state before batch {self.batch_id}")
            trial = run_trial(self._describe, self._live, self._name, replays=True, timeout_s=self._timeout_s)
            if trial.batch_id != batch.batch_id:
                if trial.data_is_gone:
                    self._refuse_input(trial.error or "", self._point)
                raise LiveDirectoryError(
                    f"Batch {batch.batch_id}, which leads to the state before batch {self.batch_id}, could not be "
                    f"replayed: {trial.error or 'Spark did not run it'}. Debug batch {batch.batch_id} instead."
                )

    def _read_inputs(self) -> dict[str, DataFrame]:
        self._report(f"batch {self.batch_id}: reading its input")
        return {source.key: self._read_input(source) for source in sources_to_read(self._writer)}

    def _read_input(self, source: SourceToRead) -> DataFrame:
        with directory_of_source(self._live, source, self.batch_id) as alone:
            if alone is None:
                return self.spark.createDataFrame([], source.rows.schema)
            found = capture_batch(
                lambda: source.rows.writeStream, alone, self.spark, self._name, timeout_s=self._timeout_s
            )
        if found.rows is None:
            self._refuse_input(f"Source {source.key} ({source.identity}): {found.trial.error}", self._point)
        return found.rows

    def _run(self) -> Captured:
        self._report(f"batch {self.batch_id}: running it without output")
        found = capture_batch(self._describe, self._live, self.spark, self._name, timeout_s=self._timeout_s)
        before, now = self._point.batch.rows, found.trial.rows
        if None not in (before, now) and before != now:
            self.notes.append(f"the batch read {before} rows when it ran first, and {now} now")
        if self._output is not None and self._output.format == FOREACH_BATCH:
            self.notes.append("the function of foreachBatch is not called: the output is the rows that it is given")
        return found

    def _read_state(self) -> None:
        self.without_state: str | None = None
        self._before: StateReader | None = None
        self._after: StateReader | None = None
        self.states: tuple[StateName, ...] = ()
        if not self._live.folder.list(STATE):
            return
        batches = [self.batch_id - 1] if self.batch_id > 0 else []
        batches += [self.batch_id] if self._captured.rows is not None else []
        try:
            readers = self.enter_context(readers_of(self.spark, self._live, batches, self._report))
        except UnsupportedSparkError as error:
            self.without_state = str(error)
            return
        self._before, self._after = readers.get(self.batch_id - 1), readers.get(self.batch_id)
        newest = self._after or self._before
        self.states = newest.states if newest is not None else ()

    def _rows(self, reader: StateReader | None, operator: int | str | None, state: str | None) -> DataFrame:
        if self.without_state is not None:
            raise UnsupportedSparkError(self.without_state)
        if reader is None:
            raise OptionError(
                "The query keeps no state, so there are no rows to read."
                if not self.states
                else f"Batch {self.batch_id} has no state there: {self.error or 'it is the first batch'}."
            )
        found = reader.select(operator, state)
        if len(found) != 1:
            listed = "; ".join(map(str, found))
            raise OptionError(f"{len(found)} states are selected. Name one by operator and state: {listed}.")
        return reader.frame(found[0]).rows


def _difference(replayed: DataFrame, in_sink: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    names = in_sink.columns
    kinds = {name: replayed.schema[name].dataType for name in names}

    def counted(rows: DataFrame, *, is_replayed: bool) -> DataFrame:
        columns = [F.col(quoted(name)).cast(kinds[name]).alias(name) for name in names]
        counts = [F.lit(int(is_replayed)).alias(_REPLAYED), F.lit(int(not is_replayed)).alias(_IN_SINK)]
        return rows.select(*columns, *counts)

    both = counted(replayed, is_replayed=True).unionByName(counted(in_sink, is_replayed=False))
    groups = [comparable(F.col(quoted(name)), kinds[name]).alias(f"_by_{number}") for number, name in enumerate(names)]
    firsts = [F.first(quoted(name)).alias(name) for name in names]
    sums = [F.sum(_REPLAYED).alias(REPLAYED), F.sum(_IN_SINK).alias(IN_SINK)]
    return (
        both.groupBy(*groups)
        .agg(*firsts, *sums)
        .where(F.col(REPLAYED) != F.col(IN_SINK))
        .drop(*(f"_by_{number}" for number in range(len(names))))
    )


@dataclass(frozen=True)
class ShownRows:
    rows: int
    columns: tuple[str, ...]
    first: tuple[tuple[str, ...], ...]

    @staticmethod
    def of(frame: DataFrame, limit: int) -> ShownRows:
        rows = frame.count()
        return ShownRows(rows, tuple(frame.columns), texts(frame, [], limit) if rows and limit else ())


@dataclass(frozen=True)
class ShownBatch:
    batch_id: int
    replayed_from: str
    notes: tuple[str, ...]
    error: str | None
    inputs: dict[str, ShownRows]
    states: tuple[ShownDifference, ...]
    without_state: str | None
    output: ShownRows | None
    sink: str | None
    sink_says: str
    difference: ShownRows | None


def show_batch(debug: BatchDebug, *, limit: int = DEFAULT_LIMIT) -> ShownBatch:
    return ShownBatch(
        batch_id=debug.batch_id,
        replayed_from=debug.replayed_from,
        notes=tuple(debug.notes),
        error=debug.error,
        inputs={source: ShownRows.of(rows, limit) for source, rows in debug.inputs.items()},
        states=tuple(show_difference(state, limit=limit) for state in debug.state_changes),
        without_state=debug.without_state,
        output=ShownRows.of(debug.output, limit) if debug.error is None else None,
        sink=debug.sink_name,
        sink_says=debug.sink.says,
        difference=ShownRows.of(debug.difference, limit) if debug.sink.rows is not None else None,
    )


def write_batch(debug: BatchDebug, folder: str) -> list[str]:
    """Write each frame as Parquet to a separate folder; return their URLs. Nothing is overwritten."""
    frames = {f"input/source={source}": rows for source, rows in debug.inputs.items()}
    for part, states in debug.state_frames.items():
        frames |= {f"{part}/operator={each.operator_id}/state={each.state}": rows for each, rows in states.items()}
    if debug.error is None:
        frames["output"] = debug.output
    if debug.sink.rows is not None:
        frames |= {"sink": debug.sink.rows, "difference": debug.difference}
    return write_frames(frames, folder)
