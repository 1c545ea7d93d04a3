"""A stream through the public interface that reads what there is and ends, in the session of a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from dagster_ckpt import CheckpointConfig, Client, RestartStrategies, run_stream
from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.errors import CkptError
from tests.support.small_spark import lay_file

STREAM = "small"
Writer = Callable[[SparkSession], DataStreamWriter]
Row = tuple[Any, ...]
ROWS = 10


class SmallStream:
    """A stream whose files have ten ids each, five of them also in the file before.

    Args:
        spark: The session.
        root: Folder of everything that it has.
        query: The columns of its rows, or what to do with them; default: the rows as they are.
        backend: Its state backend.
    """

    def __init__(
        self,
        spark: SparkSession,
        root: Path,
        query: Callable[[DataFrame], DataFrame] = lambda rows: rows,
        *,
        backend: StateBackend | None = None,
    ) -> None:
        self.spark, self.root, self.query, self.backend = spark, root, query, backend
        self.places = {
            "catalog": f"sqlite:///{root}/catalog.db",
            "storage": f"file://{root}/snapshots",
            "live_root": f"{root}/live",
        }
        self.files = 0
        root.mkdir(parents=True, exist_ok=True)

    def feed(self, files: int, *, folder: str = "in") -> None:
        """Lay files, each a batch."""
        (self.root / folder).mkdir(exist_ok=True)
        for number in range(self.files, self.files + files):
            lay_file(self.root / folder, number, [{"a": 5 * number + row} for row in range(ROWS)])
        self.files += files

    def read(self, spark: SparkSession, folder: str = "in", *, schema: str = "a long", files: int = 1) -> DataFrame:
        """The source."""
        return spark.readStream.schema(schema).option("maxFilesPerTrigger", files).json(str(self.root / folder))

    def write(self, rows: DataFrame, output: str = "out") -> DataStreamWriter:
        """The sink."""
        return rows.writeStream.format("parquet").option("path", str(self.root / output))

    def writer(self, *, folder: str = "in", output: str = "out") -> Writer:
        """The query, with another source or sink than its own."""
        return lambda spark: self.write(self.query(self.read(spark, folder)), output)

    def run(self, writer: Writer | None = None, **options: Any) -> None:
        """Run it until it has read everything."""
        described = writer or self.writer()
        run_stream(
            STREAM,
            lambda spark: described(spark).trigger(availableNow=True),
            **self.places,
            spark=self.spark,
            state_backend=self.backend,
            **{
                "restart_strategy": RestartStrategies.no_restart(),
                "checkpointing": CheckpointConfig(cleanup="RETAIN_ON_CANCELLATION"),
                **options,
            },
        )

    def run_plainly(self, checkpoint: str, writer: Writer | None = None) -> None:
        """Run the query without the product."""
        described = (writer or self.writer())(self.spark)
        location = str(self.root / checkpoint)
        query = described.option("checkpointLocation", location).trigger(availableNow=True).start()
        query.awaitTermination()

    @contextmanager
    def client(self) -> Iterator[Client]:
        with Client(**self.places) as client:
            yield client

    def savepoint(self, label: str = "sp") -> None:
        with self.client() as client:
            client.trigger_savepoint(STREAM, label=label)

    @property
    def live(self) -> Path:
        """Its live directory."""
        with self.client() as client:
            directory = client.catalog.streams.get(STREAM).live_directory
        assert directory is not None
        return Path(directory)

    def rows(self, *outputs: str) -> Counter[Row]:
        """What a reader sees in its output."""
        found: Counter[Row] = Counter()
        for output in outputs or ("out",):
            found += Counter(tuple(row) for row in self.spark.read.parquet(str(self.root / output)).collect())
        return found

    def files_of(self, *folders: str) -> dict[str, bytes]:
        """Each file of some folders, without the checksums that Hadoop keeps beside them."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for folder in folders
            for path in sorted((self.root / folder).rglob("*"))
            if path.is_file() and not path.name.endswith(".crc")
        }

    @contextmanager
    def nothing_changes(self) -> Iterator[None]:
        """Check that a start which is refused leaves state, output and recovery points as they were."""
        before, live = self.files_of("live", "out", "snapshots"), self.live
        yield
        after = self.files_of("live", "out", "snapshots")
        assert {path for path in {*before, *after} if before.get(path) != after.get(path)} == set()
        assert self.live == live
        with self.client() as client:
            assert client.catalog.recoveries.of_stream(STREAM) == []

    def refused(self, writer: Writer | None = None, **options: Any) -> CkptError:
        """The error that a start is refused with, having changed nothing."""
        with self.nothing_changes():
            try:
                self.run(writer, **options)
            except CkptError as error:
                return error
            raise AssertionError("the start was not refused")


def without_checksums(folder: Path) -> None:
    """Delete the checksums that Hadoop keeps on a local disk, as on an object store."""
    for path in folder.rglob(".*.crc"):
        path.unlink()


def copies(files: int) -> Counter[Row]:
    """The rows of so many files."""
    return Counter((5 * number + row,) for number in range(files) for row in range(ROWS))


def distinct(files: int) -> Counter[Row]:
    """The same, each once."""
    return Counter({(id_,) for id_ in range(5 * files + 5)})


def dedup(rows: DataFrame) -> DataFrame:
    """A query with state: each id once."""
    return rows.dropDuplicates(["a"])
