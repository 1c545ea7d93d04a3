"""A layout newer than we know is refused with its version named, at each place that has a version."""

from collections.abc import Callable
from pathlib import Path

import pytest
from live_files import HDFS, ROCKSDB, LiveFiles, changelog, schema, snapshot_zip, version_1_changelog

from dagster_ckpt.errors import UnknownLayoutError
from dagster_ckpt.sinks.registry import sinks_of
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory

UID = "0a-1b"
METADATA = "state/0/_metadata/metadata"
METADATA_V2 = (
    '{"operatorInfo":{"operatorId":0,"operatorName":"symmetricHashJoin"},"stateStoreInfo":[{"storeName":"default",'
    '"numPartitions":1,"stateSchemaFilePaths":["file:/live/state/0/_stateSchema/default/0_a"]}]}'
)


def heap(files: LiveFiles) -> None:
    files.batches(1)
    files.operator()
    files.put("state/0/0/1.delta")
    files.put("state/0/0/2.delta")


def rocksdb(files: LiveFiles) -> None:
    files.batches(1, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", snapshot_zip())
    files.put("state/0/0/2.changelog", version_1_changelog("v2"))


def format_v2(files: LiveFiles) -> None:
    files.batches(1, provider=ROCKSDB)
    files.operator()
    files.commit(1, {"0": [[UID]]})
    files.put(f"state/0/0/1_{UID}.changelog", changelog({1: UID}))
    files.put(f"state/0/0/2_{UID}.changelog", changelog({1: UID, 2: UID}))


def schema_files(files: LiveFiles) -> None:
    files.batches(1, provider=ROCKSDB)
    files.put("state/0/_metadata/v2/0", f"v2\n{METADATA_V2}")
    files.put("state/0/_stateSchema/default/0_a", schema(has_key=True, version="v3"))
    files.put("state/0/0/2.zip", snapshot_zip())


def other_provider(files: LiveFiles) -> None:
    heap(files)
    files.batches(1, provider="com.example.Provider")


def replace_version(path: str, version: str) -> Callable[[LiveFiles], None]:
    def change(files: LiveFiles) -> None:
        head, _, rest = (files.root / path).read_bytes().partition(b"\n")
        assert head.startswith(b"v")
        files.put(path, version.encode() + b"\n" + rest)

    return change


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    return LiveFiles(tmp_path / "live-0")


PLACES = [
    pytest.param(heap, replace_version("offsets/1", "v3"), r"offsets/1 is .* v3", id="offset-log"),
    pytest.param(heap, replace_version("offsets/0", "v3"), r"offsets/0 is .* v3", id="offset-log-batch-before"),
    pytest.param(heap, replace_version("commits/1", "v4"), r"commits/1 is .* v4", id="commit-log"),
    pytest.param(heap, replace_version("sources/0/1", "v2"), r"sources/0/1 is .* v2", id="source-log"),
    pytest.param(heap, replace_version(METADATA, "v3"), r"metadata is operator .* v3", id="operator-metadata"),
    pytest.param(
        schema_files,
        replace_version("state/0/_metadata/v2/0", "v9"),
        r"v2/0 is operator metadata .* v9",
        id="operator-metadata-v2",
    ),
    pytest.param(
        heap,
        lambda files: files.put("state/0/0/_metadata/schema", schema(has_key=True, version="v4")),
        r"schema is a state schema of version v4",
        id="state-schema",
    ),
    pytest.param(
        schema_files,
        lambda files: files.put("state/0/_stateSchema/default/0_a", schema(has_key=True, version="v4")),
        r"0_a is a state schema of version v4",
        id="state-schema-file",
    ),
    pytest.param(
        rocksdb,
        lambda files: files.put("state/0/0/2.changelog", version_1_changelog("v5")),
        r"2\.changelog is a changelog .* v5",
        id="changelog",
    ),
    pytest.param(
        format_v2,
        lambda files: files.put(f"state/0/0/2_{UID}.changelog", changelog({1: UID}, version="v5")),
        r"2_0a-1b\.changelog is a changelog of version v5",
        id="changelog-with-lineage",
    ),
    pytest.param(
        rocksdb,
        lambda files: files.put("state/0/0/2.zip", snapshot_zip(version="v3")),
        r"2\.zip is a RocksDB snapshot of version v3",
        id="rocksdb-snapshot",
    ),
    pytest.param(
        other_provider,
        lambda files: files.put("state/0/0/2.pages"),
        r"'2\.pages'.*com\.example\.Provider",
        id="provider",
    ),
]


@pytest.mark.parametrize(("build", "change", "message"), PLACES)
def test_an_unknown_version_is_refused_by_name(
    files: LiveFiles, build: Callable[[LiveFiles], None], change: Callable[[LiveFiles], None], message: str
) -> None:
    build(files)
    assert inspect_live_directory(files.live).status is LiveStatus.GOOD

    change(files)

    with pytest.raises(UnknownLayoutError, match=message):
        cut(files.live, carry_in_flight=False)
    # Not broken: an older snapshot must not take the place of what a newer Spark can go on from.
    with pytest.raises(UnknownLayoutError, match=message):
        inspect_live_directory(files.live)


def test_a_rocksdb_snapshot_of_spark_4_0_is_read(files: LiveFiles) -> None:
    rocksdb(files)

    files.put("state/0/0/2.zip", snapshot_zip(version="v2"))

    assert "state/0/0/2.zip" in {file.path for file in cut(files.live, carry_in_flight=False).files}


def test_an_unknown_version_of_a_file_sinks_log_is_refused_by_name(files: LiveFiles, tmp_path: Path) -> None:
    heap(files)
    sink = LiveFiles(tmp_path / "out")
    sink.put("_spark_metadata/0", 'v1\n{"path":"file:///out/a"}')
    sink.put("_spark_metadata/1", 'v2\n{"path":"file:///out/b"}')

    with pytest.raises(UnknownLayoutError, match=r"_spark_metadata/1 is .* v2"):
        cut(files.live, carry_in_flight=False, sinks=sinks_of([f"FileSink[file:{tmp_path}/out]"]))


def test_a_provider_that_extends_one_of_sparks_is_read_as_that(files: LiveFiles) -> None:
    other_provider(files)

    taken = cut(files.live, carry_in_flight=False)

    assert {"state/0/0/1.delta", "state/0/0/2.delta"} <= {file.path for file in taken.files}
    assert taken.properties["state_store_provider"] == "com.example.Provider"
    assert HDFS not in taken.properties["conf"].values()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(version_1_changelog(""), id="without-a-header"),
        pytest.param(version_1_changelog("v2"), id="with-column-families"),
        pytest.param(b"\x28\xb5\x2f\xfd of another codec", id="zstd"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_changelog_that_holds_no_lineage_is_taken_as_it_is(files: LiveFiles, data: bytes) -> None:
    rocksdb(files)

    files.put("state/0/0/2.changelog", data)

    assert "state/0/0/2.changelog" in {file.path for file in cut(files.live, carry_in_flight=False).files}


def test_names_of_sources_without_their_offsets_are_refused(tmp_path: Path) -> None:
    """Spark 4.2 writes it with named sources: before, the cut took a good log for one that was being purged."""
    files = LiveFiles(tmp_path / "live-0")
    heap(files)
    (files.root / "sources" / "0").rename(files.root / "sources" / "left")

    with pytest.raises(UnknownLayoutError, match=r"sources with names \(left\).*offsetLog.formatVersion to 2"):
        cut(files.live, carry_in_flight=False)
