"""Run one batch of a described query on a copy of a live directory.

Spark checks only in a batch whether it can continue from a state. So the copy is cut one batch before the newest
commit, and that batch is replayed. Trigger.Once plans no further batch.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import CkptError, LiveDirectoryError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.inspect import retained_batches
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import (
    STATE_FORMAT,
    only_offset,
    parse_commit_entry,
    parse_offset_entry,
    query_metadata,
    with_state_ids,
)
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.checkpoint_dir.restore import clone, give_query_id
from dagster_ckpt.spark.query.description import described_field, session_of
from dagster_ckpt.spark.query.query import QueryProgress, SupervisedQuery
from dagster_ckpt.spark.query.session import is_classic_session, jvm_class
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed, leaves_of, source_identities
from dagster_ckpt.values.redaction import without_secrets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_WAIT_S = 0.25
_REPORT_S = 10.0
_DATA_GONE = ("FILE_NOT_EXIST", "FileNotFoundException", "OffsetOutOfRange", "KAFKA_DATA_LOSS", "does not exist")


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        batch_id: None if no batch could be run.
        rows: How many were read; None, like `took_ms`, if not reported.
    """

    batch_id: int | None
    error: str | None = None
    rows: int | None = None
    took_ms: int | None = None

    @property
    def data_is_gone(self) -> bool:
        """Whether its sources lack the data, which says nothing about the state."""
        return self.error is not None and any(word in self.error for word in _DATA_GONE)


def copy_for_trial(live: LiveDirectory, target: LiveDirectory, *, before_last_batch: bool) -> bool:
    """Copy a live directory; return False if Spark no longer retains the files that this needs."""
    retained = retained_batches(live)
    if before_last_batch and (len(retained) < 2 or retained[-2] != retained[-1] - 1):
        return False
    try:
        clone(live, target, at_batch=retained[-2] if before_last_batch else None, is_scratch=True)
    except LiveDirectoryError:
        if not before_last_batch:
            raise
        return False
    # A start does this too.
    widen_schemas(target.folder, target.positions().commit or 0, nullcontext)
    # It shares a session with the original.
    give_query_id(target, str(uuid.uuid4()))
    return True


def run_trial(
    describe: Callable[[], DataStreamWriter],
    scratch: LiveDirectory,
    name: str,
    *,
    replays: bool,
    timeout_s: float,
    interrupted: Callable[[], bool] = lambda: False,
    keeps_output: bool = False,
) -> Trial:
    """Run one batch of a query in a copy of a live directory, and discard its rows unless `keeps_output`.

    A failing description and a timeout are results too. With `replays` the copy has a batch to replay, otherwise one is
    planned for the available data. `interrupted` is polled.
    """
    before = scratch.positions().commit
    try:
        described = describe()
        writer = (described if keeps_output else _new_writer(described).format("noop")).queryName(name)
        writer = writer.trigger(once=True) if replays else writer.trigger(availableNow=True)
        query = SupervisedQuery(writer.option("checkpointLocation", scratch.spark_location).start())
    except CkptError:
        raise
    except Exception as error:  # noqa: BLE001 - any error of the new code is the result
        return Trial(None, str(error))
    deadline = time.monotonic() + timeout_s
    try:
        while not query.wait(_WAIT_S) and scratch.positions().commit == before:
            if interrupted() or time.monotonic() >= deadline:
                return Trial(None, f"the batch did not complete within {timeout_s:.0f} s")
        failure = query.exception()
        after = scratch.positions().commit
        report = _report(query, after) if replays and failure is None and after != before else None
    finally:
        query.stop()
    rows, took_ms = (report.input_rows, report.duration_ms) if report is not None else (None, None)
    return Trial(after if after != before else None, failure, rows, took_ms)


def _report(query: SupervisedQuery, batch_id: int | None) -> QueryProgress | None:
    """Wait for the report, which Spark sends a moment after the batch's commit."""
    deadline = time.monotonic() + _REPORT_S
    while time.monotonic() < deadline:
        has_ended = query.wait(_WAIT_S)
        found = query.progress()
        if found is not None and found.batch_id == batch_id:
            return found
        if has_ended:
            break
    return None


def _new_writer(writer: DataStreamWriter) -> DataStreamWriter:
    """Describe the same rows again, because the stream's query may start with the given writer."""
    frame: DataFrame = writer._df
    return frame.writeStream.outputMode(str(described_field(writer._jwrite, "outputMode")))


_MAX_MESSAGE = 20_000
_REASONS = {
    "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE": (
        "the keys of the state differ from those that the new code groups or joins by"
    ),
    "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE": "the values of the state differ from those of the new code",
    "STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION": "the new code cannot read the values of the state",
    "STATE_STORE_STATE_SCHEMA": "the schema of the state differs from that of the new code",
    (
        "STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA"
    ): "the stateful operators of the new code differ from those of the state, or are in another order",
    "STATE_STORE_UNSUPPORTED_OPERATION": "the state store cannot do what the new code needs",
    "CANNOT_LOAD_STATE_STORE": "the state cannot be loaded",
    "UNRESOLVED_COLUMN": "the new code names a column that its input does not have",
}


def describe_trial_error(error: str) -> str:
    known = next((words for condition, words in _REASONS.items() if condition in error), None)
    message = _message(error)
    return f"{known} (Spark: {message})" if known is not None else f"the new code failed: {message}"


