"""Which state can be rewritten to which shape, decided before anything is written. Needs no JVM."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from dagster_ckpt.config.state_backend import PROVIDER_CLASS
from dagster_ckpt.errors import RestoreError, StateRewriteError
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import (
    parse_commit_entry,
    parse_metadata,
    parse_offset_entry,
    query_metadata,
    with_settings,
    with_state_ids,
)
from dagster_ckpt.spark.checkpoint_dir.state_files import HEAP, ROCKSDB
from dagster_ckpt.state import rewriting
from dagster_ckpt.state.stopped_state import StateShape, StoredState, WantedShape, check_rewrite
from tests.support.golden_stream import GoldenStream

CUSTOM = "com.example.Provider"
CODEC = "spark.sql.streaming.stateStore.compression.codec"
CHECKSUM = "spark.sql.streaming.stateStore.rowChecksum.enabled"
STRICT = "spark.sql.streaming.statefulOperator.useStrictDistribution"
JOIN_FORMAT = "spark.sql.streaming.join.stateFormatVersion"


def stored(
    provider: str = ROCKSDB,
    *operators: str,
    partitions: int = 5,
    settings: dict[str, str] | None = None,
) -> StoredState:
    pinned = {STRICT: "true", **(settings or {})}
    return StoredState(StateShape(provider, partitions), operators or ("stateStoreSave",), pinned)


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        (stored(), WantedShape(12)),
        (stored(HEAP, "globalLimit"), WantedShape(12)),
        (stored(ROCKSDB, "globalLimit", "dedupe"), WantedShape(12)),
        (stored(), WantedShape(provider=HEAP)),
        (stored(HEAP), WantedShape(3, ROCKSDB, 2)),
        (stored(HEAP, settings={CODEC: "zstd"}), WantedShape(provider=ROCKSDB)),
        (stored(ROCKSDB, "transformWithStateExec"), WantedShape(1, checkpoint_format=2)),
        (stored(ROCKSDB, "symmetricHashJoin", settings={JOIN_FORMAT: "3"}), WantedShape(12)),
        (stored(ROCKSDB, "symmetricHashJoin", settings={JOIN_FORMAT: "2"}), WantedShape(provider=HEAP)),
        (stored(ROCKSDB, settings={CHECKSUM: "true"}), WantedShape(12)),
        # No new heap file is compressed with the codec of before.
        (stored(ROCKSDB, settings={CODEC: "lzf"}), WantedShape(provider=HEAP)),
        # Each row stays in its partition.
        (stored(HEAP, settings={STRICT: "false"}), WantedShape(provider=ROCKSDB, checkpoint_format=2)),
    ],
)
def test_what_can_be_rewritten(state: StoredState, wanted: WantedShape) -> None:
    check_rewrite(state, wanted.of(state.shape))


@pytest.mark.parametrize(
    ("state", "wanted", "why"),
    [
        (
            stored(ROCKSDB, "transformWithStateExec"),
            WantedShape(provider=HEAP),
            "transformWithStateExec in RocksDB only",
        ),
        (
            stored(ROCKSDB, "symmetricHashJoin", settings={JOIN_FORMAT: "3"}),
            WantedShape(provider=HEAP),
            "join state of format v3 in RocksDB only",
        ),
        (stored(ROCKSDB, "globalLimit"), WantedShape(provider=HEAP), "cannot read the counter of a limit"),
        (stored(ROCKSDB, "globalLimit"), WantedShape(checkpoint_format=2), "cannot read the counter of a limit"),
        (stored(HEAP, "globalLimit", "dedupe"), WantedShape(12), "by way of RocksDB"),
        (stored(CUSTOM), WantedShape(12), f"files of {CUSTOM} are not known"),
        (stored(), WantedShape(provider=CUSTOM), f"files of {CUSTOM} are not known"),
        (stored(HEAP, settings={CODEC: "lzf"}), WantedShape(provider=ROCKSDB), "compressed with lzf"),
        (stored(HEAP, settings={CHECKSUM: "true"}), WantedShape(12), "rowChecksum.enabled is on"),
        (stored(ROCKSDB, settings={CHECKSUM: "true"}), WantedShape(provider=HEAP), "rowChecksum.enabled is on"),
        (stored(settings={STRICT: "false"}), WantedShape(12), "began on Spark 3.2 or older"),
        (stored(), WantedShape(0), "from 1 to 32768"),
        (stored(), WantedShape(40_000), "from 1 to 32768"),
    ],
)
def test_what_cannot_is_refused_with_the_reason(state: StoredState, wanted: WantedShape, why: str) -> None:
    with pytest.raises(StateRewriteError, match=why):
        check_rewrite(state, wanted.of(state.shape))


def test_rows_of_a_query_that_began_on_spark_3_2_are_not_changed() -> None:
    old = stored(settings={STRICT: "false"})
    with pytest.raises(StateRewriteError, match="not the number of its partitions or its rows"):
        check_rewrite(old, old.shape, changes_rows=True)
    unpinned = StoredState(old.shape, old.operators, {})
    with pytest.raises(StateRewriteError, match=r"began on Spark 3\.2 or older"):
        check_rewrite(unpinned, WantedShape(12).of(old.shape))


def test_heap_state_has_checkpoint_format_1() -> None:
    assert WantedShape(provider=HEAP, checkpoint_format=2).of(StateShape(ROCKSDB, 5, 2)) == StateShape(HEAP, 5, 1)
    assert WantedShape(partitions=7).of(StateShape(ROCKSDB, 5, 2)) == StateShape(ROCKSDB, 7, 2)


def test_the_shape_of_a_snapshot_is_in_its_header() -> None:
    properties = {
        "state_operators": [{"name": "stateStoreSave", "metadata_format": 1}],
        "state_store_provider": ROCKSDB,
        "state_partitions": 5,
        "formats": {"state_checkpoint": 2},
        "conf": {CODEC: "lz4"},
    }
    assert StoredState.of_properties(properties) == StoredState(
        StateShape(ROCKSDB, 5, 2), ("stateStoreSave",), settings={CODEC: "lz4"}
    )
    assert StoredState.of_properties({**properties, "state_operators": []}) is None


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_settings_of_a_planned_batch_are_changed_and_its_offsets_kept(version: str) -> None:
    offsets = '{"logOffset":3}' if version == "v1" else '0:{"logOffset":3}'
    entry = (
        f'{version}\n{{"batchWatermarkMs":7,"batchTimestampMs":8,"conf":{{"{PROVIDER_CLASS}":"{HEAP}"}}}}\n{offsets}'
    )
    changed = with_settings(
        entry.encode(), "offsets/4", {PROVIDER_CLASS: ROCKSDB, "spark.sql.shuffle.partitions": "12"}
    )

    before, after = parse_offset_entry(entry.encode(), "offsets/4"), parse_offset_entry(changed, "offsets/4")
    assert (after.provider_class, after.partitions) == (ROCKSDB, 12)
    assert (after.sources, after.watermark_ms, after.format_version) == (
        before.sources,
        before.watermark_ms,
        before.format_version,
    )
    assert b'"batchTimestampMs":8' in changed


def test_a_commit_is_rewritten_for_another_checkpoint_format() -> None:
    first = b'v1\n{"nextBatchWatermarkMs":5}'
    ids = {0: (("a",), ("b",))}
    second = with_state_ids(first, "commits/4", ids)
    parsed = parse_commit_entry(second, "commits/4")
    assert (parsed.format_version, parsed.next_watermark_ms, parsed.state_ids) == (2, 5, ids)
    assert with_state_ids(second, "commits/4", None) == first
    named = b'v3\n{"nextBatchWatermarkMs":5,"sinkMetadataMap":{"a":{}}}'
    assert parse_commit_entry(with_state_ids(named, "commits/4", ids), "commits/4").sinks == {"a": {}}


def test_the_id_of_a_rewrite_is_beside_that_of_the_query() -> None:
    data = query_metadata("q", "r")
    metadata = parse_metadata(data, "metadata")
    assert (metadata.id, metadata.rewrite_id) == ("q", "r")
    assert parse_metadata(query_metadata("q"), "metadata").rewrite_id is None
    assert query_metadata("q") == b'{"id":"q"}'


def test_a_rewrite_deletes_no_directory_that_was_there_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewriting, "rewriter_for", lambda _spark, **_: None)
    golden = GoldenStream(tmp_path / "stream").make()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "rows").write_text("theirs")

    with pytest.raises(RestoreError, match="exists already"):
        rewriting.rewrite_state(Mock(), LiveDirectory(golden.live_url), LiveDirectory(str(theirs)))

    golden.close()
    assert (theirs / "rows").read_text() == "theirs"
