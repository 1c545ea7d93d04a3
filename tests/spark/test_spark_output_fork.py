"""A folder that was given the rows of another file sink is read as that one is."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter

from dagster_ckpt.errors import RestoreError
from dagster_ckpt.io.location import same_folder
from dagster_ckpt.sinks.file_sink import FileSink, fork_output, read_sink_log
from dagster_ckpt.sinks.registry import described_sink
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from dagster_ckpt.spark.query.output import named_output

pytestmark = pytest.mark.spark


def partitioned(spark: SparkSession, root: Path) -> DataStreamWriter:
    """A query into a folder whose names have to be escaped in the log, some of them twice."""
    (root / "in").mkdir()
    rows = [{"a": number, "k": key} for number, key in enumerate(["x y", "p%q", "u=v", "ä"])]
    (root / "in/rows.json").write_text("\n".join(map(json.dumps, rows)))
    writer = spark.readStream.schema("a long, k string").json(str(root / "in")).writeStream.partitionBy("k")
    return writer.format("parquet").option("path", str(root / "out put")).option("checkpointLocation", str(root / "ck"))


def test_a_partitioned_output_is_forked_with_its_folders(spark: SparkSession, tmp_path: Path) -> None:
    writer = partitioned(spark, tmp_path)
    old, new = tmp_path / "out put", tmp_path / "new one"
    told = named_output(writer)
    assert told is not None
    assert told.place == str(old)
    assert same_folder(str(old), f"file:{old}/")
    query = writer.trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    entries = [SinkEntry("0", (old / "_spark_metadata/0").read_bytes())]

    fork_output(f"file:{old}", str(new), 0, entries, still_mine=nullcontext)
    fork_output(f"file:{old}", str(new), 0, entries, still_mine=nullcontext)

    expected = sorted(map(tuple, spark.read.parquet(str(old)).collect()))
    assert len(expected) == 4
    assert sorted(map(tuple, spark.read.parquet(str(new)).collect())) == expected
    assert {file.name for file in FileSink.at(str(new)).leftovers().files} == read_sink_log(f"file:{new}").names
    # Whatever becomes of the original's files.
    for file in FileSink.at(str(old)).leftovers().files:
        (old / file.path).unlink()
    assert sorted(map(tuple, spark.read.parquet(str(new)).collect())) == expected


@pytest.mark.parametrize("options", [{"format": "console"}, {"format": "delta", "path": "/table"}, {}])
def test_only_a_file_sink_has_a_folder_before_it_is_started(spark: SparkSession, options: dict[str, str]) -> None:
    writer = spark.readStream.format("rate").load().writeStream
    writer = writer.format(options["format"]) if "format" in options else writer.foreachBatch(lambda rows, batch: None)

    told = named_output(writer.option("path", options["path"]) if "path" in options else writer)
    assert not isinstance(described_sink(told), FileSink)


@pytest.mark.parametrize(
    ("output_format", "is_file_sink"),
    [
        ("libsvm", True),
        ("org.apache.spark.ml.source.libsvm.LibSVMFileFormat", True),
        ("org.apache.spark.sql.execution.datasources.v2.orc.OrcDataSourceV2", True),
        ("noop", False),
        ("com.example.Missing", False),
    ],
)
def test_a_format_is_of_a_file_sink_if_spark_writes_it_with_one(
    spark: SparkSession, output_format: str, is_file_sink: bool
) -> None:
    writer = spark.readStream.format("rate").load().writeStream.format(output_format).option("path", "/out")

    assert isinstance(described_sink(named_output(writer)), FileSink) is is_file_sink


def test_a_log_that_names_files_elsewhere_cannot_be_forked(tmp_path: Path) -> None:
    entry = SinkEntry("0", b'v1\n{"path":"file:///elsewhere/part-0","action":"add"}')

    with pytest.raises(RestoreError, match="is outside of that folder"):
        fork_output(str(tmp_path / "out"), str(tmp_path / "new"), 0, [entry], still_mine=nullcontext)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("s3a://bucket/out", "s3n://bucket/out/"),
        ("s3a://bucket/out//rows", "S3://bucket/out/./rows"),
        ("s3a://bucket/in/../out", "s3a://bucket/out"),
        ("hdfs://node//out", "hdfs://node/out"),
        ("abfss://box@account/out", "abfs://box@account/out"),
    ],
)
def test_a_folder_is_the_same_however_it_is_spelled(one: str, other: str) -> None:
    assert same_folder(one, other)
    assert not same_folder(one, f"{other}-2")


def test_a_folder_that_is_mounted_in_two_places_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mounted").mkdir()
    look = Path.stat

    def as_mounted(path: Path, **how: bool) -> os.stat_result:
        return look(tmp_path / "disk" if path == tmp_path / "mounted" else path, **how)

    monkeypatch.setattr(Path, "stat", as_mounted)

    assert same_folder(f"{tmp_path}/disk/not made yet", f"file:{tmp_path}/mounted/not made yet")
    assert not same_folder(f"{tmp_path}/disk/a", f"{tmp_path}/mounted/b")
