"""A start knows the tables and topics that its stream has written to, and whether another stream wrote there last."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.client import preflight as before_a_start
from dagster_ckpt.errors import RowsAtRiskError, SharedSinkError
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.rewind_preview import RewindPreview, preview_rewind, refuse_loss
from dagster_ckpt.recovery.sink_survey import missing_batches
from dagster_ckpt.sinks import registry
from dagster_ckpt.sinks.registry import register_sink
from dagster_ckpt.sinks.sink import FoundSink, Replay, Sink, SinkEffect
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.known_sinks import KnownSink
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import TEST, as_writer
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import LAST, History
from tests.support.verbs import restart

CASES = yaml.safe_load(Path(__file__).with_name("missing_batches.yaml").read_text())
ORIGIN = "a test"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["says"])
def test_what_is_there_and_what_was_recorded_decide_which_batches_are_missing(case: dict[str, Any]) -> None:
    known = KnownSink(case.get("was"), case.get("had"), goes_on=case.get("goes_on", False))
    found = FoundSink(case.get("is"), case.get("has"), is_certain=not case.get("unsure", False))

    told = missing_batches(found, known, case["at"], Sink("table", "/table"), case.get("back"))

    assert (told.effect.value if told is not None else None) == case.get("effect")
    assert case.get("lost", "") in (told.reason if told is not None else "")


class Shelf(Sink):
    """A table of a test: one file with its id and its newest batch."""

    noun = "table"
    knows_queries = True

    @classmethod
    def of(cls, name: str) -> Self | None:
        return cls(name, name.removeprefix("shelf:")) if name.startswith("shelf:") else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        return f"shelf:{place}" if output_format == "shelf" else None

    def batch_after(self, replay: Replay) -> int | None:
        undone = Path(f"{self.place}-undone")
        return int(undone.read_text()) if undone.exists() else None

    def look(self, query_ids: Collection[str] = ()) -> FoundSink | None:
        path = Path(self.place or "")
        if not path.exists():
            return FoundSink(None)
        identity, batch = path.read_text().split()
        return FoundSink(identity, int(batch), is_certain=True)


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    monkeypatch.setattr(registry, "_registered", [])
    register_sink(Shelf)
    history = History(tmp_path)
    (tmp_path / "shelf").write_text(f"a {LAST}")
    noted = {
        "batch_id": LAST,
        "sinks": [f"shelf:{tmp_path}/shelf"],
        "sink_ids": {f"shelf:{tmp_path}/shelf": {"id": "a"}},
    }
    as_writer(history.shelf.stream.catalog, STREAM).executions.heartbeat("first", noted)
    yield history
    history.close()


def preview(stream: StreamHandle, output: NamedOutput | None, start_from: str = "latest") -> RewindPreview:
    facts = recovery_facts(stream, StartFrom(start_from), predecessor_ended=True, output=output)
    return preview_rewind(stream, facts, plan_recovery(facts), output)


def test_a_snapshot_records_the_table_and_what_it_had(history: History, tmp_path: Path) -> None:
    savepoint = verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="kept")

    assert savepoint.properties["sink_ids"] == {f"shelf:{tmp_path}/shelf": {"id": "a", "batch": LAST}}


def test_a_snapshot_is_not_restored_into_another_table(history: History, tmp_path: Path) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="kept")
    (tmp_path / "shelf").write_text(f"b {LAST + 3}")

    with pytest.raises(RowsAtRiskError, match="another id: was a, is b"):
        verbs.request_start(history.shelf.stream, StartFrom("kept"), origin=ORIGIN)
    verbs.request_start(history.shelf.stream, StartFrom("kept", accept_loss=True), origin=ORIGIN)


def test_batches_that_the_roll_back_brings_back_are_not_missing(history: History, tmp_path: Path) -> None:
    verbs.trigger_savepoint(history.shelf.stream, origin=ORIGIN, label="kept")
    (tmp_path / "shelf").write_text(f"a {LAST - 3}")
    output = NamedOutput("shelf", f"{tmp_path}/shelf")

    assert preview(history.shelf.stream, output, "kept").losing != ()
    (tmp_path / "shelf-undone").write_text(f"{LAST - 1}")
    assert preview(history.shelf.stream, output, "kept").losing != ()
    (tmp_path / "shelf-undone").write_text(f"{LAST}")
    assert preview(history.shelf.stream, output, "kept").losing == ()
    # Another table under the same name may have batches of the same numbers.
    (tmp_path / "shelf").write_text(f"b {LAST - 3}")
    assert preview(history.shelf.stream, output, "kept").losing != ()
    (tmp_path / "shelf").write_text(f"a {LAST - 3}")
    # Nothing is rolled back where the query continues.
    assert preview(history.shelf.stream, output).losing != ()


def test_a_query_that_writes_elsewhere_now_does_not_need_the_table(history: History, tmp_path: Path) -> None:
    (tmp_path / "shelf").unlink()

    assert preview(history.shelf.stream, NamedOutput("shelf", f"{tmp_path}/new")).losing == ()
    assert preview(history.shelf.stream, NamedOutput("shelf", f"{tmp_path}/shelf")).losing != ()


def test_a_restart_that_would_be_refused_by_its_sink_does_not_suspend_the_query(
    history: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shelf").write_text("b -1")
    monkeypatch.setattr(before_a_start, "is_running", lambda _stream: True)

    with pytest.raises(RowsAtRiskError, match="dropped and created again"):
        restart(history.shelf.stream, StartFrom(), origin=ORIGIN)

    assert history.shelf.stream.catalog.requests.pending(STREAM) == []


def another(stream: StreamHandle, sink: str) -> StreamHandle:
    """A stream of the same catalog that was never started; the first one wrote to a sink."""
    as_writer(stream.catalog, STREAM).executions.heartbeat("first", {"batch_id": LAST, "sinks": [sink]})
    other = replace(stream, stream_id="renamed", name="renamed", asset_key="renamed")
    other.register()
    return other


@pytest.mark.parametrize(
    ("sink", "output"),
    [
        ("DeltaSink[/data/shops]", NamedOutput("delta", "/data/shops")),
        ("DeltaSink[file:/data/shops]", NamedOutput("delta", "/data/shops")),
        ("IcebergTable[lake.db.shops at /data/lake]", NamedOutput("iceberg", "shops", "IcebergTable[lake.db.shops]")),
        ("KafkaTable[kafka:9092/shops]", NamedOutput("kafka", "shops", "KafkaTable[kafka:9092/shops]")),
        (
            "ForeachBatchSink[kafka://kafka:9092/shops?id=a]",
            NamedOutput("foreachbatch", "kafka://kafka:9092/shops?id=a"),
        ),
        ("ForeachBatchSink[jdbc:shops]", NamedOutput("foreachbatch", "jdbc:shops")),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_empty_start_where_another_stream_wrote_last_is_refused_for_every_kind_of_sink(
    history: History, sink: str, output: NamedOutput
) -> None:
    other = another(history.shelf.stream, sink)
    ahead = preview(other, output)

    assert [each.effect for each in ahead.sinks] == [SinkEffect.SHARED]
    with pytest.raises(
        SharedSinkError, match=f"Stream '{STREAM}' of this catalog wrote to .* set stream_id='{STREAM}'"
    ):
        refuse_loss(other, ahead, accept_loss=False)
    refuse_loss(other, ahead, accept_loss=True)


@pytest.mark.parametrize(
    ("sink", "output"),
    [
        ("MemorySink", NamedOutput("memory", None)),
        ("DeltaSink[/data/shops]", NamedOutput("delta", "/data/others")),
        ("KafkaTable[kafka:9092/shops]", NamedOutput("kafka", "shops", "KafkaTable[elsewhere:9092/shops]")),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_an_empty_start_elsewhere_is_not(history: History, sink: str, output: NamedOutput) -> None:
    assert preview(another(history.shelf.stream, sink), output).sinks == ()


def test_a_stream_that_has_written_there_itself_may_begin_anew(history: History) -> None:
    sink = "DeltaSink[/data/shops]"
    other = another(history.shelf.stream, sink)
    writer = as_writer(other.catalog, other.stream_id).executions
    writer.start("second", run_id="second", cause=StartCause.MANUAL, holder=TEST)
    writer.heartbeat("second", {"sinks": [sink]})

    assert SinkEffect.SHARED not in {each.effect for each in preview(other, NamedOutput("delta", "/data/shops")).sinks}


def test_a_function_that_left_batches_out_does_not_stop_the_code_that_replaces_it(
    history: History, tmp_path: Path
) -> None:
    log = tmp_path / "shops/_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020}.json").write_text('{"metaData": {"id": "a"}}')
    sink = f"ForeachBatchSink[delta:{log.parent}]"
    noted = {"batch_id": LAST, "sinks": [sink], "sink_ids": {sink: {"id": "a"}}}
    as_writer(history.shelf.stream.catalog, STREAM).executions.heartbeat("first", noted)

    assert preview(history.shelf.stream, NamedOutput("delta", str(log.parent))).sinks == ()
