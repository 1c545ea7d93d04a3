"""A query of plain PySpark, in a process without this package, is adopted while it runs, and handed back.

The steps are those of docs/migrate.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pyspark
import pytest
from click.testing import CliRunner
from pyarrow import parquet
from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.cli.main import commands
from dagster_ckpt.config.state_backend import HashMapStateBackend
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import Outcome, RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import SupervisedQuery, start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.spark.versions import Feature, installed_release
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.ownership import CLAIM
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery import plain_query
from tests.support.page_blocks import blocks_of
from tests.support.query_bench import make_stream
from tests.support.small_spark import SETTINGS, lay_file, small_spark

pytestmark = [pytest.mark.spark, pytest.mark.core]

COMPACTING = {"spark.sql.streaming.fileSink.log.compactInterval": "4"}
DEADLINE_S = 180


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@dataclass
class Place:
    """A query, its input and its output, and the stream that adopts it."""

    root: Path
    spark: SparkSession
    files: int = 0
    stream: StreamHandle = field(init=False)

    def __post_init__(self) -> None:
        (self.root / "landing").mkdir(parents=True)
        self.stream = make_stream(self.root)

    @property
    def folders(self) -> dict[str, str]:
        return {name: str(self.root / name) for name in ("landing", "checkpoint", "output")}

    @property
    def directory(self) -> LiveDirectory:
        """The directory of the plain query."""
        return LiveDirectory(self.folders["checkpoint"])

    def feed(self, files: int) -> None:
        """Lay files; each is one batch, and no row is late."""
        for number in range(self.files, self.files + files):
            rows = [{"at": f"2024-01-01T{number:02}:{n:02}:00Z", "shop": n % 3} for n in range(10)]
            lay_file(self.root / "landing", number, rows)
        self.files += files

    def is_idle(self, live: LiveDirectory) -> bool:
        """Whether all input is committed, also by the batch without data that moves the watermark on."""
        positions = live.positions()
        if positions.commit is None or positions.commit != positions.offset:
            return False
        # Not the log of the source: its entry comes before the batch that reads it.
        source = json.loads(live.folder.read(f"offsets/{positions.commit}").splitlines()[2])
        return source["logOffset"] == self.files - 1 and not self.has_data(live, positions.commit)

    @staticmethod
    def has_data(live: LiveDirectory, batch: int | None) -> bool:
        """Whether a batch reads anything that the batch before it did not."""
        if not batch:
            return True
        now, before = (live.folder.read(f"offsets/{number}").splitlines()[2:] for number in (batch, batch - 1))
        return now != before

    def current(self) -> LiveDirectory:
        return LiveDirectory(self.stream.catalog.streams.get("orders").live_directory or "")

    def run(self, until: Callable[[], bool], start_from: str = "latest") -> Outcome:
        """Run the stream in this thread, until a condition holds."""
        catalog, deadline = self.stream.catalog, time.monotonic() + DEADLINE_S

        def interrupted() -> bool:
            assert time.monotonic() < deadline
            latest = catalog.executions.latest("orders")
            return latest is not None and latest.status is ExecutionStatus.RUNNING and until()

        def describe() -> DataStreamWriter:
            return plain_query.writer(self.spark, self.folders["landing"], self.folders["output"])

        def start(live: LiveDirectory) -> SupervisedQuery:
            return start_query(describe(), "orders", live)

        asked = RunRequest(
            run_id="run",
            start_query=start,
            describe=describe,
            interrupted=interrupted,
            start_from=StartFrom(start_from),
        )
        return execute_stream(self.stream, asked)

    def run_to_the_end(self) -> Outcome:
        return self.run(lambda: self.is_idle(self.current()))

    def rows(self, output: str = "output") -> Counter[tuple[Any, ...]]:
        return Counter(tuple(row) for row in self.spark.read.parquet(str(self.root / output)).collect())

    def expected(self) -> Counter[tuple[Any, ...]]:
        """The windows that the watermark has closed, by the definition of the query."""
        hours = range(self.files - 1)
        rows = {
            (f"2024-01-01 {hour:02}:00:00", shop): sum(n % 3 == shop for n in range(10))
            for hour in hours
            for shop in range(3)
        }
        return Counter((at, shop, count) for (at, shop), count in rows.items())

    def assert_exact(self, output: str = "output") -> None:
        rows = Counter((str(at), shop, count) for at, shop, count in self.rows(output).elements())
        assert rows == self.expected()

    def command(self, *arguments: str) -> str:
        """The output of a command of `dagster-ckpt`."""
        root = ["--catalog", f"sqlite:///{self.root}/catalog.db", "--storage", f"{self.root}/snapshots"]
        done = CliRunner().invoke(commands(), [*root, "--live-root", f"{self.root}/live", *arguments])
        assert done.exit_code == 0, done.output
        return done.output


@dataclass
class PlainProcess:
    """A process of plain PySpark."""

    process: subprocess.Popen[str]
    stop: Path

    def errors(self) -> list[str | None]:
        """How its queries ended."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        assert self.process.returncode == 0, err[-3000:]
        errors: list[str | None] = json.loads(out.splitlines()[-1])
        return errors

    def stopped(self) -> list[str | None]:
        self.stop.touch()
        return self.errors()


