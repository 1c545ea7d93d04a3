import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyspark
import pytest

from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage, JobManagerCheckpointStorage
from dagster_ckpt.config.rocksdb import (
    OPTIONS_SET,
    EmbeddedRocksDBStateBackend,
    PredefinedOptions,
    RocksDBStateBackend,
    spark_settings_of,
)
from dagster_ckpt.config.state_backend import (
    CustomStateBackend,
    FsStateBackend,
    HashMapStateBackend,
    MemoryStateBackend,
    StateBackend,
    storage_of_stream,
)
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.validation import Effect

ROCKSDB = "spark.sql.streaming.stateStore.rocksdb."
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
CHANGELOG = f"{ROCKSDB}changelogCheckpointing.enabled"
SHARE = "spark.sql.streaming.stateStore.snapshotToCleanupThreadRatio"
THREADS = "spark.sql.streaming.stateStore.numStateStoreMaintenanceThreads"
LOCAL = "spark.local.dir"

MADE: dict[str, Callable[[], StateBackend]] = {
    "hashmap": HashMapStateBackend,
    "memory": lambda: MemoryStateBackend("file:///c", "file:///s", 7, True),
    "fs": lambda: FsStateBackend("file:///c", "file:///s", 7, 8, False),
    "embedded": lambda: EmbeddedRocksDBStateBackend(True, settings={"spark.x": 1}),
    "rocksdb": lambda: RocksDBStateBackend("file:///c", True, settings={"spark.x": 1}),
    "custom": lambda: CustomStateBackend("a.B", {"spark.x": 1}),
}


@pytest.fixture(autouse=True)
def factories_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    sys.modules.pop("options_factories", None)


@pytest.fixture
def rocksdb() -> RocksDBStateBackend:
    return RocksDBStateBackend("file:///data/c")


@pytest.mark.parametrize("name", ["hashmap", "memory", "fs"])
def test_the_heap_backends_are_sparks_hdfs_backed_provider(name: str) -> None:
    provider = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
    assert MADE[name]().spark_settings() == {PROVIDER: provider}


@pytest.mark.parametrize(("incremental", "text"), [(True, "true"), (False, "false"), (None, "false")])
def test_incremental_checkpointing_is_sparks_changelog(incremental: bool | None, text: str) -> None:
    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    assert EmbeddedRocksDBStateBackend(incremental).spark_settings() == {PROVIDER: provider, CHANGELOG: text}


@pytest.mark.parametrize("name", ["hashmap", "embedded"])
def test_the_provider_is_a_class_of_the_installed_spark(name: str) -> None:
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-sql_2*.jar")
    entry = MADE[name]().spark_settings()[PROVIDER].replace(".", "/") + ".class"
    with ZipFile(jar) as classes:
        assert entry in classes.namelist()


def test_the_older_backends_say_where_snapshots_live() -> None:
    memory = MADE["memory"]().checkpoint_storage()
    assert memory == JobManagerCheckpointStorage("file:///c", 7, savepoint_path="file:///s")
    fs = MADE["fs"]().checkpoint_storage()
    assert fs == FileSystemCheckpointStorage("file:///c", 7, 8, savepoint_path="file:///s")
    assert MADE["rocksdb"]().checkpoint_storage() == FileSystemCheckpointStorage("file:///c")
    on_memory = RocksDBStateBackend(checkpoint_stream_backend=MADE["memory"]())
    assert on_memory.checkpoint_storage() == memory
    assert on_memory.get_checkpoint_backend() == MADE["memory"]()


@pytest.mark.parametrize("name", ["hashmap", "embedded", "custom"])
def test_the_newer_backends_leave_that_to_the_storage(name: str) -> None:
    assert MADE[name]().checkpoint_storage() is None
    with pytest.raises(OptionError, match="does not define where snapshots are stored"):
        RocksDBStateBackend(checkpoint_stream_backend=MADE[name]())


def test_a_backend_that_names_a_place_comes_before_the_streams_storage_and_the_deployments() -> None:
    stream, deployment = JobManagerCheckpointStorage(), FileSystemCheckpointStorage("file:///deployment")
    named = MADE["fs"]().checkpoint_storage()
    assert storage_of_stream(stream, MADE["fs"](), deployment) == named
    assert storage_of_stream(stream, MADE["embedded"](), deployment) == stream
    assert storage_of_stream(None, MADE["hashmap"](), deployment) == deployment


@pytest.mark.parametrize(
    ("choice", "settings"),
    [
        (PredefinedOptions.DEFAULT, {}),
        (PredefinedOptions.SPINNING_DISK_OPTIMIZED, {"maxOpenFiles": "-1"}),
        (
            PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM,
            {
                "maxOpenFiles": "-1",
                "writeBufferSizeMB": "64",
                "maxWriteBufferNumber": "4",
                "blockCacheSizeMB": "256",
                "blockSizeKB": "128",
            },
        ),
        (PredefinedOptions.FLASH_SSD_OPTIMIZED, {"maxOpenFiles": "-1"}),
    ],
)
def test_predefined_options_become_spark_settings(
    rocksdb: RocksDBStateBackend, choice: PredefinedOptions, settings: dict[str, str]
) -> None:
    before = rocksdb.spark_settings()
    rocksdb.set_predefined_options(choice)
    assert rocksdb.get_predefined_options() is choice
    assert rocksdb.spark_settings() == before | {ROCKSDB + name: value for name, value in settings.items()}


