"""A fork is a stream of its own: it starts where the other stood, and never writes where that one writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.pending_restore import Forked
from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.errors import (
    InputGoneError,
    LeaseHeldError,
    LiveDirectoryError,
    OptionError,
    RequestFailedError,
    RestoreError,
    SharedSinkError,
    StreamNotFoundError,
)
from dagster_ckpt.recovery import source_inputs
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.fork import Fork, fork
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.rewind_preview import preview_rewind, refuse_loss
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer, keeping
from tests.support.executioner import Executioner, Killed
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


def scratch(history: History) -> StreamHandle:
    return replace(history.shelf.stream, stream_id="scratch", name="scratch", asset_key="scratch")


def make(history: History, start_from: str = "latest", **how: object) -> Fork:
    return fork(history.shelf.stream, scratch(history), StartFrom(start_from), origin="a test", **how)  # type: ignore[arg-type]


def start(history: History, folder: Path | str | None = None) -> LiveDirectory:
    """What the next start of the fork would give to Spark, for a query that writes to a folder."""
    stream = scratch(history)
    plan = planned_start(stream, StartFrom())
    assert plan.kind is RecoveryKind.FINISH_RESTORE
    with keeping(stream.catalog, stream.stream_id) as lease:
        output = NamedOutput("parquet", str(folder)) if folder is not None else None
        return prepare(stream, plan, lease, output).live


def log(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (folder / "_spark_metadata").iterdir()}


@pytest.mark.parametrize(("start_from", "batch"), [("latest", LAST), ("batch-3", 3), ("batch-0", 0)])
def test_it_starts_where_the_other_stood_as_a_query_of_its_own(history: History, start_from: str, batch: int) -> None:
    files = [path for folder in (history.shelf.live, history.sink) for path in folder.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}

    made = make(history, start_from)

    live = start(history)
    state = inspect_live_directory(live)
    assert (state.status, state.batch_id, made.batch_id) == (LiveStatus.GOOD, batch, batch)
    assert made.live_directory == live.url == f"{history.shelf.root}/live/scratch/live-1-1"
    assert json.loads(live.folder.read("metadata"))["id"] == made.query_id != history.query_id
    assert made.parent_outputs == (f"file:{history.sink}",)
    assert before == {path: path.read_bytes() for path in before}
    assert (history.batch, history.sink_batch) == (LAST, LAST)


@pytest.mark.parametrize(
    ("start_from", "missing", "refused"),
    [("batch-3", 5, True), ("batch-3", 2, False), ("latest", 5, False), ("batch-3", None, False)],
)
def test_input_that_it_would_lack_is_missed_before_anything_is_changed(
    history: History, start_from: str, missing: int | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def existing(uris: Sequence[str], *_: object, **__: object) -> dict[str, int | None] | None:
        there = dict.fromkeys(each for each in uris if each != f"file:///in/{missing}.json")
        return None if missing is None else dict.fromkeys(there, 1)

    monkeypatch.setattr(source_inputs, "existing_files", existing)

    if refused:
        with pytest.raises(InputGoneError, match=r"1 of 5 files .* no longer exist: file:/in/5\.json"):
            make(history, start_from)
        assert history.shelf.stream.catalog.streams.get("scratch").live_directory is None
        accepted = StartFrom(start_from, accept_loss=True)
        fork(history.shelf.stream, scratch(history), accepted, origin="a test")
    else:
        make(history, start_from)
    assert start(history).positions().commit == (LAST if start_from == "latest" else 3)


def test_it_must_not_write_where_the_original_writes(history: History) -> None:
    make(history, "batch-3")

    for path in (str(history.sink), f"file://{history.sink}/", f"file:{history.sink}"):
        with pytest.raises(SharedSinkError, match=r"output of the stream that the state comes from.*new, empty folder"):
            start(history, path)
    assert history.sink_batch == LAST


@pytest.mark.parametrize("start_from", ["latest", "batch-3"])
def test_nor_in_its_table_unless_that_is_accepted(history: History, tmp_path: Path, start_from: str) -> None:
    """Delta does not know the fork's query id, so it would take each batch again."""
    table = NamedOutput("delta", str(tmp_path / "table"))
    history.sinks(f"DeltaSink[{table.place}]")
    made = make(history, start_from)
    stream = scratch(history)
    facts = recovery_facts(stream, StartFrom(), predecessor_ended=True, output=table)

    def check(output: NamedOutput, *, accept_loss: bool = False) -> None:
        preview = preview_rewind(stream, facts, planned_start(stream, StartFrom()), output)
        refuse_loss(stream, preview, accept_loss=accept_loss)

    with pytest.raises(SharedSinkError, match=rf"of which this one is a fork.*after batch {made.batch_id} would be"):
        check(table)
    check(table, accept_loss=True)
    check(NamedOutput("delta", str(tmp_path / "another")))