@contextmanager
def plain_pyspark(root: Path, queries: Sequence[Mapping[str, str]]) -> Iterator[PlainProcess]:
    stop = root / f"stop-{time.monotonic_ns()}"
    # Hadoop's own local files, as people have them.
    own = {name: value for name, value in os.environ.items() if name not in ("SPARK_DIST_CLASSPATH", "PYTHONPATH")}
    own["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    program = {"QUERIES": json.dumps(list(queries)), "STOP": str(stop), "SETTINGS": json.dumps(SETTINGS | COMPACTING)}
    process = subprocess.Popen(
        [sys.executable, plain_query.__file__],
        env=own | program | {"PYSPARK_PYTHON": sys.executable},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield PlainProcess(process, stop)
    finally:
        process.kill()
        process.wait()


def content_of(folder: Path) -> dict[str, bytes]:
    # Without Hadoop's checksums, which it renames after the file.
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark(COMPACTING) as session:
        apply_state_backend(session, HashMapStateBackend())
        yield session


@pytest.mark.thorough(sample="tests/recovery/test_adopt.py")
def test_a_query_is_adopted_while_it_runs_and_handed_back(spark: SparkSession, tmp_path: Path) -> None:
    copied, in_place = Place(tmp_path / "copied", spark), Place(tmp_path / "in-place", spark)
    both = (copied, in_place)
    for place in both:
        place.feed(3)
    with plain_pyspark(tmp_path, [place.folders for place in both]) as outside:
        for place in both:
            wait_until(lambda place=place: place.is_idle(place.directory), "the plain query reads its input")
            before = content_of(place.root / "checkpoint")
            arguments = ("adopt", "orders", place.folders["checkpoint"], "--sink", place.folders["output"])
            told = place.command(*arguments, "--dry-run")
            # Spark 3.5 does not record the operators in the directory.
            assert ("stateStoreSave" in told) == installed_release().has(Feature.OPERATOR_METADATA)
            assert "dry run: nothing was registered" in told
            place.command(*arguments, "--label", "adopted", *(["--in-place"] if place is in_place else []))
            assert content_of(place.root / "checkpoint") == before
            place.feed(2)
        for place in both:
            # It goes on as if nothing had happened.
            wait_until(lambda place=place: place.is_idle(place.directory), "the plain query goes on")
            fed = place.files
            place.run_to_the_end()
            assert place.files == fed
            place.feed(2)
        # The next batch that it plans ends it.
        errors = outside.errors()
    assert [error is not None for error in errors] == [True, True], errors
    for place in both:
        place.run_to_the_end()
        place.assert_exact()
    assert same_folder(in_place.current().url, in_place.directory.url)
    assert not same_folder(copied.current().url, copied.directory.url)
    assert (copied.root / "checkpoint" / CLAIM).exists()

    # Back to the snapshot from before the first start, which has the log of the sink.
    in_place.run(lambda: in_place.is_idle(in_place.current()), start_from="adopted")
    in_place.assert_exact()

    # The way out: where the stream stopped, and from the first snapshot with the rows up to it.
    here = copied.command("export", "orders", "--to", str(copied.root / "exported"))
    assert "its log is at batch" in here
    copied.command("savepoint", "orders", "--label", "last")
    moved = f"{copied.folders['output']}={copied.root}/moved"
    told = copied.command("export", "orders", "last", "--to", str(copied.root / "checkpoint-2"))
    assert "where the exported query continues: write there" in told
    copied.command("export", "orders", "adopted", "--to", str(copied.root / "checkpoint-3"), "--output", moved)
    copied.feed(2)
    folders = [
        {**copied.folders, "checkpoint": str(copied.root / "checkpoint-2")},
        {**copied.folders, "checkpoint": str(copied.root / "checkpoint-3"), "output": str(copied.root / "moved")},
    ]
    for folder in folders:
        # One after the other: they have one query id, and Spark stops the first of two such queries in a session.
        exported = LiveDirectory(folder["checkpoint"])
        with plain_pyspark(tmp_path, [folder]) as plain:
            wait_until(lambda exported=exported: copied.is_idle(exported), "the exported query reads its input")
            assert plain.stopped() == [None]
    copied.assert_exact()
    copied.assert_exact("moved")


PIPELINE = """
from pyspark import pipelines as dp
from pyspark.sql import SparkSession, functions as F

def rows():
    return SparkSession.active().readStream.schema("at timestamp, shop long").json("/data/landing")

@dp.table
def totals():
    return rows().withWatermark("at", "1 minute").groupBy(F.window("at", "1 minute"), "shop").count()

@dp.table
def plain():
    return rows()
"""
MANIFEST = """
name: shop
storage: file:///data/storage
database: default
configuration: {spark.sql.shuffle.partitions: "2"}
libraries: [{glob: {include: flows.py}}]
"""


class Pipeline:
    """A declarative pipeline of two tables, for which the commands of its page are typed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "landing").mkdir(parents=True)
        for name, text in {"flows.py": PIPELINE, "spark-pipeline.yml": MANIFEST}.items():
            (root / name).write_text(self._here(text))
        home = Path(pyspark.__file__).parent
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "SPARK_REMOTE"},
            **{"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable},
            "PATH": f"{home / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "DAGSTER_CKPT_CATALOG": f"sqlite:///{root}/catalog.db",
            "DAGSTER_CKPT_STORAGE": f"{root}/snapshots",
            "DAGSTER_CKPT_LIVE_ROOT": f"{root}/live",
        }

    def _here(self, text: str) -> str:
        return text.replace("/data/", f"{self.root}/")

    def feed(self, *minutes: int) -> None:
        for minute in minutes:
            row = {"at": f"2026-01-01T00:{minute:02}:00Z", "shop": minute}
            (self.root / f"landing/{minute}.json").write_text(json.dumps(row))

    def type(self, *commands: str) -> None:
        settings = {
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": f"{self.root}/warehouse",
            "spark.ui.enabled": "false",
        }
        options = " ".join(f"--conf {name}={value}" for name, value in settings.items())
        for command in commands:
            line = self._here(command).replace("spark-pipelines run", f"spark-pipelines {options} run")
            done = subprocess.run(
                ["bash", "-c", line], cwd=self.root, env=self._environment, capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"

    def rows(self, table: str) -> list[str]:
        """What a reader of the table finds, by its log."""
        log = (path for path in (self.root / f"warehouse/{table}/_spark_metadata").iterdir() if path.name.isdigit())
        entries = [json.loads(line) for path in log for line in path.read_text().splitlines()[1:]]
        files = (unquote(urlsplit(entry["path"]).path) for entry in entries)
        return sorted(str(row) for file in files for row in parquet.ParquetFile(file).read().to_pylist())


@pytest.mark.thorough(sample="tests/recovery/test_adopt.py")
@pytest.mark.timeout(1800)
@pytest.mark.skipif(find_spec("pyspark.pipelines") is None, reason="Declarative Pipelines came with Spark 4.1")
def test_one_flow_of_a_declarative_pipeline_goes_back_by_the_commands_of_the_guide(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    adopting, updating, rewinding = (block.commands for block in blocks_of("guides/declarative-pipelines.md"))
    pipeline.feed(0, 1, 2)
    pipeline.type("spark-pipelines run", *adopting)
    first = pipeline.rows("totals")
    pipeline.feed(3, 4, 5)
    pipeline.type(*updating)
    rows = {table: pipeline.rows(table) for table in ("totals", "plain")}
    assert len(rows["totals"]) > len(first) > 0
    assert len(rows["plain"]) == 6

    *back, update = rewinding
    pipeline.type(*back)
    assert pipeline.rows("totals") == first
    pipeline.type(update)

    assert {table: pipeline.rows(table) for table in rows} == rows
    pipeline.type("dagster-ckpt savepoint totals --label before-update-43")
