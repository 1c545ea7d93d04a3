import pytest

from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend, RocksDBStateBackend
from dagster_ckpt.config.state_backend import (
    BackendChange,
    CustomStateBackend,
    FsStateBackend,
    HashMapStateBackend,
    MemoryStateBackend,
    PinnedState,
    StateBackend,
    backend_change,
)

HEAP = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
FORMAT = "spark.sql.streaming.stateStore.rocksdb.formatVersion"


@pytest.mark.parametrize(
    ("pinned", "wanted"),
    [
        (HEAP, HashMapStateBackend()),
        (HEAP, MemoryStateBackend()),
        (HEAP, FsStateBackend("file:///c")),
        (ROCKSDB, RocksDBStateBackend("file:///c", True)),
        (ROCKSDB, EmbeddedRocksDBStateBackend(False)),
        (ROCKSDB, CustomStateBackend(ROCKSDB)),
        ("com.example.Provider", CustomStateBackend("com.example.Provider")),
    ],
)
def test_a_backend_of_the_same_provider_goes_on(pinned: str, wanted: StateBackend) -> None:
    assert backend_change(PinnedState(pinned), wanted) == BackendChange()


@pytest.mark.parametrize(
    ("pinned", "wanted"),
    [
        (HEAP, EmbeddedRocksDBStateBackend(True)),
        (ROCKSDB, HashMapStateBackend()),
        (ROCKSDB, CustomStateBackend("com.example.Provider")),
    ],
)
def test_another_provider_is_refused_with_both_names_and_what_to_do(pinned: str, wanted: StateBackend) -> None:
    refused = backend_change(PinnedState(pinned), wanted).refused
    assert refused is not None
    assert pinned in refused
    assert f"the state backend is {type(wanted).__name__} with {wanted.spark_settings()[PROVIDER]}," in refused
    assert "start_from: empty" in refused


def test_a_query_without_state_takes_any_backend() -> None:
    assert backend_change(PinnedState(None, {FORMAT: "5"}), HashMapStateBackend()) == BackendChange()


def test_a_setting_that_spark_pins_is_kept_and_said() -> None:
    wanted = EmbeddedRocksDBStateBackend(True, settings={FORMAT: 6})
    change = backend_change(PinnedState(ROCKSDB, {FORMAT: "5", "spark.sql.shuffle.partitions": "8"}), wanted)
    assert change.refused is None
    assert change.kept == (f"{FORMAT} stays 5, not 6: Spark pins it at the query's first batch",)
    assert backend_change(PinnedState(ROCKSDB, {FORMAT: "6"}), wanted).kept == ()