@pytest.mark.parametrize(("batch", "names"), [(0, ["0"]), (3, ["3.compact"]), (5, ["5.compact"])])
def test_a_new_folder_begins_with_a_log_that_names_nothing(history: History, batch: int, names: list[str]) -> None:
    make(history, f"batch-{batch}")

    start(history, history.shelf.root / "new")
    start(history, history.shelf.root / "new")

    assert log(history.shelf.root / "new") == dict.fromkeys(names, "v1")


def test_a_fork_of_a_query_with_another_sink_begins_its_log_too(history: History) -> None:
    history.sinks("ForeachBatchSink")
    make(history, "batch-5")

    start(history, history.shelf.root / "new")

    assert log(history.shelf.root / "new") == {"5.compact": "v1"}


ANOTHERS = 'v1\n{"path":"file:///another","action":"add"}'


@pytest.mark.parametrize("last", [2, 5, 6, LAST])
def test_a_folder_with_the_log_of_another_query_is_refused(history: History, last: int) -> None:
    make(history, "batch-5")
    folder = history.shelf.root / "used/_spark_metadata"
    folder.mkdir(parents=True)
    (folder / str(last)).write_text(ANOTHERS)

    with pytest.raises(SharedSinkError, match="its log is not this stream's"):
        start(history, folder.parent)

    assert log(folder.parent) == {str(last): ANOTHERS}


def test_a_start_that_was_cut_off_while_it_gave_the_new_folder_a_log_is_done_again(history: History) -> None:
    make(history, "batch-5")
    new = history.shelf.root / "new"
    start(history, new)
    whole = log(new)
    (new / "_spark_metadata/5.compact").unlink()

    start(history, new)

    assert log(new) == whole


def test_a_folder_where_another_stream_of_the_catalog_writes_is_refused(history: History) -> None:
    make(history, "batch-5")
    theirs = history.shelf.root / "theirs/_spark_metadata"
    theirs.mkdir(parents=True)
    # It has written no row yet.
    (theirs / "5").write_text("v1")
    other = replace(history.shelf.stream, stream_id="other", name="other", asset_key="other")
    other.register()
    holder = this_holder("its", "run", None)
    as_writer(other.catalog, "other").executions.start("its", run_id="run", cause=StartCause.MANUAL, holder=holder)
    as_writer(other.catalog, "other").executions.heartbeat("its", {"sinks": [f"FileSink[file:{theirs.parent}]"]})

    # As after a rename of its asset.
    with pytest.raises(SharedSinkError, match=r"another stream of this catalog writes there.*stream_id=.other."):
        start(history, theirs.parent)


def test_a_forked_output_shows_the_originals_files_up_to_the_fork(history: History) -> None:
    new = history.shelf.root / "for ked"

    made = make(history, "batch-5", outputs={f"file://{history.sink}": str(new)})
    start(history, new)

    assert made.outputs == {f"file://{history.sink}": str(new)}
    own = log(history.sink)
    expected = {name: own[name] for name in ("3.compact", "4", "5")}
    assert {name: json.loads(text.split("\n")[-1]) for name, text in log(new).items()} == {
        name: json.loads(text.split("\n")[-1].replace("out%20put", "for%20ked")) for name, text in expected.items()
    }
    assert sorted(path.name for path in new.glob("part-*")) == [f"part-{batch}" for batch in range(6)]
    assert (new / "part-5").stat().st_ino == (history.sink / "part-5").stat().st_ino


def test_an_output_with_a_named_file_gone_cannot_be_forked(history: History) -> None:
    (history.sink / "part-2").unlink()

    with pytest.raises(RestoreError, match="part-2 is missing"):
        make(history, "batch-5", outputs={str(history.sink): str(history.shelf.root / "new")})

    assert not (history.shelf.root / "new/_spark_metadata").exists()


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({"/elsewhere": "/new"}, "No file sink of the original writes to"),
        ({"{sink}": "{sink}"}, "output of the stream that the state comes from"),
        ({"{sink}": "{used}"}, "log is not this stream's"),
        ({"{sink}": "{younger}"}, "log is not this stream's"),
    ],
)
def test_an_output_that_cannot_be_forked_is_refused_and_nothing_is_made(
    history: History, outputs: dict[str, str], words: str
) -> None:
    root = history.shelf.root
    for name, batch in {"used": "8", "younger": "3"}.items():
        (root / name / "_spark_metadata").mkdir(parents=True)
        (root / name / "_spark_metadata" / batch).write_text(ANOTHERS)
    places = {"sink": history.sink, "used": root / "used", "younger": root / "younger"}
    named = {old.format(**places): new.format(**places) for old, new in outputs.items()}

    with pytest.raises(SharedSinkError, match=words):
        make(history, "batch-5", outputs=named)

    assert log(root / "younger") == {"3": ANOTHERS}
    assert scratch(history).catalog.streams.get("scratch").live_directory is None