def test_every_predefined_option_says_what_becomes_of_it() -> None:
    assert set(OPTIONS_SET) == set(PredefinedOptions)
    for option in (option for options in OPTIONS_SET.values() for option in options):
        assert (option.effect is Effect.MAPPED) == (option.setting is not None)
        assert option.reason.endswith(".")


def test_a_factorys_settings_go_on_top_of_the_predefined_ones(rocksdb: RocksDBStateBackend) -> None:
    rocksdb.set_options("options_factories.TwiceTheCache")
    assert rocksdb.get_options() == "options_factories.TwiceTheCache"
    assert rocksdb.spark_settings()[f"{ROCKSDB}blockCacheSizeMB"] == "16"
    rocksdb.set_predefined_options(PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM)
    assert rocksdb.spark_settings()[f"{ROCKSDB}blockCacheSizeMB"] == "512"


def test_further_settings_go_on_top_of_everything() -> None:
    cache = f"{ROCKSDB}blockCacheSizeMB"
    backend = EmbeddedRocksDBStateBackend(settings={cache: 3, f"{ROCKSDB}compactOnCommit": True})
    backend.set_options("options_factories:TwiceTheCache")
    backend.set_predefined_options(PredefinedOptions.SPINNING_DISK_OPTIMIZED_HIGH_MEM)
    settings = backend.spark_settings()
    assert (settings[cache], settings[f"{ROCKSDB}compactOnCommit"]) == ("3", "true")


