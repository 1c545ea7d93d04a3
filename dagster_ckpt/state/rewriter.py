"""Let Spark's `StateRewriter` (4.2.1 and 4.3.0) rewrite state, in this session or a child process with another Spark.

For a query of 3.5, 4.0, 4.1 or Spark Connect, another Spark rewrites: this Python with another PySpark, or another
interpreter. The child ends with this process, because a successor may own the stream by then.

The child edits state too, and reads it for a session whose Spark has no reader of it (3.5, and 4.0 for format v2): it
writes the rows as Parquet.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from dagster_ckpt.errors import CkptError, OptionError, StateRewriteError, UnsupportedSparkError
from dagster_ckpt.io.file_io import no_op
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone
from dagster_ckpt.spark.checkpoint_dir.rocksdb_zip_version import give_snapshots_version
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.spark.query.description import pairs_of
from dagster_ckpt.spark.query.session import active_in_thread, is_classic_session
from dagster_ckpt.spark.versions import RELEASES, Feature, release_of
from dagster_ckpt.state.reading import OF_CONDITIONS, StateFrame, StateKind, StateName, StateReader, cause_in, unstored
from dagster_ckpt.state.stopped_state import StateIds, StateShape, state_session
from dagster_ckpt.state.unsafe_rows import Graft

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType


_STORE_IN_PLAN = re.compile(r"\[operatorId=(\d+)\]\[storeName=([^\]]+)\]")
_ARGUMENTS = 8
_CLASS = "org.apache.spark.sql.execution.streaming.state.StateRewriter"
RowsOf = Callable[[int, str], "DataFrame"]


def require_rewriter(spark: SparkSession) -> None:
    what = "A rewrite of state (other partitions, another backend, other rows)"
    release_of(spark.version).require(Feature.STATE_REWRITER, what)
    if not is_classic_session(spark):
        raise UnsupportedSparkError(
            f"{what} needs the JVM of the driver, which a Spark Connect session does not have. Run it in the driver."
        )
    found = _arities(spark)
    if _ARGUMENTS not in found:
        raise UnsupportedSparkError(
            f"{what} needs the StateRewriter of Spark 4.3, but that of this Spark {spark.version} "
            f"{'is missing' if not found else f'takes {found} arguments'}. Use a release of Apache Spark."
        )


class _RowsForSpark:
    """A `scala.Function1` that returns the rows of each store, instead of those that Spark offers.

    `error` keeps what Spark does not report.
    """

    def __init__(self, rows_of: RowsOf, writing: SparkSession) -> None:
        self._rows_of = rows_of
        self._writing = writing
        self.error: Exception | None = None

    def apply(self, offered: Any) -> Any:
        try:
            return self._rows(offered)
        except Exception as error:
            self.error = error
            raise

    def _rows(self, offered: Any) -> Any:
        named = _STORE_IN_PLAN.search(offered.queryExecution().analyzed().toString())
        if named is None:
            raise StateRewriteError(
                "The plan of Spark's StateRewriter does not name the state store that it "
                "is about to write. Use a release of Apache Spark."
            )
        rows = self._rows_of(int(named[1]), named[2])
        if rows._jdf.schema().equals(offered.schema()):
            return rows._jdf
        # Nullability must match, and internal rows say nothing of it. Heap state lacks the partition key, which is no
        # longer read.
        columns = [rows[name] if name in rows.columns else _null(offered, name) for name in offered.columns()]
        plain = rows.select(*columns)._jdf.queryExecution().toRdd()
        return self._writing._jsparkSession.internalCreateDataFrame(plain, offered.schema(), False)

    def toString(self) -> str:  # noqa: N802 - Java's name
        return "rows of the state to rewrite"

    class Java:
        implements: ClassVar[list[str]] = ["scala.Function1"]


def _null(offered: Any, column: str) -> Column:
    from pyspark.sql import functions as F

    kind = offered.schema().apply(column).dataType()
    return F.lit(None).cast(kind.sql()).alias(column)


def run_rewriter(
    spark: SparkSession, target: LiveDirectory, batch_id: int, shape: StateShape, rows_of: RowsOf
) -> StateIds:
    """Let Spark write all state into a directory that has everything else; returns its unique ids (format v2)."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import ensure_callback_server_started

    writing = state_session(spark, shape)
    jvm = _jvm(spark)
    some = jvm.scala.Option.apply
    rows = _RowsForSpark(rows_of, writing)
    ensure_callback_server_started(spark.sparkContext._gateway)  # type: ignore[no-untyped-call]
    location = target.spark_location
    try:
        rewriter = jvm.org.apache.spark.sql.execution.streaming.state.StateRewriter(
            writing._jsparkSession,
            batch_id,
            batch_id,
            location,
            writing._jsparkSession.sessionState().newHadoopConf(),
            some(location),
            some(rows),
            jvm.scala.Option.empty(),
        )
        return _state_ids(rewriter.run())
    except (PySparkException, Py4JError) as error:
        if isinstance(rows.error, CkptError):
            raise rows.error from error
        raise StateRewriteError(
            f"Spark could not write the state to {target.url}: {cause_in(rows.error or error)} The stream is unchanged."
        ) from error


