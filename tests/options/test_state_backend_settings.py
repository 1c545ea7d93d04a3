import pickle
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyspark
import pytest

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.options import CustomStateBackend, HashMapStateBackend, RocksDBStateBackend, StateBackend

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
CHANGELOG = "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"


def test_the_heap_backend_is_sparks_hdfs_backed_provider() -> None:
    (setting,) = HashMapStateBackend().spark_settings().items()
    assert setting == (
        PROVIDER,
        "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    )


@pytest.mark.parametrize(("incremental", "text"), [(True, "true"), (False, "false")])
def test_incremental_checkpointing_is_sparks_changelog(incremental: bool, text: str) -> None:
    settings = RocksDBStateBackend(enable_incremental_checkpointing=incremental).spark_settings()
    assert settings == {
        PROVIDER: "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
        CHANGELOG: text,
    }


def test_incremental_checkpointing_is_on_by_default() -> None:
    assert RocksDBStateBackend().spark_settings()[CHANGELOG] == "true"


@pytest.mark.parametrize("backend", [HashMapStateBackend(), RocksDBStateBackend()])
def test_the_provider_is_a_class_of_the_installed_spark(backend: StateBackend) -> None:
    (jar,) = (Path(pyspark.__file__).parent / "jars").glob("spark-sql_2*.jar")
    entry = backend.spark_settings()[PROVIDER].replace(".", "/") + ".class"
    with ZipFile(jar) as classes:
        assert entry in classes.namelist()


def test_further_settings_are_written_as_spark_reads_them() -> None:
    cache = "spark.sql.streaming.stateStore.rocksdb.blockCacheSizeMB"
    compact = "spark.sql.streaming.stateStore.rocksdb.compactOnCommit"
    settings = RocksDBStateBackend(settings={cache: 64, compact: True}).spark_settings()
    assert (settings[cache], settings[compact]) == ("64", "true")


@pytest.mark.parametrize("name", [PROVIDER, CHANGELOG, CHANGELOG.lower()])
def test_a_setting_of_the_backends_own_is_rejected_in_any_spelling(name: str) -> None:
    with pytest.raises(OptionError, match="the state backend sets that itself"):
        RocksDBStateBackend(settings={name: "x"})


def test_a_setting_that_is_not_sparks_is_rejected() -> None:
    with pytest.raises(OptionError, match="settings has 'blockCacheSizeMB', but must hold full Spark names"):
        CustomStateBackend("com.example.Provider", {"blockCacheSizeMB": 1})


@pytest.mark.parametrize("settings", [{5: "x"}, {"spark.x": None}, {"spark.x": [1]}])
def test_a_setting_of_the_wrong_type_is_rejected(settings: Any) -> None:
    with pytest.raises(OptionTypeError, match="must map names to strings, numbers or booleans"):
        RocksDBStateBackend(settings=settings)


def test_the_incremental_switch_is_a_boolean() -> None:
    with pytest.raises(OptionTypeError, match="enable_incremental_checkpointing is 1"):
        RocksDBStateBackend(enable_incremental_checkpointing=1)  # type: ignore[arg-type]


def test_any_provider_can_be_named() -> None:
    backend = CustomStateBackend("com.example.Provider$Inner", {"spark.example.size": 1.5})
    assert backend.spark_settings() == {PROVIDER: "com.example.Provider$Inner", "spark.example.size": "1.5"}


@pytest.mark.parametrize("name", ["", "com..Provider", "com.example.", "a b"])
def test_what_is_no_class_name_is_rejected(name: str) -> None:
    with pytest.raises(OptionError, match=r"provider_class is .* must be the full name of a Java class"):
        CustomStateBackend(name)


def test_a_class_name_is_a_string() -> None:
    with pytest.raises(OptionTypeError, match="provider_class is None"):
        CustomStateBackend(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "backend",
    [
        HashMapStateBackend(),
        RocksDBStateBackend(settings={"spark.x": 1}),
        CustomStateBackend("a.B", {"spark.x": 1}),
    ],
)
def test_a_backend_survives_pickling(backend: StateBackend) -> None:
    assert pickle.loads(pickle.dumps(backend)) == backend
