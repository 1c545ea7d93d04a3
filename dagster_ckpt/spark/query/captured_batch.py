"""Run one planned batch of a described query in a copy of a live directory, and keep its rows instead of writing them.

The input of a source is what a query of it alone reads: its leaf of the logical plan, with its part of the offset log.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import LiveDirectoryError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import (
    only_offset,
    parse_commit_entry,
    parse_offset_entry,
    query_metadata,
    with_state_ids,
)
from dagster_ckpt.spark.query.description import described_field, session_of, streaming_leaves
from dagster_ckpt.spark.query.session import is_classic_session
from dagster_ckpt.spark.query.sources import SourceIdentity, keyed, source_identities
from dagster_ckpt.spark.query.trial_batch import Trial, run_trial

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_FORMAT_VERSION = "spark.sql.streaming.stateStore.checkpointFormatVersion"


@dataclass(frozen=True)
class SourceToRead:
    """`key` is its name in the offset log; `rows` are all that it will ever read."""

    key: str
    identity: SourceIdentity
    rows: DataFrame


@dataclass
class Captured:
    """A batch that ran; its rows, None if it failed, are in the memory of the executors."""

    trial: Trial
    rows: DataFrame | None = None


def cloned_session(spark: SparkSession) -> SparkSession:
    """With the same tables, functions and settings, which a query may change without touching those."""
    if not is_classic_session(spark):
        raise UnsupportedSparkError(
            "A batch is replayed in the JVM of the driver, which a Spark Connect session does not have. Run it in the "
            "driver."
        )
    from pyspark.sql import SparkSession as ClassicSession

    return ClassicSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def settings_of(live: LiveDirectory) -> dict[str, str]:
    """What Spark takes from the session that starts a query, and not from its directory."""
    commit = live.positions().commit
    if commit is None:
        return {}
    path = f"{COMMITS}/{commit}"
    entry = parse_commit_entry(live.folder.read(path), f"{live.url}/{path}")
    return {_FORMAT_VERSION: "2"} if entry.state_ids else {}


def capture_batch(
    describe: Callable[[], DataStreamWriter], scratch: LiveDirectory, home: SparkSession, name: str, *, timeout_s: float
) -> Captured:
    """Run the batch that is planned in a directory; the rows that it gives its sink become a frame of `home`."""
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
        writer = describe()
        frame: DataFrame = writer._df
        mode = str(described_field(writer._jwrite, "outputMode"))
        return frame.writeStream.outputMode(mode).foreachBatch(keep)

    captured.trial = run_trial(capturing, scratch, name, replays=True, timeout_s=timeout_s, keeps_output=True)
    if captured.trial.batch_id is None:
        captured.rows = None
        if failures:
            # Spark's error is that of the function: its trace in Python, with the cause somewhere in it.
            captured.trial = replace(captured.trial, error=str(failures[0]))
    return captured


def sources_to_read(writer: DataStreamWriter) -> list[SourceToRead]:
    """In the order of the offset log."""
    session = session_of(writer)
    named = keyed(source_identities(writer) or ())
    of_rows = _dataset_class(session).ofRows
    leaves = zip(named.items(), streaming_leaves(writer), strict=True)
    return [
        SourceToRead(key, identity, _frame(session, of_rows(session._jsparkSession, leaf)))
        for (key, identity), leaf in leaves
    ]


@contextmanager
def directory_of_source(scratch: LiveDirectory, source: SourceToRead, batch_id: int) -> Iterator[LiveDirectory | None]:
    """A directory in which a query of the source alone reads a planned batch; None if the batch reads nothing of it."""
    names = [f"{OFFSETS}/{each}" for each in (batch_id - 1, batch_id) if each >= 0]
    entries = {name: scratch.folder.read(name) for name in names}
    offsets = [parse_offset_entry(data, f"{scratch.url}/{name}").sources for name, data in entries.items()]
    if source.key not in offsets[-1]:
        raise LiveDirectoryError(
            f"{scratch.url}: batch {batch_id} was planned for the sources {', '.join(offsets[-1])}, but the query has "
            f"a source {source.key} ({source.identity}). Debug the batch with the code that ran it."
        )
    until = offsets[-1][source.key]
    if until is None or (len(offsets) > 1 and offsets[0].get(source.key) == until):
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
            folder.place(name, [only_offset(data, f"{scratch.url}/{name}", source.key, own)])
        if batch_id > 0:
            commit = f"{COMMITS}/{batch_id - 1}"
            folder.place(commit, [with_state_ids(scratch.folder.read(commit), f"{scratch.url}/{commit}", None)])
        yield alone
    finally:
        alone.delete()


def _dataset_class(session: SparkSession) -> Any:
    jvm: Any = session._jvm
    name = str(session._jsparkSession.getClass().getName()).rpartition(".")[0]
    found = jvm
    for part in f"{name}.Dataset".split("."):
        found = getattr(found, part)
    return found


def _frame(session: SparkSession, jvm_frame: Any) -> DataFrame:
    from pyspark.sql import DataFrame as AnyFrame

    frame: DataFrame = AnyFrame(jvm_frame, session)
    return frame