def _state_ids(found: Any) -> StateIds:
    operators = pairs_of(found.get()) if found.isDefined() else ()
    return {int(number): tuple(tuple(map(str, stores)) for stores in ids) for number, ids in operators}


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


def _arities(spark: SparkSession) -> list[int]:
    from py4j.protocol import Py4JError

    loader = spark._jsparkSession.getClass().getClassLoader()
    try:
        found = _jvm(spark).java.lang.Class.forName(_CLASS, True, loader)
        return [constructor.getParameterCount() for constructor in found.getConstructors()]
    except Py4JError:
        return []


VARIABLE = "DAGSTER_CKPT_REWRITER"
_POLL_S = 0.2
# Settings that concern files and their formats.
_PASSED_ON = ("spark.hadoop.", "spark.sql.streaming.stateStore.")
_ERRORS = {each.__name__: each for each in (OptionError, UnsupportedSparkError)}
_OF_ANOTHER_SPARK = ("SPARK_HOME", "PYSPARK_", "SPARK_CONNECT_", "_PYSPARK_")


@dataclass(frozen=True)
class Rewriter:
    """A Spark that can rewrite state.

    Attributes:
        place: An interpreter that has PySpark and dagster_ckpt, or a folder with PySpark for this interpreter.
    """

    place: Path

    @staticmethod
    def find() -> Rewriter | None:
        """Return the one that `DAGSTER_CKPT_REWRITER` names, else the installed one; None if there is neither."""
        named = os.environ.get(VARIABLE)
        place = Path(named) if named else installed_place()
        return Rewriter(place) if named or place.is_dir() else None

    def command(self) -> list[str]:
        return [self._interpreter, "-m", "dagster_ckpt.state.rewriter_child"]

    @property
    def _interpreter(self) -> str:
        return str(self.place) if self.place.is_file() else sys.executable

    def environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_ANOTHER_SPARK)}
        paths = [str(self.place)] if self.place.is_dir() else []
        root = Path(__file__).parents[2]
        if root.name != "site-packages":
            paths.append(str(root))
        if self.place.is_dir():
            paths += filter(None, [os.environ.get("PYTHONPATH")])
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        # Heap state is read and written by tasks in Python.
        environment["PYSPARK_PYTHON"] = self._interpreter
        return environment


def installed_place() -> Path:
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(data) / "dagster_ckpt/rewriter"


