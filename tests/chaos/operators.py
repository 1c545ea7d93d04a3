"""The queries of the chaos, the files that they read, and the rows that an uninterrupted run of them writes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, StateBackend
from dagster_ckpt.spark.versions import Feature, installed_release
from tests.support.small_spark import lay_file

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

FORMAT_2 = {"spark.sql.streaming.stateStore.checkpointFormatVersion": "2"}
STORES: dict[str, StateBackend] = {
    "heap": HashMapStateBackend(),
    "rocksdb": EmbeddedRocksDBStateBackend(False),
    "changelog": EmbeddedRocksDBStateBackend(True),
}
if installed_release().has(Feature.CHECKPOINT_FORMAT_2):
    STORES["v2"] = EmbeddedRocksDBStateBackend(True, settings=FORMAT_2)
SIDES = ("left", "right")
ROWS = 10
# Rows are never late: files of the two sides may come to batches that are not the same.
DELAY_MIN = 40
START_S = 1_767_225_600
Row = tuple[Any, ...]


@dataclass(frozen=True)
class Code:
    """A version of the program's code.

    Attributes:
        version: Its name.
        left: Folder that the first source reads, in the folder `in`.
        right: The same of the second source.
    """

    version: str
    left: str = "left"
    right: str = "right"


CODES = {
    code.version: code
    for code in (
        Code("right"),
        Code("swapped", left="right", right="left"),
        Code("wrong path", left="other"),
        Code("no such path", right="nowhere"),
    )
}


def lay(root: Path, side: str, number: int) -> None:
    """Lay a file of a side; an id of it is also in the file before or after."""
    folder = root / "in" / side
    folder.mkdir(parents=True, exist_ok=True)
    lay_file(folder, number, [{"id": id_, "at": at} for id_, at in _read(side, number)])


def _read(side: str, number: int) -> list[tuple[int, int]]:
    """Ids and seconds of the rows of a file. The right side has each id of the left one a file later."""
    first = number if side != "right" else number - 1
    return [(first * 5 + row, START_S + (number * 10 + row) * 60) for row in range(ROWS)]


def sources(spark: SparkSession, root: Path, code: Code, *, pattern: bool) -> tuple[DataFrame, DataFrame]:
    def source(folder: str) -> DataFrame:
        path = f"{root}/in/{folder}/*.json" if pattern else f"{root}/in/{folder}"
        reader = spark.readStream.schema("id long, at long").option("maxFilesPerTrigger", 1)
        return reader.json(path).selectExpr("id", "timestamp_seconds(at) AS at")

    return source(code.left), source(code.right)


def _sides(left: DataFrame, right: DataFrame) -> DataFrame:
    return left.selectExpr("'left' AS side", "*").union(right.selectExpr("'right' AS side", "*"))


def _append(left: DataFrame, right: DataFrame) -> DataFrame:
    return _sides(left, right).selectExpr("side", "id", "unix_seconds(at) AS at")


def _distinct(left: DataFrame, right: DataFrame) -> DataFrame:
    return _sides(left, right).select("side", "id").dropDuplicates(["side", "id"])


def _windows(left: DataFrame, right: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    late = _sides(left, right).withWatermark("at", f"{DELAY_MIN} minutes")
    sums = late.groupBy(F.window("at", "10 minutes"), "side").agg(F.count("*").alias("n"), F.sum("id").alias("ids"))
    return sums.selectExpr("side", "unix_seconds(window.start) AS at", "n", "ids")


def _sessions(left: DataFrame, right: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    late = _sides(left, right).withWatermark("at", f"{DELAY_MIN} minutes")
    # Two files to a key, whose rows are one session.
    keyed = late.selectExpr("*", f"(unix_seconds(at) - {START_S}) div 1200 AS pair")
    sums = keyed.groupBy(F.session_window("at", "15 minutes"), "side", "pair").agg(
        F.count("*").alias("n"), F.sum("id").alias("ids")
    )
    return sums.selectExpr("side", "unix_seconds(session_window.start) AS at", "n", "ids")


def _joined(left: DataFrame, right: DataFrame) -> DataFrame:
    delay = f"{DELAY_MIN} minutes"
    one = left.selectExpr("id", "at AS left_at").withWatermark("left_at", delay)
    other = right.selectExpr("id AS right_id", "at AS right_at").withWatermark("right_at", delay)
    near = "id = right_id AND right_at BETWEEN left_at - INTERVAL 30 MINUTES AND left_at + INTERVAL 30 MINUTES"
    from pyspark.sql import functions as F

    times = "unix_seconds(left_at) AS left_at", "unix_seconds(right_at) AS right_at"
    return one.join(other, F.expr(near)).selectExpr("id", *times)


def writer(
    spark: SparkSession, root: Path, operator: str, code: Code, *, pattern: bool, output: str = "out"
) -> DataStreamWriter:
    """The query of an operator, into Parquet files."""
    rows = OPERATORS[operator](*sources(spark, root, code, pattern=pattern))
    return rows.writeStream.format("parquet").outputMode("append").option("path", str(root / output))


OPERATORS: Mapping[str, Callable[[DataFrame, DataFrame], DataFrame]] = {
    "append": _append,
    "distinct": _distinct,
    "windows": _windows,
    "join": _joined,
    "sessions": _sessions,
}


def expected(operator: str, files: int) -> Counter[Row]:
    """The rows that an uninterrupted run has written once it has read so many files of each side."""
    rows = [(side, *row) for side in SIDES for number in range(files) for row in _read(side, number)]
    if operator == "append":
        return Counter(rows)
    if operator == "distinct":
        return Counter({(side, id_) for side, id_, _ in rows})
    if operator == "join":
        left, right = (Counter((id_, at) for of, id_, at in rows if of == side) for side in SIDES)
        near = [(a, b) for a in left.elements() for b in right.elements() if a[0] == b[0] and abs(a[1] - b[1]) <= 1800]
        return Counter((id_, at, other) for (id_, at), (_, other) in near)
    watermark = max(at for _, _, at in rows) - DELAY_MIN * 60
    length, closes = (600, 600) if operator == "windows" else (1200, 1200 - 60 + 900)
    counts: Counter[tuple[str, int]] = Counter()
    ids: Counter[tuple[str, int]] = Counter()
    for side, id_, at in rows:
        start = at - (at - START_S) % length
        counts[side, start] += 1
        ids[side, start] += id_
    return Counter((*group, n, ids[group]) for group, n in counts.items() if group[1] + closes <= watermark)