def _message(error: str) -> str:
    lines = [line.strip() for line in error.splitlines()]
    said = [line for line in lines if line and not line.startswith(("at ", "... "))]
    return without_secrets("\n".join(said))[:_MAX_MESSAGE]


@dataclass(frozen=True)
class SourceToRead:
    """`key` is the name of its log, `name` that in the offset log; `rows` are all that it will ever read."""

    key: str
    name: str
    identity: SourceIdentity
    rows: DataFrame


@dataclass
class Captured:
    """A batch that ran; its rows, None if it failed, are in the memory of the executors."""

    trial: Trial
    rows: DataFrame | None = None


def cloned_session(spark: SparkSession) -> SparkSession:
    """Return a session with the same tables, functions and settings, which a query may change freely."""
    if not is_classic_session(spark):
        raise UnsupportedSparkError(
            "A batch is replayed in the JVM of the driver, which a Spark Connect session does not have. Run it in the "
            "driver."
        )
    from pyspark.sql import SparkSession as ClassicSession

    return ClassicSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def settings_of(live: LiveDirectory) -> dict[str, str]:
    """Return settings that Spark takes from the session instead of from the directory."""
    commit = live.positions().commit
    if commit is None:
        return {}
    path = f"{COMMITS}/{commit}"
    entry = parse_commit_entry(live.folder.read(path), f"{live.url}/{path}")
    return {STATE_FORMAT: "2"} if entry.state_ids else {}


def capture_batch(
    describe: Callable[[], DataStreamWriter], scratch: LiveDirectory, home: SparkSession, name: str, *, timeout_s: float
) -> Captured:
    """Run the planned batch of a directory; the rows that it gives its sink become a frame of `home`."""
    captured = Captured(Trial(None))
    failures: list[Exception] = []

    def keep(rows: DataFrame, _batch_id: int) -> None:
        try:
            kept: Any = rows.localCheckpoint(eager=True)
        except Exception as error:
            failures.append(error)
            raise
        # The session of the batch ends with its query.
        plain = kept._jdf.queryExecution().toRdd()
        of_home: Any = home._jsparkSession
        captured.rows = _frame(home, of_home.internalCreateDataFrame(plain, kept._jdf.schema(), False))

    def capturing() -> DataStreamWriter:
        return _new_writer(describe()).foreachBatch(keep)

    captured.trial = run_trial(capturing, scratch, name, replays=True, timeout_s=timeout_s, keeps_output=True)
    if captured.trial.batch_id is None:
        captured.rows = None
        if failures:
            # Spark's error is the trace of the function, with the cause somewhere in it.
            captured.trial = replace(captured.trial, error=str(failures[0]))
    return captured


def sources_to_read(writer: DataStreamWriter) -> list[SourceToRead]:
    """List the sources in the order of the offset log, each with the rows of a query of its leaf alone."""
    session = session_of(writer)
    named = keyed(source_identities(writer) or ())
    of_rows = jvm_class(session, "Dataset").ofRows
    return [
        SourceToRead(leaf.log, leaf.name, named[leaf.log], _frame(session, of_rows(session._jsparkSession, leaf.node)))
        for leaf in leaves_of(writer)
        if not leaf.is_again
    ]


@contextmanager
def directory_of_source(scratch: LiveDirectory, source: SourceToRead, batch_id: int) -> Iterator[LiveDirectory | None]:
    """Yield a directory in which a query of one source reads a planned batch; None if that reads nothing of it."""
    names = [f"{OFFSETS}/{each}" for each in (batch_id - 1, batch_id) if each >= 0]
    entries = {name: scratch.folder.read(name) for name in names}
    offsets = [parse_offset_entry(data, f"{scratch.url}/{name}").sources for name, data in entries.items()]
    if source.name not in offsets[-1]:
        raise LiveDirectoryError(
            f"{scratch.url}: batch {batch_id} was planned for the sources {', '.join(offsets[-1])}, but the query has "
            f"a source {source.key} ({source.identity}). Debug the batch with the code that ran it."
        )
    until = offsets[-1][source.name]
    if until is None or (len(offsets) > 1 and offsets[0].get(source.name) == until):
        yield None
        return
    alone = scratch.sibling(f".source-{source.key}")
    own = source.key if source.identity.name is not None else "0"
    alone.delete()
    try:
        folder = alone.folder
        folder.make()
        folder.place(METADATA, [query_metadata(str(uuid.uuid4()))])
        prefix = f"{SOURCES}/{source.key}/"
        for path, _ in scratch.folder.find(prefix.rstrip("/")):
            folder.place(f"{SOURCES}/{own}/{path.removeprefix(prefix)}", [scratch.folder.read(path)])
        for name, data in entries.items():
            folder.place(name, [only_offset(data, f"{scratch.url}/{name}", source.name, own)])
        if batch_id > 0:
            commit = f"{COMMITS}/{batch_id - 1}"
            folder.place(commit, [with_state_ids(scratch.folder.read(commit), f"{scratch.url}/{commit}", None)])
        yield alone
    finally:
        alone.delete()


def _frame(session: SparkSession, jvm_frame: Any) -> DataFrame:
    from pyspark.sql import DataFrame as AnyFrame

    frame: DataFrame = AnyFrame(jvm_frame, session)
    return frame