def install_rewriter(report: Callable[[str], None]) -> Path:
    """Replace the installed PySpark by one from pip; StateRewriteError if pip fails."""
    place = installed_place()
    place.parent.mkdir(parents=True, exist_ok=True)
    release = next(each for each in reversed(RELEASES) if each.has(Feature.STATE_REWRITER))
    wanted = f"pyspark=={release.minor}.*"
    report(f"installing {wanted} into {place}")
    with TemporaryDirectory(dir=place.parent) as folder:
        # Renamed when it is whole: half a PySpark would be found and fail in each rewrite.
        whole = Path(folder) / place.name
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(whole), wanted]
        done = subprocess.run(pip, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise StateRewriteError(
                f"pip could not install {wanted} ({' '.join(pip)}):\n{done.stderr.strip()}\nInstall PySpark "
                f"{release.minor} elsewhere, and name its folder or its interpreter in {VARIABLE}."
            )
        if place.is_dir():
            place.rename(Path(folder) / "before")
        whole.rename(place)
    return place


def rewriter_for(spark: SparkSession) -> Rewriter | None:
    """Return another Spark, or None for the session itself; UnsupportedSparkError if neither can."""
    if release_of(spark.version).has(Feature.STATE_REWRITER) and is_classic_session(spark):
        require_rewriter(spark)
        return None
    found = Rewriter.find()
    if found is None:
        here = f"has Spark {spark.version}" if is_classic_session(spark) else "is a client of Spark Connect"
        raise UnsupportedSparkError(
            f"A rewrite of state (other partitions, another backend, other rows) needs a Spark 4.2 or later, and this "
            f"session {here}. The query can stay on its Spark: run `dagster-ckpt rewriter install` "
            f"once on the machine of the driver, which installs a second PySpark, or name one in {VARIABLE} "
            "(an interpreter, or a folder with PySpark), and start again."
        )
    return found


@dataclass(frozen=True)
class OrderedEdit:
    """A `StateEdit` for another Spark, with `rows` as Parquet files."""

    operator: int | str | None
    forget: str | None
    rows: LiveDirectory | None

    def as_record(self) -> list[object]:
        return [self.operator, self.forget, self.rows.url if self.rows is not None else None]

    @staticmethod
    def of_record(record: Sequence[Any]) -> OrderedEdit:
        operator, forget, rows = record
        return OrderedEdit(operator, forget, LiveDirectory(rows) if rows is not None else None)


def rewrite_elsewhere(
    rewriter: Rewriter,
    spark: SparkSession,
    source: LiveDirectory,
    target: LiveDirectory,
    shape: StateShape,
    *,
    graft: Graft | None = None,
    edits: Sequence[OrderedEdit] = (),
    watch: Watch,
    report: Callable[[str], None],
) -> Mapping[str, Any]:
    """Let the rewriter fill a new directory, which is deleted on any error; returns its answer.

    A directory that is not on a local disk is copied to this machine, rewritten there, and copied back: another Spark
    would need other jars for the same object store.
    """
    settings = settings_of(spark)
    try:
        if source.local_path is not None and target.local_path is not None:
            order = _order(source, target, shape, graft=graft, edits=edits, settings=settings)
            answer = ask(rewriter, order, watch, report)
            _let_session_read(spark, target, shape, watch)
            return answer
        with TemporaryDirectory(prefix="dagster-ckpt-rewrite-") as folder:
            near, rewritten = (LiveDirectory(f"{folder}/{name}") for name in ("source", "rewritten"))
            report(f"copying {source.url} to this machine")
            clone(source, near, watch=watch, is_scratch=True)
            if graft is not None:
                made = LiveDirectory(f"{folder}/made")
                clone(graft.state, made, watch=watch, is_scratch=True)
                given = {at: _near(each, f"{folder}/given/{at}") for at, each in graft.given.items()}
                graft = replace(graft, state=made, given=given)
            edits = [
                replace(each, rows=_near(each.rows, f"{folder}/rows/{number}")) if each.rows is not None else each
                for number, each in enumerate(edits)
            ]
            order = _order(near, rewritten, shape, graft=graft, edits=edits, settings=settings)
            answer = ask(rewriter, order, watch, report)
            _let_session_read(spark, rewritten, shape, watch)
            report(f"copying the rewritten state to {target.url}")
            clone(rewritten, target, watch=watch, marked=True)
            return answer
    except BaseException:
        target.delete()
        raise


def _let_session_read(spark: SparkSession, rewritten: LiveDirectory, shape: StateShape, watch: Watch) -> None:
    """Give snapshots the version that the query's Spark expects, if that is 4.0: see `rocksdb_zip_version.py`."""
    if shape.provider != ROCKSDB or release_of(spark.version).has(Feature.ONE_SNAPSHOT_VERSION):
        return
    version = shape.checkpoint_format
    if is_classic_session(spark):
        session = state_session(spark, shape)
        with active_in_thread(session):
            # The first use in a JVM fixes it, which may be this one.
            jvm: Any = session._jvm
            version = int(jvm.org.apache.spark.sql.execution.streaming.state.RocksDBCheckpointMetadata.VERSION())
    give_snapshots_version(rewritten, version, watch)
    rewritten.folder.flush_all()


def _near(files: LiveDirectory, place: str) -> LiveDirectory:
    near = LiveDirectory(place)
    for name, _entry in files.folder.find():
        near.folder.place(name, [files.folder.read(name)])
    return near


def settings_of(spark: SparkSession) -> dict[str, str]:
    found = {row.key: row.value for row in spark.sql("SET").collect()}
    passed_on = {name: str(value) for name, value in found.items() if name.startswith(_PASSED_ON)}
    # Their defaults depend on the version of Spark.
    return passed_on | {name: str(spark.conf.get(name)) for name in OF_CONDITIONS}


def _order(
    source: LiveDirectory,
    target: LiveDirectory,
    shape: StateShape,
    *,
    graft: Graft | None,
    edits: Sequence[OrderedEdit],
    settings: Mapping[str, str],
) -> dict[str, object]:
    return {
        "source": source.url,
        "target": target.url,
        "shape": [shape.provider, shape.partitions, shape.checkpoint_format],
        "settings": dict(settings),
        **({"graft": graft.as_record()} if graft is not None else {}),
        **({"edits": [each.as_record() for each in edits]} if edits else {}),
    }


def ask(
    rewriter: Rewriter, order: Mapping[str, object], watch: Watch, report: Callable[[str], None]
) -> Mapping[str, Any]:
    with _child(rewriter, order) as (process, answers):
        while True:
            watch()
            try:
                answer = answers.get(timeout=_POLL_S)
            except Empty:
                continue
            if answer is None:
                break
            match answer:
                case {"progress": message}:
                    report(message)
                case {"error": message}:
                    raise _ERRORS.get(answer.get("kind"), StateRewriteError)(message)
                case {"stores": _} | {"states": _} | {"changes": _}:
                    done: Mapping[str, Any] = answer
                    return done
        status = process.wait()
    raise StateRewriteError(
        f"The rewriter {rewriter.place} ended with status {status} before it was done; its log is "
        "above. The stream is unchanged."
    )


@contextmanager
def _child(rewriter: Rewriter, order: object) -> Iterator[tuple[subprocess.Popen[str], SimpleQueue[Any]]]:
    child = start_child(rewriter)
    try:
        give_order(child[0], order)
        yield child
    finally:
        end_child(child[0])


def start_child(rewriter: Rewriter) -> tuple[subprocess.Popen[str], SimpleQueue[Any]]:
    """Return the rewriter's process, and its answers with None at the end."""
    process = subprocess.Popen(
        rewriter.command(),
        env=rewriter.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    answers: SimpleQueue[Any] = SimpleQueue()
    assert process.stdout is not None
    lines = process.stdout

    def listen() -> None:
        with lines:
            for line in lines:
                try:
                    answers.put(json.loads(line))
                except ValueError:
                    sys.stderr.write(line)
        answers.put(None)

    threading.Thread(target=listen, name="rewriter", daemon=True).start()
    return process, answers


def give_order(process: subprocess.Popen[str], order: object) -> None:
    assert process.stdin is not None
    # The caller notices if the process has ended.
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()


def end_child(process: subprocess.Popen[str]) -> None:
    """End the child and its JVM: nothing may write into a directory that is deleted next."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


Report = Callable[[str], None]
_LOG = logging.getLogger(__name__)
_ADVICE = "A newer Spark reads it for this one: run `dagster-ckpt rewriter install` once."


@dataclass(frozen=True)
class _StoredFrame:
    kind: StateKind
    place: str
    schema: StructType


class StateElsewhere(StateReader):
    """State in Parquet files, whose folder must exist while frames are computed."""

    def __init__(
        self, spark: SparkSession, live: LiveDirectory, batch_id: int, places: Mapping[StateName, _StoredFrame]
    ) -> None:
        self.live, self.batch_id, self.format_version = live, batch_id, 1
        self._spark, self._places = spark, places

    @cached_property
    def states(self) -> tuple[StateName, ...]:
        return tuple(self._places)

    def frame(self, name: StateName) -> StateFrame:
        stored = self._places[name]
        kinds = {each.name: each.dataType for each in stored.schema.fields}
        return StateFrame(name, stored.kind, unstored(self._spark.read.parquet(f"file://{stored.place}"), kinds))


@contextmanager
def readers_of(
    spark: SparkSession, live: LiveDirectory, batch_ids: Sequence[int], report: Report = _LOG.info
) -> Iterator[dict[int, StateReader]]:
    """Read, by the session or the rewriter, a directory that no query uses; UnsupportedSparkError if neither can."""
    try:
        readers = {each: StateReader(spark, live, each) for each in batch_ids}
    except UnsupportedSparkError as error:
        rewriter = Rewriter.find()
        if rewriter is None:
            raise UnsupportedSparkError(f"{error} {_ADVICE}") from error
        report("another Spark reads the state")
        with TemporaryDirectory(prefix="dagster-ckpt-state-") as folder:
            near = live if live.local_path is not None else _near(live, f"{folder}/live")
            settings = settings_of(spark)
            order = {"read": near.url, "batches": list(batch_ids), "folder": folder, "settings": settings}
            yield _read(rewriter, order, spark, live, report)
        return
    yield readers


def _read(
    rewriter: Rewriter, order: Mapping[str, Any], spark: SparkSession, live: LiveDirectory, report: Report
) -> dict[int, StateReader]:
    from pyspark.sql.types import StructType

    places: dict[int, dict[StateName, _StoredFrame]] = {batch_id: {} for batch_id in order["batches"]}
    for batch_id, *name, kind, place, schema in ask(rewriter, order, no_op, report)["states"]:
        places[batch_id][StateName(*name)] = _StoredFrame(StateKind(kind), place, StructType.fromJson(schema))
    return {batch_id: StateElsewhere(spark, live, batch_id, found) for batch_id, found in places.items()}
