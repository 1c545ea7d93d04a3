"""What a snapshot says of its query, as far as the live directory shows it."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from live_files import HDFS, ROCKSDB, LiveFiles, changelog, schema

from dagster_ckpt.spark.checkpoint_dir.cut import cut

UID = "0a-1b"


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    return LiveFiles(tmp_path / "live-0")


def test_a_snapshot_names_the_place_of_every_source(files: LiveFiles) -> None:
    files.batches(1)
    files.offsets(1, '{"logOffset":1}', "-", '{"orders":{"0":7}}', "any text")

    assert cut(files.live, carry_in_flight=False).properties["source_offsets"] == {
        "0": {"logOffset": 1},
        "1": None,
        "2": {"orders": {"0": 7}},
        "3": "any text",
    }


def test_a_snapshot_names_the_settings_that_spark_pins(files: LiveFiles) -> None:
    files.batches(1, partitions=3)

    assert cut(files.live, carry_in_flight=False).properties["conf"] == {
        "spark.sql.shuffle.partitions": "3",
        "spark.sql.streaming.stateStore.providerClass": HDFS,
        "spark.sql.streaming.stateStore.encodingFormat": "unsaferow",
    }


def test_a_snapshot_names_every_operator_with_its_stores_and_formats(files: LiveFiles) -> None:
    join = "spark.sql.streaming.join.stateFormatVersion"
    files.batches(0, partitions=2)
    conf = {
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.streaming.stateStore.providerClass": HDFS,
        join: "2",
        "spark.sql.streaming.aggregation.stateFormatVersion": "2",
    }
    files.put("offsets/0", "v1\n" + json.dumps({"batchWatermarkMs": 0, "conf": conf}) + '\n{"logOffset":0}')
    files.operator(0, name="stateStoreSave", key=False)
    files.put("state/0/0/1.delta")
    files.operator(1, name="symmetricHashJoin", stores=("left", "right"))
    for partition in (0, 1):
        for store in ("left", "right"):
            files.put(f"state/1/{partition}/{store}/1.delta")

    properties = cut(files.live, carry_in_flight=False).properties

    assert properties["state_store_provider"] == HDFS
    common = {"state_format": 2, "metadata_format": 1, "schema_format": 2}
    assert properties["state_operators"] == [
        {"number": 0, "name": "stateStoreSave", "stores": ["default"], "partitions": 1, **common},
        {"number": 1, "name": "symmetricHashJoin", "stores": ["left", "right"], "partitions": 2, **common},
    ]


def test_a_snapshot_names_the_format_of_each_log(files: LiveFiles) -> None:
    files.batches(0)
    assert cut(files.live, carry_in_flight=False).properties["formats"] == {
        "offset_log": 1,
        "commit_log": 1,
        "state_checkpoint": None,
    }

    files.batches(0, provider=ROCKSDB)
    files.put(
        "offsets/0", (files.root / "offsets/0").read_text().replace("v1\n", "v2\n").replace('\n{"log', '\n0:{"log')
    )
    files.operator()
    files.commit(0, {"0": [[UID]]})
    files.put(f"state/0/0/1_{UID}.changelog", changelog({1: UID}))
    assert cut(files.live, carry_in_flight=False).properties["formats"] == {
        "offset_log": 2,
        "commit_log": 2,
        "state_checkpoint": 2,
    }


def test_operator_metadata_of_version_2_is_named_with_its_schema(files: LiveFiles) -> None:
    files.batches(0)
    store = {"storeName": "default", "stateSchemaFilePaths": ["file:/live/state/0/_stateSchema/default/0_a"]}
    info = {"operatorId": 0, "operatorName": "transformWithStateExec"}
    files.put("state/0/_metadata/v2/0", "v2\n" + json.dumps({"operatorInfo": info, "stateStoreInfo": [store]}))
    files.put("state/0/_stateSchema/default/0_a", schema(has_key=True, version="v3"))
    files.put("state/0/0/1.delta")

    (operator,) = cut(files.live, carry_in_flight=False).properties["state_operators"]

    assert (operator["metadata_format"], operator["schema_format"], operator["state_format"]) == (2, 3, None)


def test_a_commit_of_version_3_tells_its_sinks(files: LiveFiles) -> None:
    """The format of `CommitMetadataV3`; PySpark 4.3 has no way to name a sink, so no query here writes it."""
    files.batches(0)
    sink = {"sinkName": "out", "commitOffset": 0, "providerName": "parquet", "apiVersion": "v1", "isActive": True}
    files.put("commits/0", "v3\n" + json.dumps({"nextBatchWatermarkMs": 5, "sinkMetadataMap": {"out": sink}}))

    properties = cut(files.live, carry_in_flight=False).properties

    assert properties["named_sinks"] == {"out": sink}
    assert properties["formats"]["commit_log"] == 3
    assert properties["watermark_ms"] == 5


def test_a_snapshot_names_the_spark_of_its_reader(files: LiveFiles) -> None:
    files.batches(0)

    assert cut(files.live, carry_in_flight=False).properties["pyspark_of_reader"] == metadata.version("pyspark")


def test_what_a_snapshot_says_is_json(files: LiveFiles) -> None:
    files.batches(1)

    properties = cut(files.live, carry_in_flight=False).properties

    assert json.loads(json.dumps(properties)) == properties