def test_a_factory_that_sets_what_is_not_sparks_is_named(rocksdb: RocksDBStateBackend) -> None:
    rocksdb.set_options("options_factories.NotSparks")
    with pytest.raises(OptionError, match=r"options factory options_factories.NotSparks has 'blockCacheSizeMB'"):
        rocksdb.spark_settings()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("options_factories.NoFactory", r"which is <class 'options_factories.NoFactory'>"),
        ("options_factories.Missing", "which cannot be imported"),
        ("no.such.Class", "which cannot be imported"),
        ("alone", "options factory is 'alone', but must be the import path"),
    ],
)
def test_what_is_no_factory_is_rejected_when_it_is_set(rocksdb: RocksDBStateBackend, name: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        rocksdb.set_options(name)
    assert rocksdb.get_options() is None


def test_storage_paths_are_sparks_local_directories(rocksdb: RocksDBStateBackend) -> None:
    assert rocksdb.get_db_storage_paths() is None
    assert LOCAL not in rocksdb.spark_settings()
    rocksdb.set_db_storage_paths("/mnt/a", "file:///mnt/b/")
    assert rocksdb.get_db_storage_paths() == ["/mnt/a", "/mnt/b"]
    assert rocksdb.spark_settings()[LOCAL] == "/mnt/a,/mnt/b"
    rocksdb.set_db_storage_paths()
    assert LOCAL not in rocksdb.spark_settings()


def test_a_storage_path_with_a_comma_would_be_two(rocksdb: RocksDBStateBackend) -> None:
    with pytest.raises(OptionError, match="Spark separates directories by commas"):
        rocksdb.set_db_storage_paths("/mnt/a,b")


def test_transfer_threads_are_ours_and_sparks(rocksdb: RocksDBStateBackend) -> None:
    assert (rocksdb.transfer_threads, rocksdb.get_number_of_transfering_threads()) == (4, 4)
    assert THREADS not in rocksdb.spark_settings()
    rocksdb.set_number_of_transfering_threads(7)
    assert rocksdb.transfer_threads == 7
    settings = rocksdb.spark_settings()
    assert (settings[THREADS], float(settings[SHARE])) == ("8", 7 / 8)  # one of them cleans up
    embedded = EmbeddedRocksDBStateBackend()
    embedded.set_number_of_transfer_threads(2)
    assert (embedded.get_number_of_transfer_threads(), embedded.transfer_threads) == (2, 2)
    assert HashMapStateBackend().transfer_threads == 4


@pytest.mark.parametrize("number", [1, 2**31 - 1])
def test_any_number_of_transfer_threads_is_one_that_spark_takes(rocksdb: RocksDBStateBackend, number: int) -> None:
    rocksdb.set_number_of_transfering_threads(number)
    settings = rocksdb.spark_settings()
    assert 1 < int(settings[THREADS]) < 2**31
    assert 0 < float(settings[SHARE]) < 1


def test_the_ttl_filter_of_older_flinks_is_kept_and_told_as_without_effect(rocksdb: RocksDBStateBackend) -> None:
    assert rocksdb.is_ttl_compaction_filter_enabled()
    rocksdb.disable_ttl_compaction_filter()
    assert not rocksdb.is_ttl_compaction_filter_enabled()
    (told,) = [line for line in rocksdb.describe() if line.option == "ttl_compaction_filter"]
    assert (told.value, told.effect) == (False, Effect.NONE)
    rocksdb.enable_ttl_compaction_filter()
    assert rocksdb == RocksDBStateBackend("file:///data/c")
    assert "enable_ttl_compaction_filter" not in dir(rocksdb)  # Flink removed it


def test_snapshots_are_asynchronous_whatever_is_asked_as_in_flink() -> None:
    backend = MemoryStateBackend(using_asynchronous_snapshots=False)
    assert backend.is_using_asynchronous_snapshots()
    (told,) = [line for line in backend.describe() if line.option == "using_asynchronous_snapshots"]
    assert (told.value, told.effect) == (False, Effect.NONE)


@pytest.mark.parametrize("name", [PROVIDER, CHANGELOG, CHANGELOG.lower(), LOCAL, THREADS, SHARE])
def test_a_setting_of_the_backends_own_is_rejected_in_any_spelling(name: str) -> None:
    with pytest.raises(OptionError, match="the state backend sets that itself"):
        EmbeddedRocksDBStateBackend(settings={name: "x"})


def test_a_setting_that_is_not_sparks_is_rejected() -> None:
    with pytest.raises(OptionError, match="settings has 'blockCacheSizeMB', but must hold full Spark names"):
        CustomStateBackend("com.example.Provider", {"blockCacheSizeMB": 1})


@pytest.mark.parametrize("settings", [{5: "x"}, {"spark.x": None}, {"spark.x": [1]}, ["spark.x"]])
def test_a_setting_of_the_wrong_type_is_rejected(settings: Any) -> None:
    with pytest.raises(OptionTypeError, match="must map names to strings, numbers or booleans"):
        EmbeddedRocksDBStateBackend(settings=settings)


def test_any_provider_can_be_named() -> None:
    backend = CustomStateBackend("com.example.Provider$Inner", {"spark.example.size": 1.5})
    assert backend.spark_settings() == {PROVIDER: "com.example.Provider$Inner", "spark.example.size": "1.5"}


@pytest.mark.parametrize("name", ["com..Provider", "com.example.", "a b"])
def test_what_is_no_class_name_is_rejected(name: str) -> None:
    with pytest.raises(OptionError, match=r"provider_class is .* must be the full name of a Java class"):
        CustomStateBackend(name)


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_class_name_is_needed(name: Any) -> None:
    with pytest.raises(OptionTypeError, match="provider_class is"):
        CustomStateBackend(name)


@pytest.mark.parametrize("name", list(MADE))
def test_a_backend_is_a_value_that_pickles_and_describes_itself(name: str) -> None:
    backend = MADE[name]()
    again = pickle.loads(pickle.dumps(backend))
    assert again == backend
    assert repr(again) == repr(backend)
    assert again.spark_settings() == backend.spark_settings()
    assert all(line.explanation.endswith(".") for line in backend.describe())
    assert sum(MADE[other]() == backend for other in MADE) == 1


def test_a_rejected_value_leaves_a_backend_as_it_was(rocksdb: RocksDBStateBackend) -> None:
    for refused in (
        lambda: rocksdb.set_number_of_transfering_threads(0),
        lambda: rocksdb.set_db_storage_paths("/a", "relative"),
        lambda: rocksdb.set_options("no.such.Class"),
    ):
        with pytest.raises(OptionError):
            refused()
    assert rocksdb == RocksDBStateBackend("file:///data/c")


def test_a_changed_backend_is_another_value() -> None:
    changed = EmbeddedRocksDBStateBackend()
    changed.set_number_of_transfer_threads(4)
    assert changed != EmbeddedRocksDBStateBackend()
    assert spark_settings_of(PredefinedOptions.DEFAULT) == {}


def test_a_secret_in_the_settings_of_a_backend_is_not_shown() -> None:
    settings = {"spark.hadoop.fs.s3a.secret.key": "S3CR3T", "spark.example.size": 1}
    embedded = EmbeddedRocksDBStateBackend(True, settings=settings)
    backends = (
        embedded,
        RocksDBStateBackend("file:///c", settings=settings),
        CustomStateBackend("com.example.Provider", settings),
    )
    for backend in backends:
        assert backend.spark_settings()["spark.hadoop.fs.s3a.secret.key"] == "S3CR3T"
        (shown,) = (each.value for each in backend.describe() if each.option == "settings")
        assert shown == {"spark.hadoop.fs.s3a.secret.key": "***", "spark.example.size": 1}
        assert "S3CR3T" not in repr(backend) + str(backend.describe())
    with pytest.raises(OptionError, match="does not define where snapshots are stored") as refused:
        RocksDBStateBackend(checkpoint_stream_backend=embedded)
    assert "S3CR3T" not in str(refused.value)
