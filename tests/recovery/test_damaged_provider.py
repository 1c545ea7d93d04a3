"""A damaged name of the state store provider is damage of the live directory, no change of the state backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend
from dagster_ckpt.errors import LiveDirectoryError, StateBackendChangeError
from dagster_ckpt.recovery.examination import Examiner, is_suspicious
from dagster_ckpt.recovery.plan import RecoveryPlan
from dagster_ckpt.recovery.query_plan_check import check_state
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.rewind_history import LAST, History

PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    for batch in range(LAST + 1):
        pin(history, batch, ROCKSDB)
    yield history
    history.close()


def planned(history: History) -> RecoveryPlan:
    plan = planned_start(history.shelf.stream, StartFrom())
    # A store that is looked at by its name only.
    (history.shelf.live / "state/0").mkdir(parents=True)
    return plan


def pin(history: History, batch: int, provider: str) -> None:
    path = history.shelf.live / f"offsets/{batch}"
    plain = path.read_text().replace(ROCKSDB, "-").replace('"conf": {', f'"conf": {{"{PROVIDER}": "{provider}", ', 1)
    path.write_text(plain)


def test_a_flipped_bit_in_the_name_is_damage_so_a_recovery_goes_back(history: History) -> None:
    """The start was refused for good, as if the code had another backend, beside whole snapshots."""
    entry = history.shelf.live / f"offsets/{LAST}"
    entry.write_text(entry.read_text().replace("RocksDBState", "RocksDBSta\ufffd"))
    stream = replace(history.shelf.stream, backend=EmbeddedRocksDBStateBackend(True))

    with pytest.raises(LiveDirectoryError, match="one of these entries is damaged") as refused:
        check_state(stream, planned(history), StartFrom())

    assert is_suspicious(refused.value)
    damage = Examiner(stream).damage_of_live(history.live)
    assert damage is not None
    assert "one of these entries is damaged" in damage.detail


def test_another_backend_is_refused_as_before(history: History) -> None:
    stream = replace(history.shelf.stream, backend=HashMapStateBackend())
    with pytest.raises(StateBackendChangeError):
        check_state(stream, planned(history), StartFrom())
