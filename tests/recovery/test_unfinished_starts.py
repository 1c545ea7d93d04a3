"""A start that finishes an earlier one asks what that one would have asked; a first batch in flight is a batch, too."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dagster_ckpt.catalog.pending_restore import Emptied, PendingRestore, ToBatch, stored_pending
from dagster_ckpt.client.preflight import planned_start, start_facts
from dagster_ckpt.errors import InputGoneError, SourceChangedError, StorageAccessError
from dagster_ckpt.recovery import prepare
from dagster_ckpt.recovery.plan import FinishRestore, Resume, StartEmpty
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.source_change import refuse_changed_sources
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.sources import SourceIdentity
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import rewind_history
from tests.support.as_writer import set_stream
from tests.support.played_query import PlayedQuery, Stage
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History

MOVED = (SourceIdentity("file", None, {"path": "file:/somewhere-else", "format": "json"}),)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> History:
    """Of a query that reads a file in each batch."""
    folder = tmp_path / "in"
    folder.mkdir()
    of_batch = rewind_history._of_batch
    monkeypatch.setattr(
        rewind_history,
        "_of_batch",
        lambda batch: {
            name: text.replace("file:///in/", f"file://{folder}/") for name, text in of_batch(batch).items()
        },
    )
    for batch in range(LAST + 2):
        (folder / f"{batch}.json").write_text("row")
        os.utime(folder / f"{batch}.json", (0.001, 0.001))
    return History(tmp_path)


def run(history: History, start_from: StartFrom | None = None) -> None:
    Stage(history.shelf.stream, [PlayedQuery(ends=True)]).run(start_from=start_from or StartFrom())


def interrupt(history: History, start_from: StartFrom, monkeypatch: pytest.MonkeyPatch) -> None:
    def does_not_answer(*_arguments: object, **_options: object) -> None:
        raise StorageAccessError("the sink does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "roll_back", does_not_answer)
        with pytest.raises(StorageAccessError, match="does not answer"):
            run(history, start_from)


REWIND = StartFrom("batch-4", no_safety_savepoint=True)


def test_what_is_gone_since_the_rewind_is_said_by_the_start_that_finishes_it(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(history, REWIND, monkeypatch)
    for batch in (6, 7):
        (tmp_path / "in" / f"{batch}.json").unlink()

    with pytest.raises(InputGoneError, match="2 of 4 files that are read again no longer exist"):
        run(history)
    assert history.sink_batch == LAST

    run(history, StartFrom(accept_loss=True))
    assert history.sink_batch == 4


def test_other_sources_are_refused_by_the_start_that_finishes_a_rewind(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(history, REWIND, monkeypatch)
    plan = planned_start(history.shelf.stream, StartFrom())

    assert isinstance(plan, FinishRestore)
    with pytest.raises(SourceChangedError, match="is file file:/somewhere-else"):
        refuse_changed_sources(history.shelf.stream, plan, MOVED)


@pytest.mark.parametrize(
    "pending", [ToBatch(batch_id=1, sinks=("FileSink[/out]",)), Emptied(sinks=("FileSink[/out]",))]
)
def test_an_older_catalog_does_not_finish_what_a_query_has_run_on_from(
    history: History, pending: PendingRestore
) -> None:
    """Of a backup that was made while a restore was unfinished."""
    set_stream(history.shelf.stream.catalog, STREAM, pending_restore=json.dumps(stored_pending(pending)))

    plan = planned_start(history.shelf.stream, StartFrom())
    run(history)

    assert isinstance(plan, Resume)
    assert (history.batch, history.sink_batch) == (LAST, LAST)
    assert history.shelf.stream.catalog.streams.get(STREAM).pending_restore is None


@pytest.mark.parametrize("is_committed", [True, False])
def test_the_file_of_a_batch_in_flight_must_be_there_for_the_first_as_for_any(
    tmp_path: Path, is_committed: bool
) -> None:
    shelf = Shelf.at(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.json").write_text("{}")
    entry = {"path": f"file://{tmp_path}/in/0.json", "timestamp": (tmp_path / "in/0.json").stat().st_mtime_ns // 10**6}
    (shelf.live / "sources/0/0").write_text(f"v1\n{json.dumps({**entry, 'batchId': 0})}")
    number = 1 if is_committed else 0
    if is_committed:
        shelf.commit_batch(1)
        (shelf.live / "commits/1").unlink()
    else:
        shutil.rmtree(shelf.live / "commits")
    entry["path"] = f"file://{tmp_path}/in/gone.json"
    (shelf.live / f"sources/0/{number}").write_text(f"v1\n{json.dumps({**entry, 'batchId': number})}")
    offsets = (shelf.live / "offsets/0").read_text().splitlines()
    (shelf.live / f"offsets/{number}").write_text("\n".join([*offsets[:2], json.dumps({"logOffset": number})]))
    plan = plan_recovery(start_facts(shelf.stream, StartFrom()))

    with pytest.raises(InputGoneError, match="1 of 1 files that are read again no longer exist"):
        Stage(shelf.stream, [PlayedQuery(ends=True)]).run()
    with pytest.raises(SourceChangedError, match="is file file:/somewhere-else"):
        refuse_changed_sources(shelf.stream, plan, MOVED)


def test_the_directory_of_an_empty_start_is_there_before_its_query(history: History) -> None:
    """So that a successor can fence a start that is late."""
    seen: list[bool] = []

    plan = planned_start(history.shelf.stream, StartFrom("empty", discard_state=True))
    assert isinstance(plan, StartEmpty)
    finish_it = prepare._Preparation.finish
    with pytest.MonkeyPatch.context() as patched:

        def finish(preparation: prepare._Preparation, record: object) -> object:
            live = LiveDirectory(getattr(record, "live_directory", None) or "")
            seen.append(live.exists())
            return finish_it(preparation, record)  # type: ignore[arg-type]

        patched.setattr(prepare._Preparation, "finish", finish)
        run(history, StartFrom("empty", discard_state=True))
    assert seen == [True]
