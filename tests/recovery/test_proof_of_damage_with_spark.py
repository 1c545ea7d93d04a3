"""With a real query: wrong code never costs a healthy directory, and damage that Spark does not notice is found."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from dagster_ckpt.catalog.records import EventType, StartCause
from dagster_ckpt.client.examination import examine_live_directory
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, StateBackend
from dagster_ckpt.errors import CkptError
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.runtime.start_failures import unloadable_state
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.query import start_query
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.stream.handle import StreamHandle
from tests.support.query_bench import make_stream
from tests.support.small_spark import lay_file, small_spark
from tests.support.verbs import trigger_savepoint

pytestmark = pytest.mark.spark

BACKENDS: dict[str, StateBackend] = {"heap": HashMapStateBackend(), "rocksdb": EmbeddedRocksDBStateBackend(False)}
ROWS = 10


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark() as session:
        yield session


@dataclass
class Program:
    """A query that drops duplicates of what it reads from folders, one file in a batch."""

    spark: SparkSession
    root: Path
    stream: StreamHandle = field(init=False)
    files: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stream = replace(make_stream(self.root), restart=RestartStrategies.fixed_delay_restart(3, 1))

    def feed(self, folder: str, files: int = 1) -> None:
        (self.root / folder).mkdir(exist_ok=True)
        for number in range(self.files.get(folder, 0), self.files.get(folder, 0) + files):
            # Half of the rows are those of the file before.
            rows = [{"v": f"{folder}-{ROWS // 2 * number + n}"} for n in range(ROWS)]
            lay_file(self.root / folder, number, rows)
            self.files[folder] = number + 1

    def writer(self, *folders: str) -> Any:
        reader = self.spark.readStream.schema("v string").option("maxFilesPerTrigger", 1)
        read: list[DataFrame] = [reader.json(str(self.root / folder)) for folder in folders]
        union = read[0] if len(read) == 1 else read[0].union(read[1])
        written = union.dropDuplicates(["v"]).writeStream.format("parquet").option("path", str(self.root / "out"))
        return written.trigger(availableNow=True)

    def run(self, *folders: str) -> EndKind | Exception:
        def describe() -> Any:
            return self.writer(*folders)

        def start(live: LiveDirectory) -> Any:
            return start_query(describe(), "orders", live)

        asked = RunRequest("run", start, describe=describe, cause=StartCause.RESTART_NEW_RUN)
        try:
            return execute_stream(self.stream, asked).end.kind
        except CkptError as refused:
            return refused

    @property
    def live(self) -> Path:
        url = self.stream.catalog.streams.get("orders").live_directory or ""
        return Path(url.removeprefix("file://"))

    @property
    def started_from(self) -> str:
        latest = self.stream.catalog.executions.latest("orders")
        return str((latest.recovery or {})["kind"]) if latest is not None else ""

    def assert_exact(self) -> None:
        rows = Counter(row.v for row in self.spark.read.parquet(str(self.root / "out")).collect())
        expected = {f"{each}-{n}" for each, files in self.files.items() for n in range(ROWS // 2 * (files + 1))}
        assert rows == Counter(expected)


@pytest.fixture
def program(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Iterator[Program]:
    apply_state_backend(spark, BACKENDS[getattr(request, "param", "heap")])
    program = Program(spark, tmp_path)
    yield program
    program.stream.catalog.close()


@pytest.mark.thorough
def test_swapped_sources_cost_nothing_once_the_right_code_is_back(program: Program) -> None:
    program.feed("a", 2)
    program.feed("b", 5)
    assert program.run("a", "b") is EndKind.ENDED_BY_ITSELF
    trigger_savepoint(program.stream, origin="a test")
    program.feed("a", 2)
    assert program.run("a", "b") is EndKind.ENDED_BY_ITSELF
    healthy = program.live
    program.feed("b")

    for _ in range(2):
        assert program.run("b", "a") is not EndKind.ENDED_BY_ITSELF

    assert program.stream.catalog.recoveries.of_stream("orders") == []
    assert program.live == healthy
    assert program.run("a", "b") is EndKind.ENDED_BY_ITSELF
    assert program.live == healthy
    program.assert_exact()


def another_path(entry: Path) -> None:
    head, line = entry.read_text().split("\n", 1)
    read = json.loads(line)
    # As long as before, and a file that is not there.
    read["path"] = read["path"].replace("0.json", "9.json").replace("1.json", "8.json")
    entry.write_text(f"{head}\n{json.dumps(read, separators=(',', ':'))}")


def without_sums(live: Path) -> None:
    for path in list(live.rglob(".*.crc")):
        path.unlink()


@pytest.mark.thorough(but="as on an object store")
@pytest.mark.parametrize("has_sums", [True, False], ids=["with Hadoop's checksums", "as on an object store"])
def test_a_changed_path_in_a_source_log_is_found_before_a_start_reads_the_file_again(
    program: Program, *, has_sums: bool
) -> None:
    program.feed("a", 3)
    program.run("a")
    trigger_savepoint(program.stream, origin="a test")
    another_path(program.live / "sources/0/1")
    if not has_sums:
        without_sums(program.live)
    program.feed("a")

    assert not examine_live_directory(program.stream).diagnosis.can_resume
    assert program.run("a") is EndKind.ENDED_BY_ITSELF

    assert program.started_from == "RESTORE"
    program.assert_exact()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def newest(live: Path, pattern: str) -> list[Path]:
    """The newest file of each state partition."""
    found: dict[Path, Path] = {}
    for path in sorted(live.glob(pattern), key=lambda path: path.stat().st_mtime_ns):
        found[path.parent] = path
    return list(found.values())


def test_state_that_rotted_after_an_orderly_end_is_found_when_the_query_fails(program: Program) -> None:
    program.feed("a", 2)
    program.run("a")
    trigger_savepoint(program.stream, origin="a test")
    program.feed("a", 2)
    program.run("a")
    for delta in newest(program.live, "state/0/*/*.delta"):
        flip(delta)
    without_sums(program.live)
    program.feed("a")

    assert program.run("a") is EndKind.ENDED_BY_ITSELF

    events = program.stream.catalog.events.after(0)
    found = [each.payload["error"] for each in events if each.type is EventType.RECOVERY_FAILED]
    assert found == ["STATE_FILE_DAMAGED"]
    # The run that recovered has committed a batch and taken its final checkpoint.
    assert program.stream.catalog.recoveries.of_stream("orders") == []
    program.assert_exact()


@pytest.mark.parametrize("program", ["rocksdb"], indirect=True)
def test_state_without_checksums_is_tried_on_a_copy(program: Program) -> None:
    program.feed("a", 2)
    program.run("a")
    trigger_savepoint(program.stream, origin="a test")
    before = set(program.live.glob("state/0/*/SSTs/*.sst"))
    program.feed("a", 2)
    program.run("a")
    without_sums(program.live)
    live = LiveDirectory(str(program.live))

    def describe() -> Any:
        return program.writer("a")

    assert unloadable_state(program.stream, live, describe) is None
    added = set(program.live.glob("state/0/*/SSTs/*.sst")) - before
    assert added
    for table in added:
        flip(table)
    assert "cannot read the state" in (unloadable_state(program.stream, live, describe) or "")
    program.feed("a")

    assert program.run("a") is EndKind.ENDED_BY_ITSELF
    program.assert_exact()


def fails(read: Callable[[], Any]) -> Any:
    raise RuntimeError("the checksum is corrupt: EOFException")


@pytest.mark.parametrize("program", ["rocksdb"], indirect=True)
def test_code_that_cannot_be_described_proves_nothing_about_the_state(program: Program) -> None:
    program.feed("a", 2)
    program.run("a")
    trigger_savepoint(program.stream, origin="a test")
    without_sums(program.live)

    assert unloadable_state(program.stream, LiveDirectory(str(program.live)), lambda: fails(lambda: None)) is None
