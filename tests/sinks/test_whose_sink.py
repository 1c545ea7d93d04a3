"""A start touches only what the starting query itself writes: not another deployment, not what it left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.errors import CatalogError, SharedSinkError, SnapshotNotFoundError
from dagster_ckpt.recovery import source_inputs
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.plan import Resume
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.recovery.rewind_preview import preview_rewind
from dagster_ckpt.recovery.sink_survey import survey_sinks
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.sink import SinkEffect, SinkForecast
from dagster_ckpt.sinks.table import TablePlan
from dagster_ckpt.spark.checkpoint_dir.inspect import live_query_id
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import TEST, as_writer, keeping
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History

ORIGIN = "a test"


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    # The files that its batches read are made up.
    monkeypatch.setattr(source_inputs, "existing_files", lambda uris, *_, **__: dict.fromkeys(uris))
    (tmp_path / "production").mkdir()
    history = History(tmp_path / "production")
    yield history
    history.close()


def log_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "_spark_metadata").iterdir())}


def start(history: History, text: str, folder: Path) -> PreparedStart:
    """Prepare a start of a query that names a folder."""
    start_from = StartFrom(text, discard_state=text == "empty")
    plan = verbs.planned_start(history.shelf.stream, start_from)
    with keeping(history.shelf.stream.catalog, STREAM) as lease:
        return prepare(history.shelf.stream, plan, lease, NamedOutput("parquet", str(folder)))


@pytest.mark.parametrize("goes_on", [True, False], ids=["original goes on", "original is stopped"])
def test_a_savepoint_copied_to_another_deployment_leaves_the_originals_sink_alone(
    history: History, tmp_path: Path, goes_on: bool
) -> None:
    savepoint = verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="for staging")
    for batch in range(LAST + 1, LAST + (6 if goes_on else 1)):
        history.commit(batch)
    before = log_of(history.sink)
    copied = tmp_path / "copied"
    shutil.copytree(str(savepoint.location).removeprefix("file://"), copied)
    (tmp_path / "staging").mkdir()
    staging = Shelf.at(tmp_path / "staging")
    as_writer(staging.stream.catalog, STREAM).executions.heartbeat(
        "first", {"sinks": [f"FileSink[file:{tmp_path}/own]"]}
    )

    for verb in (verbs.planned_start, verbs.start_preview):
        with pytest.raises(SnapshotNotFoundError, match=r"Nothing was changed.*other deployment"):
            verb(staging.stream, StartFrom(str(copied)))
    with pytest.raises(SnapshotNotFoundError, match="take_over_deployment"):
        verbs.request_start(staging.stream, StartFrom(str(copied), accept_loss=True), origin=ORIGIN)

    assert log_of(history.sink) == before
    staging.stream.catalog.close()


def test_a_catalog_that_takes_the_place_of_a_lost_one_starts_from_its_snapshots(
    history: History, tmp_path: Path
) -> None:
    savepoint = verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="kept")
    (tmp_path / "after").mkdir()
    found = Shelf.at(tmp_path / "after")
    found.stream.catalog.take_over_deployment(history.shelf.stream.catalog.deployment_id)

    plan = verbs.planned_start(found.stream, StartFrom(str(savepoint.location)))

    assert plan.snapshot is not None
    assert plan.snapshot.snapshot_id == savepoint.snapshot_id
    found.stream.catalog.close()


def test_a_catalog_that_lists_snapshots_is_no_other_deployments(history: History) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="own")

    with pytest.raises(CatalogError, match="lists its snapshots"):
        history.shelf.stream.catalog.take_over_deployment("another")


def test_a_deployment_has_one_id_for_all_who_open_its_catalog(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    first, second, other = Catalog(url), Catalog(url), Catalog(f"sqlite:///{tmp_path / 'other.db'}")

    assert first.deployment_id == second.deployment_id != other.deployment_id


def test_a_snapshot_whose_folder_the_query_does_not_name_leaves_it_and_begins_a_log_in_the_new_one(
    history: History, tmp_path: Path
) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="before the move")
    for batch in range(LAST + 1, LAST + 4):
        history.commit(batch)
    before, new = log_of(history.sink), tmp_path / "new"

    prepared = start(history, "before the move", new)

    assert prepared.rolled_back == ()
    assert log_of(history.sink) == before
    assert log_of(new) == {"8.compact": b"v1"}


def test_a_sink_that_was_moved_is_not_gone_back_in_to_before_it_was_there(history: History, tmp_path: Path) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="before the move")
    old, history.sink = history.sink, tmp_path / "moved to"
    for batch in range(LAST + 1, LAST + 6):
        history.commit(batch)
    history.sinks(f"FileSink[file:{history.sink}]")
    logs = log_of(old), log_of(history.sink)

    told = verbs.start_preview(history.shelf.stream, StartFrom("before the move")).sinks
    with pytest.raises(SharedSinkError, match="does not contain"):
        start(history, "before the move", history.sink)

    assert SinkEffect.EXACT in {each.effect for each in told}
    assert (log_of(old), log_of(history.sink)) == logs


@pytest.mark.parametrize("text", ["batch-3", "before", "empty"])
def test_the_log_of_another_query_is_neither_rolled_back_nor_emptied(
    history: History, tmp_path: Path, text: str
) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="before")
    (tmp_path / "theirs").mkdir()
    theirs = History(tmp_path / "theirs")
    logs = log_of(history.sink), log_of(theirs.sink)

    with pytest.raises(SharedSinkError, match="nothing was changed"):
        start(history, text, theirs.sink)

    assert (log_of(history.sink), log_of(theirs.sink)) == logs
    theirs.close()


def test_a_log_that_another_query_began_in_the_same_folder_is_not_rolled_back(history: History) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="before")
    shutil.rmtree(history.sink / "_spark_metadata")
    (history.sink / "_spark_metadata").mkdir()
    (history.sink / "_spark_metadata/0").write_text(
        f'v1\n{{"path":"file://{quote(str(history.sink))}/another","action":"add"}}'
    )
    before = log_of(history.sink)

    with pytest.raises(SharedSinkError, match="not this stream's"):
        start(history, "before", history.sink)

    assert log_of(history.sink) == before


@pytest.mark.parametrize("ahead", [2, 3])
def test_a_log_that_is_ahead_of_the_query_is_not_gone_on_in(history: History, ahead: int) -> None:
    for batch in range(LAST + 1, LAST + 1 + ahead):
        history.commit(batch)
        for log in ("offsets", "commits"):
            (history.shelf.live / log / str(batch)).unlink()

    with pytest.raises(SharedSinkError, match="is not at the position"):
        start(history, "latest", history.sink)


@pytest.mark.parametrize("spelled", [("{}", "file:{}"), ("file:{}", "{}")], ids=["as it was named", "as Spark says"])
def test_a_folder_is_one_sink_however_snapshot_and_catalog_spell_it(history: History, spelled: tuple[str, str]) -> None:
    """A start notes the folder as the query names it, Spark reports it otherwise: no recovery from it began."""
    then, now = (f"FileSink[{each.format(history.sink)}]" for each in spelled)
    history.sinks(then)
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="then")
    history.sinks(now)
    history.commit(LAST + 1)

    preview = verbs.start_preview(history.shelf.stream, StartFrom("then"))

    assert [(sink.sink, sink.effect) for sink in preview.sinks] == [(then, SinkEffect.EXACT)]
    history.start("then")
    assert history.sink_batch == LAST


def test_the_first_batch_of_another_query_is_not_undone_as_a_batch_in_flight(history: History, tmp_path: Path) -> None:
    """A query that was begun and has planned nothing yet, in the folder of one that has written its first batch."""
    stream = history.shelf.stream
    # Killed before the catalog was told where it writes.
    history.sinks()
    shutil.rmtree(history.shelf.live)
    history.shelf.live.mkdir()
    theirs = tmp_path / "theirs"
    (theirs / "_spark_metadata").mkdir(parents=True)
    (theirs / "_spark_metadata/0").write_text(f'v1\n{{"path":"file://{theirs}/part-0","action":"add"}}')
    plan = Resume(reason="it starts from the beginning", point="live")

    with keeping(stream.catalog, STREAM) as lease, pytest.raises(SharedSinkError, match="not this stream's"):
        prepare(stream, plan, lease, NamedOutput("parquet", str(theirs)))

    assert list(log_of(theirs)) == ["0"]


def test_a_table_that_the_query_no_longer_names_is_not_rolled_back_for_its_batch_in_flight(
    history: History, tmp_path: Path
) -> None:
    """The new output gets the rows of that batch; the table keeps those that it has."""
    table = f"DeltaSink[file:{tmp_path}/table]"
    history.sinks(table)
    stream = history.shelf.stream
    plan = verbs.planned_start(stream, StartFrom())

    def settled(output: NamedOutput | None) -> tuple[str, ...]:
        return survey_sinks(stream, plan, output).to_settle

    assert table not in settled(NamedOutput("parquet", str(tmp_path / "new")))
    assert table not in settled(NamedOutput("delta", str(tmp_path / "another table")))
    # It is the one named, or where the query writes is not known.
    assert any("/table]" in each for each in settled(NamedOutput("delta", str(tmp_path / "table"))))
    assert table in settled(None)
    assert table in settled(NamedOutput("delta", None))


class Orders:
    """The stream's Delta table, written by hand; `versions` has those that a start restored."""

    def __init__(self, history: History, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.history, self.folder, self.query_id = history, root / "orders", history.query_id
        self.versions: list[int] = []
        self.write(self.query_id)
        self.note("first", "delta")

        def commit(_: DeltaTable, plan: TablePlan) -> None:
            self.versions.append(plan.basis.version)

        # Both need a session.
        monkeypatch.setattr(DeltaTable, "commit", commit)
        monkeypatch.setattr(DeltaTable, "fence", lambda *_: None)

    def write(self, query_id: str) -> None:
        (self.folder / "_delta_log").mkdir(parents=True, exist_ok=True)
        for batch in range(LAST + 1):
            actions = [{"txn": {"appId": query_id, "version": batch}}, {"add": {"path": str(batch)}}]
            actions += [] if batch else [{"metaData": {"id": "its id"}}]
            (self.folder / f"_delta_log/{batch:020}.json").write_text("\n".join(map(json.dumps, actions)))

    def note(self, execution: str, kind: str, *, stream_id: str = STREAM, folder: Path | None = None) -> None:
        place = folder or self.folder
        name = f"DeltaSink[file:{place}]" if kind == "delta" else f"ForeachBatchSink[delta:{place}]"
        noted = {"batch_id": LAST, "query_id": self.query_id, "sinks": [name]}
        noted |= {} if folder is not None else {"sink_ids": {name: {"id": "its id"}}}
        as_writer(self.history.shelf.stream.catalog, stream_id).executions.heartbeat(execution, noted)

    def forecast(self, text: str, output: NamedOutput) -> list[SinkForecast]:
        stream, start_from = self.history.shelf.stream, StartFrom(text, discard_state=text == "empty")
        facts = recovery_facts(stream, start_from, predecessor_ended=True, output=output)
        told = preview_rewind(stream, facts, verbs.planned_start(stream, start_from), output).sinks
        return [each for each in told if each.effect is not SinkEffect.UNTOUCHED]

    def start(self, text: str, output: NamedOutput) -> str | None:
        """Return the query's id after a start."""
        stream = self.history.shelf.stream
        plan = verbs.planned_start(stream, StartFrom(text, discard_state=text == "empty"))
        with keeping(stream.catalog, STREAM) as lease:
            return live_query_id(prepare(stream, plan, lease, output).live)


@pytest.fixture
def orders(history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Orders:
    return Orders(history, tmp_path, monkeypatch)


@pytest.mark.parametrize(("text", "version"), [("batch-3", 3), ("empty", -1)])
@pytest.mark.parametrize("case", ["moved", "foreachBatch now", "foreachBatch no more", "written before another one"])
def test_the_streams_own_table_goes_back_under_whatever_name(
    orders: Orders, tmp_path: Path, text: str, version: int, case: str
) -> None:
    output = NamedOutput("delta", str(orders.folder))
    if case == "moved":
        shutil.move(orders.folder, tmp_path / "renamed")
        output = NamedOutput("delta", str(tmp_path / "renamed"))
    elif case == "foreachBatch now":
        output = NamedOutput("foreachbatch", f"delta:{orders.folder}")
    elif case == "foreachBatch no more":
        orders.note("first", "foreachbatch")
    else:
        orders.history.shelf.execution("second")
        orders.note("second", "delta", folder=tmp_path / "elsewhere")

    assert [each.effect for each in orders.forecast(text, output)] == [SinkEffect.EXACT]
    query_id = orders.start(text, output)

    assert orders.versions == [version]
    assert query_id != orders.query_id


@pytest.mark.parametrize("shares_its_id", [False, True])
def test_the_table_of_another_stream_does_not_go_back(orders: Orders, tmp_path: Path, *, shares_its_id: bool) -> None:
    stream = orders.history.shelf.stream
    orders.note("first", "delta", folder=tmp_path / "own")
    if shares_its_id:
        # It continues the state of this one.
        replace(stream, stream_id="another", name="another", asset_key="another").register()
        executions = as_writer(stream.catalog, "another").executions
        executions.start("theirs", run_id="theirs", cause=StartCause.MANUAL, holder=TEST)
        orders.note("theirs", "delta", stream_id="another")
    else:
        orders.write("another's query")

    assert orders.forecast("batch-3", NamedOutput("delta", str(orders.folder))) == []
    orders.start("batch-3", NamedOutput("delta", str(orders.folder)))
    assert orders.versions == []


def test_a_folder_from_which_the_stream_was_taken_to_another_one_is_emptied_with_it(
    history: History, tmp_path: Path
) -> None:
    """It wrote to a second folder, and was restored to a savepoint of the first without a query."""
    history.sinks(history.file_sink)
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="in the first")
    first, history.sink = history.sink, tmp_path / "second"
    for batch in range(LAST + 1):
        history.commit(batch)
    history.shelf.execution("second")
    as_writer(history.shelf.stream.catalog, STREAM).executions.heartbeat(
        "second", {"batch_id": LAST, "query_id": history.query_id, "sinks": [history.file_sink]}
    )
    history.start("in the first")
    before = log_of(first)

    assert start(history, "empty", history.sink).rolled_back == (str(history.sink),)
    assert (log_of(history.sink), log_of(first)) == ({}, before)
