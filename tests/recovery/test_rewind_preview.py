"""What a rewind would do is told beforehand, and one that could lose rows needs an explicit yes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind
from dagster_ckpt.errors import RowsAtRiskError, SinkRollbackError
from dagster_ckpt.recovery import source_inputs
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.sinks.sink import SinkEffect
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.query.sources import SourceDistance
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.verbs import restart

ORIGIN = "a test"


# Spark's name for a table of a catalog whose format is not known.
TABLE = "lake.db.shops"


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    history = History(tmp_path)
    yield history
    history.close()


def write_to_table(history: History) -> str:
    """Let the query have written to a table as well that is known by its name only; returns that name."""
    history.sinks(f"FileSink[file:{history.sink}]", TABLE)
    return TABLE


@pytest.mark.parametrize(
    ("missing", "effect"),
    [([], SinkEffect.EXACT), (None, SinkEffect.UNKNOWN), (["file:///in/5.json"], SinkEffect.LOSE)],
)
def test_the_preview_of_a_rewind_to_a_batch_tells_batches_input_snapshots_and_sinks(
    history: History, missing: list[str] | None, effect: SinkEffect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def existing(uris: Sequence[str], *_: object, **__: object) -> dict[str, int | None] | None:
        return None if missing is None else dict.fromkeys(each for each in uris if each not in missing)

    monkeypatch.setattr(source_inputs, "existing_files", existing)
    snapshots = [history.shelf.checkpoint() for _ in range(5)]

    preview = verbs.start_preview(history.shelf.stream, StartFrom("batch-3"))

    assert (preview.plan.from_batch, preview.plan.to_batch, preview.batches) == (LAST, 3, 5)
    assert preview.sources == (SourceDistance("0", "files", 5),)
    assert (preview.rows.rows, str(preview.rows)) == (None, "unknown")
    assert preview.span_ms == 5_000
    assert [snapshot.snapshot_id for snapshot in preview.left] == [snapshots[4].snapshot_id, snapshots[3].snapshot_id]
    assert [sink.effect for sink in preview.sinks] == [effect, SinkEffect.UNKNOWN]
    assert ("file:/in/5.json" in " ".join(preview.messages())) is bool(missing)
    assert "batches 4 to 8, with 2 snapshots reported since" in preview.downstream
    assert (history.batch, history.sink_batch) == (LAST, LAST)


def test_rows_come_from_the_snapshots_figures_where_offsets_do_not_count_them(history: History) -> None:
    for _ in range(LAST):
        history.shelf.checkpoint(rows=100)

    at_a_snapshot = verbs.start_preview(history.shelf.stream, StartFrom("batch-3"))
    between_snapshots = verbs.start_preview(history.shelf.stream, StartFrom("batch-0"))

    assert (str(at_a_snapshot.rows), str(between_snapshots.rows)) == ("500", "at least 700")


def test_a_start_that_goes_on_has_nothing_to_tell(history: History) -> None:
    preview = verbs.start_preview(history.shelf.stream, StartFrom("latest"))

    assert (preview.batches, preview.rows.rows, preview.sinks, preview.left) == (0, 0, (), ())
    assert "No committed batch is undone" in preview.downstream


def test_an_empty_start_repeats_everything(history: History, tmp_path: Path) -> None:
    sink = write_to_table(history)

    preview = verbs.start_preview(history.shelf.stream, StartFrom("empty", discard_state=True))

    assert {told.sink: told.effect for told in preview.sinks}[sink] is SinkEffect.DUPLICATE


def test_a_start_that_could_lose_rows_is_refused_before_anything_is_changed(history: History, tmp_path: Path) -> None:
    sink = write_to_table(history)
    stream = history.shelf.stream
    before = stream.catalog.streams.get(STREAM)

    with pytest.raises(RowsAtRiskError, match=r"rows could be lost.*lake.db.shops.*accept_loss") as refusal:
        verbs.request_start(stream, StartFrom("batch-3"), origin=ORIGIN)
    with pytest.raises(RowsAtRiskError, match="accept_loss"):
        restart(stream, StartFrom("batch-3"), origin=ORIGIN, timeout_s=0)

    assert sink in str(refusal.value)
    assert stream.catalog.requests.pending(STREAM) == []
    assert stream.catalog.streams.get(STREAM) == before


@pytest.mark.parametrize("how", [{"accept_loss": True}, {"new_query_id": True}])
def test_with_an_explicit_yes_or_as_another_query_it_is_asked_for(
    history: History, tmp_path: Path, how: dict[str, bool]
) -> None:
    write_to_table(history)

    verbs.request_start(history.shelf.stream, StartFrom("batch-3", **how), origin=ORIGIN)

    (request,) = history.shelf.stream.catalog.requests.pending(STREAM)
    assert request.kind is RequestKind.START
    assert request.arguments == {"start_from": "batch-3"} | how


class Started(Exception):  # noqa: N818 - not an error: the query is reached
    """The query would be started now."""


def start(_live: LiveDirectory) -> None:
    raise Started


def test_a_run_refuses_by_itself_and_is_not_restarted(history: History, tmp_path: Path) -> None:
    write_to_table(history)
    stream = history.shelf.stream
    before = stream.catalog.streams.get(STREAM).live_directory

    def run(text: str, **how: bool) -> None:
        execute_stream(stream, RunRequest(run_id="run", start_query=start, start_from=StartFrom(text, **how)))  # type: ignore[arg-type]

    with pytest.raises(RowsAtRiskError):
        run("batch-3")

    execution = stream.catalog.executions.latest(STREAM)
    assert execution is not None
    assert (execution.status, execution.settled) == (ExecutionStatus.FAILED, True)
    assert stream.catalog.streams.get(STREAM).live_directory == before
    with pytest.raises(Started):
        run("batch-3", accept_loss=True)
    assert (history.batch, history.sink_batch) == (3, 3)


def test_accepting_a_loss_does_not_help_where_a_sink_cannot_be_rolled_back(history: History) -> None:
    (history.sink / "_spark_metadata/5").unlink()

    with pytest.raises(SinkRollbackError, match=r"nothing was changed.*_spark_metadata/5 is missing"):
        verbs.request_start(history.shelf.stream, StartFrom("batch-6", accept_loss=True), origin=ORIGIN)
