"""A rewrite of state by a Spark of its own, for a stream whose Spark cannot: 3.5, 4.0, 4.1 and Spark Connect.

A rewrite reads files and writes files, so the Spark that does it need not be the one that runs the query. It runs in
a child process: this Python with another PySpark before its own, or another interpreter. The child ends with this
process, because a successor may own the stream by then.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dagster_ckpt.errors import StateRewriteError, UnsupportedSparkError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.restore import Watch, clone, unwatched
from dagster_ckpt.spark.query.session import is_classic_session
from dagster_ckpt.spark.versions import RELEASES, Feature, release_of
from dagster_ckpt.state.shape import StateShape
from dagster_ckpt.state.spark_rewriter import require_rewriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VARIABLE = "DAGSTER_CKPT_REWRITER"
_TAKEN_OVER = "_DAGSTER_CKPT_IN_REWRITER"
_POLL_S = 0.2
# The child keeps to what the session was started with, as far as it concerns files and their formats.
_PASSED_ON = ("spark.hadoop.", "spark.sql.streaming.stateStore.")
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
        """The one that `DAGSTER_CKPT_REWRITER` names, else the installed one; None if there is neither."""
        named = os.environ.get(VARIABLE)
        place = Path(named) if named else installed_place()
        return Rewriter(place) if named or place.is_dir() else None

    def command(self) -> list[str]:
        """The command of the child."""
        return [self._interpreter, "-m", "dagster_ckpt.state.rewriter_process"]

    @property
    def _interpreter(self) -> str:
        return str(self.place) if self.place.is_file() else sys.executable

    def take_over(self, program: str, arguments: Sequence[str]) -> None:
        """Replace this process by a Python program with the other Spark; in such a process nothing happens."""
        if _TAKEN_OVER not in os.environ:
            command = [self._interpreter, "-c", program, *arguments]
            os.execve(command[0], command, {**self.environment(), _TAKEN_OVER: "1"})

    def environment(self) -> dict[str, str]:
        """Its environment: this one, without what names the Spark of this process."""
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
    """The folder of `dagster-ckpt rewriter install`; it need not exist."""
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(data) / "dagster_ckpt/rewriter"


def install_rewriter(report: Callable[[str], None]) -> Path:
    """Install PySpark into the folder of the rewriter, with pip. Replaces what is there.

    Raises:
        StateRewriteError: pip failed.
    """
    place = installed_place()
    place.parent.mkdir(parents=True, exist_ok=True)
    release = next(each for each in reversed(RELEASES) if each.has(Feature.STATE_REWRITER))
    wanted = f"pyspark=={release.minor}.*"
    report(f"installing {wanted} into {place}")
    with TemporaryDirectory(dir=place.parent) as unfinished:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", unfinished, wanted]
        done = subprocess.run(pip, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise StateRewriteError(
                f"pip could not install {wanted} ({' '.join(pip)}):\n{done.stderr.strip()}\nInstall PySpark "
                f"{release.minor} elsewhere, and name its folder or its interpreter in {VARIABLE}."
            )
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(unfinished, place, symlinks=True)
    return place


def rewriter_for(spark: SparkSession, *, changes_rows: bool = False) -> Rewriter | None:
    """What rewrites the state of a session's query: another Spark, or None for the session itself.

    Raises:
        UnsupportedSparkError: Neither can.
    """
    can_itself = release_of(spark.version).has(Feature.STATE_REWRITER) and is_classic_session(spark)
    if can_itself or changes_rows:
        require_rewriter(spark)
        return None
    found = Rewriter.find()
    if found is None:
        raise UnsupportedSparkError(
            f"A rewrite of state (other partitions, another backend) needs a Spark 4.2 or later, and this session has "
            f"Spark {spark.version}. The query can stay on its Spark: run `dagster-ckpt rewriter install` once on the "
            f"machine of the driver, which installs another PySpark beside it, or name one in {VARIABLE} (an "
            "interpreter, or a folder with PySpark), and start again."
        )
    return found


@dataclass(frozen=True)
class Written:
    """What the child has written; see `rewriting.Rewritten`."""

    rewrite_id: str
    batch_id: int
    rows: Mapping[tuple[int, str, str], tuple[int, int]]


def rewrite_elsewhere(
    rewriter: Rewriter,
    source: LiveDirectory,
    target: LiveDirectory,
    shape: StateShape,
    *,
    settings: Mapping[str, str],
    watch: Watch,
    report: Callable[[str], None],
) -> Written:
    """Let the rewriter fill a new directory. On any error, it is deleted.

    A directory that is not on a local disk is copied to this machine, rewritten there, and copied back: another
    Spark would need other jars for the same object store.
    """
    try:
        if source.local_path is not None and target.local_path is not None:
            return _written(_answer(rewriter, _order(source, target, shape, settings), watch, report))
        with TemporaryDirectory(prefix="dagster-ckpt-rewrite-") as folder:
            near, rewritten = (LiveDirectory(f"{folder}/{name}") for name in ("source", "rewritten"))
            report(f"copying {source.url} to this machine")
            clone(source, near, watch=watch, is_scratch=True)
            written = _written(_answer(rewriter, _order(near, rewritten, shape, settings), watch, report))
            report(f"copying the rewritten state to {target.url}")
            clone(rewritten, target, watch=watch, marked=True)
            return written
    except BaseException:
        target.delete()
        raise


def settings_of(spark: SparkSession) -> dict[str, str]:
    """The settings of a session that the rewriter shares."""
    found = {row.key: row.value for row in spark.sql("SET").collect()}
    return {name: str(value) for name, value in found.items() if name.startswith(_PASSED_ON)}


def _order(
    source: LiveDirectory, target: LiveDirectory, shape: StateShape, settings: Mapping[str, str]
) -> dict[str, object]:
    return {
        "source": source.url,
        "target": target.url,
        "shape": [shape.provider, shape.partitions, shape.checkpoint_format],
        "settings": dict(settings),
    }


def _written(answer: Mapping[str, Any]) -> Written:
    rows = {(int(o), str(n), str(s)): (int(c), int(d)) for o, n, s, c, d in answer["stores"]}
    return Written(answer["rewrite_id"], answer["batch_id"], rows)


@dataclass(frozen=True)
class WrittenState:
    """The rows of one state after a batch, as Parquet; fields as of `reading.StateName` and `StateFrame`."""

    batch_id: int
    operator_id: int
    operator: str
    state: str
    partitions: int
    kind: str
    place: str


def read_elsewhere(
    rewriter: Rewriter,
    live: LiveDirectory,
    batch_ids: Sequence[int],
    folder: str,
    *,
    settings: Mapping[str, str],
    report: Callable[[str], None],
) -> list[WrittenState]:
    """Let the rewriter read the state after some batches of a directory that no query uses, into Parquet files.

    Both must be on a local disk: another Spark would need other jars for an object store.
    """
    order = {"read": live.url, "batches": list(batch_ids), "folder": folder, "settings": dict(settings)}
    answer = _answer(rewriter, order, unwatched, report)
    return [WrittenState(**each) for each in answer["states"]]


def _answer(
    rewriter: Rewriter, order: Mapping[str, object], watch: Watch, report: Callable[[str], None]
) -> Mapping[str, Any]:
    """The last answer of the child."""
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
                    raise StateRewriteError(message)
                case {"stores": _} | {"states": _}:
                    done: Mapping[str, Any] = answer
                    return done
        status = process.wait()
    raise StateRewriteError(
        f"The rewriter {rewriter.place} ended with status {status} before it had rewritten the state; its log is "
        "above. The stream is unchanged."
    )


@contextmanager
def _child(rewriter: Rewriter, order: object) -> Iterator[tuple[subprocess.Popen[str], SimpleQueue[Any]]]:
    """The child, and what it says; None at its end. Killed on leaving, if it still runs."""
    process = subprocess.Popen(
        rewriter.command(),
        env=rewriter.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    answers: SimpleQueue[Any] = SimpleQueue()
    assert process.stdin is not None
    assert process.stdout is not None
    lines = process.stdout

    def listen() -> None:
        for line in lines:
            try:
                answers.put(json.loads(line))
            except ValueError:
                sys.stderr.write(line)
        answers.put(None)

    listener = threading.Thread(target=listen, name="rewriter", daemon=True)
    listener.start()
    try:
        # The caller notices that it has ended.
        with suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        yield process, answers
    finally:
        _end(process)
        listener.join()


def _end(process: subprocess.Popen[str]) -> None:
    """Let the child end, and its JVM with it: nothing may write into a directory that is deleted next."""
    # The group: its JVM too.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()
