import pickle

import pytest

from dagster_ckpt.config.checkpoint_storage import (
    CustomCheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.errors import OptionError, OptionTypeError


@pytest.mark.parametrize(
    ("given", "shown", "url"),
    [
        ("file:///data/c", "file:/data/c", "file:///data/c"),
        ("file:/data/c/", "file:/data/c", "file:///data/c"),
        ("s3://bucket//a///b/", "s3://bucket/a/b", "s3://bucket/a/b"),
        ("hdfs://namenode:8020/x/../y/./z", "hdfs://namenode:8020/y/z", "hdfs://namenode:8020/y/z"),
        ("hdfs://checkpoints", "hdfs://checkpoints", "hdfs://checkpoints"),
        ("gs://bucket/", "gs://bucket", "gs://bucket"),
        ("memory://c/d", "memory://c/d", "memory://c/d"),
        ("memory:/c", "memory:/c", "memory:///c"),
        ("abfs://box@account/c", "abfs://box@account/c", "abfs://box@account/c"),
        ("file://var/checkpoints/", "file://var/checkpoints", "file:///checkpoints"),
    ],
)
def test_a_path_is_normalised_as_flink_does(given: str, shown: str, url: str) -> None:
    storage = FileSystemCheckpointStorage(given)
    assert storage.get_checkpoint_path() == shown
    assert storage.checkpoint_location.url == url
    assert FileSystemCheckpointStorage(url).checkpoint_location.url == url


@pytest.mark.parametrize(
    "path",
    [
        "",
        " ",
        " file:///x",
        "rel",
        "/abs",
        "file:rel",
        "3s://b/c",
        "://b",
        "file:///",
        "file:///a/..",
        "memory:///",
        "file://host",
    ],
)
def test_a_path_that_names_no_directory_is_rejected(path: str) -> None:
    with pytest.raises(OptionError, match=r"checkpoint_path is .* must be the URL of a directory"):
        FileSystemCheckpointStorage(path)
    with pytest.raises(OptionError, match=r"savepoint_path is .* must be the URL of a directory"):
        JobManagerCheckpointStorage(savepoint_path=path)


def test_thresholds_have_flinks_range() -> None:
    assert FileSystemCheckpointStorage("file:///x", 0).get_min_file_size_threshold() == 0
    assert FileSystemCheckpointStorage("file:///x", 1048576).get_min_file_size_threshold() == 1048576
    for threshold in (-2, 1048577):
        with pytest.raises(OptionError, match=r"file_state_size_threshold is .* from -1 to 1048576"):
            FileSystemCheckpointStorage("file:///x", threshold)


def test_what_the_code_leaves_unset_comes_from_the_deployment() -> None:
    deployment = DeploymentStorage(
        savepoint_path="s3://bucket/savepoints",
        file_state_size_threshold=100,
        write_buffer_size=65536,
        storage_options={"endpoint_url": "http://minio", "anon": True},
    )
    storage = FileSystemCheckpointStorage("s3://bucket/c", storage_options={"anon": False}).configure(deployment)
    assert storage.get_checkpoint_path() == "s3://bucket/c"
    assert storage.get_savepoint_path() == "s3://bucket/savepoints"
    assert storage.get_min_file_size_threshold() == 100
    assert storage.get_write_buffer_size() == 65536
    assert storage.storage_options == {"endpoint_url": "http://minio", "anon": False}


def test_what_the_code_sets_holds_over_the_deployment() -> None:
    storage = FileSystemCheckpointStorage("s3://bucket/c", 0, 1, savepoint_path="s3://bucket/s")
    deployment = DeploymentStorage(savepoint_path="s3://other/s", file_state_size_threshold=5, write_buffer_size=5)
    assert storage.configure(deployment) == storage


def test_what_nobody_sets_is_the_default() -> None:
    storage = FileSystemCheckpointStorage("file:///c").configure(DeploymentStorage())
    assert storage.get_min_file_size_threshold() == 20480
    assert storage.get_write_buffer_size() == 4096
    assert storage.get_savepoint_path() is None


def test_memory_storage_takes_its_paths_from_the_deployment() -> None:
    deployment = DeploymentStorage(checkpoint_path="file:///c", savepoint_path="file:///s")
    storage = JobManagerCheckpointStorage(max_state_size=7).configure(deployment)
    assert storage.get_checkpoint_path() == "file:/c"
    assert storage.get_savepoint_path() == "file:/s"
    assert storage.get_max_state_size() == 7
    own = JobManagerCheckpointStorage("file:///own", savepoint_path="file:///mine")
    assert own.configure(deployment) == own


def test_a_storage_prints_what_pyflinks_prints() -> None:
    shown = "JobManagerCheckpointStorage (checkpoints to JobManager) ( maxStateSize: 7)"
    assert str(JobManagerCheckpointStorage("file:///own", 7, storage_options={"secret": "hush"})) == shown
    assert str(FileSystemCheckpointStorage("file:///own", storage_options={"secret": "hush"})) == (
        "FileSystemCheckpointStorage (checkpoints: 'file:/own', fileStateThreshold: 20480, writeBufferSize: 4096)"
    )


def test_a_custom_storage_is_named_by_import_path() -> None:
    storage = CustomCheckpointStorage("company.storage:open_tape", {"library": 3})
    assert (storage.factory, storage.settings) == ("company.storage:open_tape", {"library": 3})
    assert storage.configure(DeploymentStorage()) == storage


def test_a_custom_storage_carries_what_the_deployment_says_to_its_factory() -> None:
    deployment = DeploymentStorage(savepoint_path="file:///s", storage_options={"secret": "hush"})
    storage = CustomCheckpointStorage("company.storage:open_tape", {"library": 3}).configure(deployment)
    assert (storage.settings, storage.deployment) == ({"library": 3}, deployment)
    assert "hush" not in repr(storage)
    assert pickle.loads(pickle.dumps(storage)) == storage


@pytest.mark.parametrize("factory", ["", "name", "a b:c", "a:b:c", ".a:b", "a.:b"])
def test_what_cannot_be_imported_is_rejected(factory: str) -> None:
    with pytest.raises(OptionError, match=r"factory is .* must be an import path"):
        CustomCheckpointStorage(factory)


def test_wrong_types_are_rejected() -> None:
    with pytest.raises(OptionTypeError, match="factory is None"):
        CustomCheckpointStorage(None)
    with pytest.raises(OptionTypeError, match="storage_options has the key 5"):
        FileSystemCheckpointStorage("file:///c", storage_options={5: "x"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "storage",
    [
        JobManagerCheckpointStorage("file:///c", 9, savepoint_path="file:///s"),
        FileSystemCheckpointStorage("s3://b/c", 5, 6, storage_options={"secret": "hush"}),
        CustomCheckpointStorage("a.b:c", {"secret": "hush"}),
    ],
    ids=lambda storage: type(storage).__name__,
)
def test_a_storage_is_configuration_that_pickles_hashes_and_keeps_secrets(storage: object) -> None:
    assert pickle.loads(pickle.dumps(storage)) == storage
    assert len({storage, pickle.loads(pickle.dumps(storage))}) == 1
    assert "hush" not in f"{storage} {storage!r}"


def test_later_changes_of_the_given_settings_do_not_reach_the_storage() -> None:
    given = {"key": "a"}
    storage = FileSystemCheckpointStorage("s3://b/c", storage_options=given)
    given["key"] = "b"
    assert storage.storage_options == {"key": "a"}
