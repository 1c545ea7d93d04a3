"""What new code is tried on, and what is said of it. Spark's part is played here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.client import preflight as preflights
from dagster_ckpt.client.preflight import preflight
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.recovery.live_directories import SCRATCH_FOLDER
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory, Positions
from dagster_ckpt.spark.query.trial_batch import Trial, describe_trial_error
from tests.support import verbs
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History

KEYS = (
    "org.apache.spark.sql.execution.streaming.state.StateStoreKeySchemaNotCompatible: "
    "[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match existing state key schema.\nat Foo.bar"
)


@dataclass
class PlayedSpark:
    """Runs a batch on a copy as the test says, and notes what it was given."""

    says: list[Callable[[LiveDirectory], Trial]]
    copies: list[tuple[Positions, bool, str]] = field(default_factory=list)

    def __call__(self, _describe: Any, scratch: LiveDirectory, _name: str, *, replays: bool, **_: Any) -> Trial:
        query_id = scratch.folder.read("metadata").decode()
        self.copies.append((scratch.positions(), replays, query_id))
        return self.says.pop(0)(scratch)


def runs(scratch: LiveDirectory) -> Trial:
    return Trial((scratch.positions().commit or 0) + 1)


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    history.shelf.stream = replace(history.shelf.stream, code_version="2")
    yield history
    assert not any((tmp_path / "live" / SCRATCH_FOLDER).rglob("metadata")), "a copy was left behind"
    history.close()


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> PlayedSpark:
    played = PlayedSpark([runs])
    monkeypatch.setattr(preflights, "run_trial", played)
    return played


def tried(history: History, **how: Any) -> PreflightRecord:
    result = preflight(history.shelf.stream, lambda: None, **how)  # type: ignore[arg-type, return-value]
    assert history.shelf.stream.catalog.desired_states.all()[STREAM].preflight == result
    return result


def test_exactly_the_newest_batch_is_replayed_on_a_copy_of_another_query(history: History, spark: PlayedSpark) -> None:
    files = {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()}

    result = tried(history)

    [(positions, replays, query_id)] = spark.copies
    assert (positions, replays) == (Positions(LAST - 1, LAST), True)
    assert history.query_id not in query_id
    assert (result.passed, result.code_version, result.batch_id) == (True, "2", LAST)
    assert result.reason == f"batch {LAST} was replayed on a copy of the state"
    assert {path: path.read_bytes() for path in history.shelf.live.rglob("*") if path.is_file()} == files


def test_a_state_that_does_not_fit_is_told_in_plain_words(history: History, spark: PlayedSpark) -> None:
    spark.says = [lambda _: Trial(None, KEYS)]
    result = tried(history)
    assert not result.passed
    assert result.reason.startswith(
        "the keys of the state differ from those that the new code groups or joins by (Spark: "
    )


def test_where_the_data_of_that_batch_is_gone_new_data_is_tried(history: History, spark: PlayedSpark) -> None:
    spark.says = [lambda _: Trial(None, "[FAILED_READ_FILE.FILE_NOT_EXIST] /in/8.json"), runs]
    result = tried(history)
    assert [(positions, replays) for positions, replays, _ in spark.copies] == [
        (Positions(LAST - 1, LAST), True),
        (Positions(LAST, LAST), False),
    ]
    assert (result.passed, result.batch_id) == (True, LAST + 1)


def test_where_spark_retains_no_batch_before_new_data_is_tried(history: History, spark: PlayedSpark) -> None:
    for batch in range(LAST):
        (history.shelf.live / f"commits/{batch}").unlink()
    tried(history)
    assert [(positions, replays) for positions, replays, _ in spark.copies] == [(Positions(LAST, LAST), False)]


def test_without_any_data_it_passes_and_says_that_no_state_was_loaded(history: History, spark: PlayedSpark) -> None:
    for batch in range(LAST):
        (history.shelf.live / f"commits/{batch}").unlink()
    spark.says = [lambda _: Trial(None)]
    result = tried(history)
    assert (result.passed, result.batch_id) == (True, None)
    assert "no input, so the state was not loaded" in result.reason


def test_where_the_live_directory_is_lost_the_newest_snapshot_is_tried(history: History, spark: PlayedSpark) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin="a test")
    shutil.rmtree(history.shelf.live)
    assert tried(history).passed
    assert [(positions, replays) for positions, replays, _ in spark.copies] == [(Positions(LAST, LAST), False)]


def test_where_nothing_is_left_to_go_on_from_it_is_refused(history: History, spark: PlayedSpark) -> None:
    live = history.live.url
    as_writer(history.shelf.stream.catalog, STREAM).executions.running("first", live_directory=live, recovery={})
    shutil.rmtree(history.shelf.live)
    result = tried(history)
    assert not result.passed
    assert "cannot be recovered automatically" in result.reason
    assert spark.copies == []


def test_an_interrupted_preflight_has_no_result(history: History, spark: PlayedSpark) -> None:
    with pytest.raises(RequestFailedError, match="was interrupted, so it has no result"):
        tried(history, interrupted=lambda: True)
    assert history.shelf.stream.catalog.desired_states.find(STREAM) is None


def test_what_is_not_known_is_told_as_spark_says_it() -> None:
    assert describe_trial_error("java.lang.Boom: no\nat Foo") == "the new code failed: java.lang.Boom: no"
