import json
from pathlib import Path

import pytest
from live_files import LiveFiles, schema

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, RestoreError
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import is_metadata_v2, rewrite_schema_paths
from dagster_ckpt.spark.checkpoint_dir.restore import materialize

SCHEMA = "state/0/_stateSchema/default/0_ff20b0ad"


def metadata_v2(*schemas: str) -> bytes:
    store = {"storeName": "default", "numPartitions": 1, "stateSchemaFilePaths": list(schemas)}
    info = {"operatorId": 0, "operatorName": "symmetricHashJoin"}
    body = {"operatorInfo": info, "stateStoreInfo": [store], "operatorPropertiesJson": '{"x":true}'}
    return b"v2\n" + json.dumps(body).encode()


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    made = LiveFiles(tmp_path / "live-0")
    made.batches(1)
    made.put("state/0/_metadata/v2/0", metadata_v2(f"file:/gone/stream/live-0/{SCHEMA}"))
    made.put(SCHEMA, schema(has_key=True, version="v3"))
    for version in (1, 2):
        made.put(f"state/0/0/{version}.delta")
    return made


@pytest.mark.parametrize("old", ["file:/a/ck", "file:///a/state/0/ck", "s3a://bucket/state/ck"])
def test_schema_paths_point_into_the_new_directory_after_a_restore(old: str) -> None:
    data = rewrite_schema_paths(metadata_v2(f"{old}/{SCHEMA}"), "state/0/_metadata/v2/0", "file:///new/live-1")

    version, _, text = data.decode().partition("\n")
    assert version == "v2"
    assert json.loads(text)["stateStoreInfo"][0]["stateSchemaFilePaths"] == [f"file:///new/live-1/{SCHEMA}"]
    assert json.loads(text)["operatorPropertiesJson"] == '{"x":true}'


@pytest.mark.parametrize("data", [b"", b"v2\n{", b"v2\n{}", metadata_v2("file:/elsewhere/schema")])
def test_metadata_that_cannot_be_rewritten_is_named(data: bytes) -> None:
    with pytest.raises(LiveDirectoryError, match="state/0/_metadata/v2/0"):
        rewrite_schema_paths(data, "state/0/_metadata/v2/0", "file:///new")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("state/0/_metadata/v2/3", True), ("state/0/_metadata/metadata", False), ("state/0/0/_metadata/schema", False)],
)
def test_only_metadata_of_version_2_holds_paths(path: str, expected: bool) -> None:
    assert is_metadata_v2(path) is expected


def test_schemas_that_the_newest_metadata_refers_to_are_needed(files: LiveFiles) -> None:
    assert {file.path for file in cut(files.live, carry_in_flight=False).files} >= {SCHEMA, "state/0/_metadata/v2/0"}

    files.remove(SCHEMA)
    with pytest.raises(IncompleteCutError, match=f"{SCHEMA} is missing"):
        cut(files.live, carry_in_flight=False)


def test_metadata_that_a_later_batch_wrote_is_left_out(files: LiveFiles) -> None:
    files.put("state/0/_metadata/v2/2", metadata_v2("file:/gone/state/0/_stateSchema/default/2_new"))

    assert "state/0/_metadata/v2/2" not in {file.path for file in cut(files.live, carry_in_flight=False).files}


def test_a_schema_purged_with_older_metadata_is_not_needed(files: LiveFiles) -> None:
    files.put("state/0/_metadata/v2/1", metadata_v2("file:/gone/state/0/_stateSchema/default/1_newer"))
    files.put("state/0/_stateSchema/default/1_newer", schema(has_key=True, version="v3"))
    files.remove(SCHEMA)

    assert cut(files.live, carry_in_flight=False).batch_id == 1


def test_a_materialized_snapshot_refers_only_to_itself(files: LiveFiles, tmp_path: Path) -> None:
    taken = cut(files.live, carry_in_flight=False)
    target = LiveDirectory(str(tmp_path / "live-1"))

    materialize(target, lambda write: [write(file.path, [file.open().read()]) for file in taken.files] and None)

    text = (tmp_path / "live-1/state/0/_metadata/v2/0").read_text()
    assert f"file://{tmp_path}/live-1/{SCHEMA}" in text
    assert "gone" not in text


def test_a_snapshot_with_damaged_metadata_leaves_nothing_behind(files: LiveFiles, tmp_path: Path) -> None:
    taken = cut(files.live, carry_in_flight=False)
    target = LiveDirectory(str(tmp_path / "live-1"))

    def damage(path: str, data: bytes) -> bytes:
        return b"v2\nnonsense" if is_metadata_v2(path) else data

    with pytest.raises(RestoreError, match="cannot be restored"):
        materialize(
            target, lambda write: [write(f.path, [damage(f.path, f.open().read())]) for f in taken.files] and None
        )

    assert sorted(path.name for path in tmp_path.iterdir()) == ["live-0"]