def test_what_the_stream_itself_has_committed_is_given_up_only_if_asked(history: History) -> None:
    stream = scratch(history)
    make(history, "batch-3")
    holder = this_holder("its", "run", None)
    as_writer(stream.catalog, "scratch").executions.start("its", run_id="run", cause=StartCause.MANUAL, holder=holder)
    live = stream.catalog.streams.get("scratch").live_directory or ""
    as_writer(stream.catalog, STREAM).executions.running("its", live_directory=live, recovery={})
    as_writer(stream.catalog, STREAM).executions.heartbeat("its", {"batch_id": 4})

    with pytest.raises(RequestFailedError, match=r"up to 4.*replace_state"):
        make(history, "batch-2")
    assert make(history, "batch-2", replace_state=True).live_directory.rpartition("-")[0].endswith("scratch/live-2")


def test_a_stream_that_runs_is_not_forked_into(history: History) -> None:
    stream = scratch(history)
    stream.register()
    stream.catalog.leases.acquire("scratch", this_holder("other", "run", None), 60_000)

    with pytest.raises(LeaseHeldError):
        make(history)


def test_what_cannot_be_forked_is_refused(history: History) -> None:
    with pytest.raises(OptionError, match="not to empty"):
        make(history, "empty")
    with pytest.raises(OptionError, match="into itself"):
        fork(history.shelf.stream, history.shelf.stream, StartFrom(), origin="a test")
    with pytest.raises(LiveDirectoryError, match="batches 0 to 8"):
        make(history, "batch-9")
    with pytest.raises(StreamNotFoundError):
        fork(replace(history.shelf.stream, stream_id="never"), scratch(history), StartFrom(), origin="a test")


def test_killed_at_any_step_there_is_a_whole_fork_or_none_and_it_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 0
    killed = True
    while killed:
        root = tmp_path / str(step)
        root.mkdir()
        history = History(root)
        outputs = {str(history.sink): str(root / "forked")}
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                make(history, "batch-2", outputs=outputs)
                killed = False
            except Killed:
                step += either(quick=3, thorough=1)
        record = scratch(history).register()
        assert (record.live_directory is None) is killed, f"killed at step {step}"
        made = make(history, "batch-2", outputs=outputs)
        assert json.loads(start(history, root / "forked").folder.read("metadata"))["id"] == made.query_id
        assert (history.batch, history.sink_batch, history.query_id) == (LAST, LAST, "11111111-2222")
        history.close()
    assert step > 12


def test_stream_ids_of_the_original_are_untouched(history: History) -> None:
    before = history.shelf.stream.catalog.streams.get(STREAM)
    make(history)
    assert history.shelf.stream.catalog.streams.get(STREAM) == before


def test_a_rebuild_leaves_a_fork_that_was_killed_half_way_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory resumes like the stream's own, but nothing would keep its query out of the original's output."""
    killed, step, named = True, 0, 0
    while killed:
        root = tmp_path / str(step)
        root.mkdir()
        history = History(root)
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                make(history, "batch-2")
                killed = False
            except Killed:
                step += 1
        stream = scratch(history)
        if killed and not stream.live_directories():
            with pytest.raises(StreamNotFoundError, match="Nothing was registered"):
                rebuild(stream, origin="a test")
        elif killed:
            directories = [built.live.url for built in stream.live_directories() if not built.is_unfinished]
            report = rebuild(stream, origin="a test")
            assert report.live_directory is None, f"killed at step {step}"
            assert [each for each in directories if not any(each in line for line in report.skipped)] == []
            named += len(directories)
            if directories:
                with pytest.raises(LiveDirectoryError, match="fork or import that did not finish"):
                    planned_start(stream, StartFrom())
        else:
            start(history)
        history.close()
    assert named


def test_a_fork_that_was_started_is_rebuilt_like_any_stream(history: History) -> None:
    make(history)
    live = start(history)
    assert live.is_not_in_use()
    stream = scratch(history)
    request = RunRequest("run", lambda _live: PlayedQuery(ends=True))  # type: ignore[arg-type, return-value]
    execute_stream(stream, request)
    assert not live.is_not_in_use()
    assert not isinstance(stream.catalog.streams.get("scratch").pending_restore, Forked)
