"""Savepoints of streams that read each other: taken as a set or not at all, kept together, and restored as one."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import BatchInput, ExecutionStatus, SnapshotRecord
from dagster_ckpt.catalog.savepoint_sets import SavepointSet
from dagster_ckpt.client import Client, savepoint_set
from dagster_ckpt.client.rebuild import RebuildReport, rebuild
from dagster_ckpt.client.savepoint_set import suspend_set, take_savepoint_set
from dagster_ckpt.errors import (
    CkptError,
    RequestFailedError,
    SnapshotHeldError,
    SnapshotNotFoundError,
    StreamNotFoundError,
)
from dagster_ckpt.recovery.stream_graph import graph_of
from dagster_ckpt.snapshot.store import read_files
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.stream.edges import Edge, EdgeKind, edges_in
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock
from tests.support.stream_graph import COMPACTED_EVERY, Stage, listed
from tests.support.thorough import either


class Pipeline:
    """Two branches of one stream that meet in a fourth one; or only the first two streams."""

    def __init__(self, root: Path, *, whole: bool = True) -> None:
        self.orders = Stage(root, "orders")
        self.left = Stage(root, "left", self.orders)
        self.stages: tuple[Stage, ...] = (self.orders, self.left)
        if whole:
            self.right = Stage(root, "right", self.orders)
            self.totals = Stage(root, "totals", self.left, self.right)
            self.stages += (self.right, self.totals)
        self.catalog = self.orders.catalog
        self.client = Client(self.catalog, origin="a test")

    def commit(self, times: int = 1) -> None:
        for _ in range(times):
            for stage in self.stages:
                stage.commit()

    @property
    def batches(self) -> list[int | None]:
        return [LiveDirectory(str(stage.live)).positions().commit for stage in self.stages]

    def take(
        self,
        *,
        stale: dict[str, list[SnapshotRecord]] | None = None,
        after: dict[str, Callable[[], object]] | None = None,
        **options: object,
    ) -> SavepointSet:
        """As the client does it; a stream gives its `stale` savepoints first, and something happens `after` a cut."""
        by_name = {stage.name: stage for stage in self.stages}

        def take(stream: str, label: str) -> SnapshotRecord:
            earlier = (stale or {}).get(stream)
            taken = earlier.pop(0) if earlier else by_name[stream].savepoint(label)
            (after or {}).get(stream, lambda: None)()
            return taken

        graph = graph_of(self.catalog, "orders+")
        open_stream = {stage.name: stage.stream for stage in self.stages}.__getitem__
        return take_savepoint_set(
            self.catalog,
            graph,
            take,
            open_stream,
            selection="orders+",
            origin="a test",
            **options,  # type: ignore[arg-type]
        )

    def rebuilt(self) -> tuple[Catalog, list[RebuildReport]]:
        """A catalog made from storage alone."""
        catalog = Catalog(f"sqlite:///{self.orders.root / uuid.uuid4().hex}.db")
        streams = [replace(stage.stream, catalog=catalog) for stage in self.stages]
        lost = self.catalog.deployment_id
        return catalog, [rebuild(each, origin="a test", take_over_deployment=lost) for each in streams]

    def assert_uninterrupted(self) -> None:
        """Each stage has read each file that its upstream lists, and has listed what each of its batches wrote."""
        for stage, batch in zip(self.stages, self.batches, strict=True):
            for number, upstream in enumerate(stage.upstream):
                assert stage.has_read(str(number)) == set(listed(upstream.sink)), stage.name
            parts = [file.rpartition("part-")[2][:5] for file in listed(stage.sink)]
            assert parts == [f"{each:05}" for each in range((batch or 0) + 1)], stage.name

    def assert_consistent(self) -> None:
        for stage in self.stages:
            for number, upstream in enumerate(stage.upstream):
                assert stage.has_read(str(number)) <= set(listed(upstream.sink)), stage.name


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    made = Pipeline(tmp_path)
    made.commit(2)
    yield made
    made.catalog.close()


def test_set_is_taken_downstream_first_and_kept_together(pipeline: Pipeline) -> None:
    made = pipeline.client.trigger_savepoint_set("orders+", label="june")

    assert made.streams == ("orders", "left", "right", "totals")
    numbers = [made.savepoints[stream].created_at_ms for stream in made.streams]
    assert numbers == sorted(numbers, reverse=True)
    assert pipeline.client.savepoint_sets() == [made]
    assert made.messages()[0] == f"savepoint set {made.set_id} (june)"
    for savepoint in made.savepoints.values():
        with pytest.raises(SnapshotHeldError, match=f"savepoint set {made.set_id}"):
            as_writer(pipeline.catalog).mark_deleting(savepoint.snapshot_id)

    pipeline.client.release_savepoint_set("june")

    assert pipeline.client.savepoint_sets() == []
    as_writer(pipeline.catalog).mark_deleting(made.savepoints["left"].snapshot_id)
    with pytest.raises(SnapshotNotFoundError, match="no savepoint set 'june'"):
        pipeline.client.release_savepoint_set("june")


def test_upstream_that_lacks_what_was_read_is_taken_once_more(pipeline: Pipeline) -> None:
    early = pipeline.orders.savepoint(), pipeline.left.savepoint()
    pipeline.commit()

    made = pipeline.take(stale={"orders": [early[0]], "left": [early[1]]})

    assert [made.savepoints[stream].batch_id for stream in made.streams] == [2, 2, 2, 2]
    claimed = {each.snapshot_id for stage in pipeline.stages for each in listed_of(stage) if each.claimed}
    assert {each.snapshot_id for each in early} <= claimed
    assert not claimed & {each.snapshot_id for each in made.savepoints.values()}


def listed_of(stage: Stage) -> list[SnapshotRecord]:
    return stage.catalog.snapshots.completed(stage.name)


def test_nothing_is_recorded_if_the_second_try_does_not_belong_together(pipeline: Pipeline) -> None:
    early = [pipeline.orders.savepoint(), pipeline.orders.savepoint()]
    pipeline.commit()

    with pytest.raises(RequestFailedError, match=r"it has read batch 2 of orders, and .* ends at batch 1"):
        pipeline.take(stale={"orders": early})

    assert pipeline.client.savepoint_sets() == []
    assert all(each.claimed for stage in pipeline.stages for each in listed_of(stage))


def test_nothing_is_recorded_if_a_stream_cannot_be_taken(pipeline: Pipeline) -> None:
    (pipeline.left.live / "offsets" / "1").unlink()

    with pytest.raises(Exception, match="offsets/1 is missing"):
        pipeline.take()

    assert pipeline.client.savepoint_sets() == []


def test_sets_of_streams_that_run_belong_together(pipeline: Pipeline) -> None:
    done = threading.Event()

    def run(stage: Stage) -> None:
        while not done.is_set():
            stage.commit()

    threads = [threading.Thread(target=run, args=[stage]) for stage in pipeline.stages]
    for thread in threads:
        thread.start()
    made = []
    for _ in range(either(quick=4, thorough=20)):
        # A batch that is listed and not committed may have been read twice in a row.
        with suppress(RequestFailedError):
            made.append(pipeline.client.trigger_savepoint_set("orders+"))
    done.set()
    for thread in threads:
        thread.join()

    assert made
    for found in made:
        files = {stream: files_of(pipeline, each) for stream, each in found.savepoints.items()}
        for stage in pipeline.stages:
            for number, upstream in enumerate(stage.upstream):
                read, written = files[stage.name][f"sources/{number}"], files[upstream.name]["sinks/0"]
                assert read
                assert read <= written


def files_of(pipeline: Pipeline, savepoint: SnapshotRecord) -> dict[str, set[str]]:
    """What the logs of sources and sinks in a savepoint list."""
    store = next(stage for stage in pipeline.stages if stage.name == savepoint.stream_id).stream.store
    found: dict[str, set[str]] = {}
    entries = read_files(store, savepoint.location or "", lambda path: path.startswith(("sources/", "sinks/")))
    for path, data in entries.items():
        lines = [json.loads(line)["path"] for line in data.decode().splitlines()[1:]]
        found.setdefault(path.rpartition("/")[0], set()).update(lines)
    return found


def test_edge_of_unknown_kind_is_named_before_anything_is_taken(pipeline: Pipeline, tmp_path: Path) -> None:
    table = Stage(tmp_path, "table", pipeline.totals)
    table.read_as("delta")

    with pytest.raises(RequestFailedError, match=r"table, source 0, from FileSink.* kind delta is not recorded"):
        pipeline.client.trigger_savepoint_set("orders+")
    assert listed_of(pipeline.totals) == []
    table.commit()

    made = pipeline.client.trigger_savepoint_set("orders+", accept_unproven=True)

    assert [("delta" in why) for why in made.unproven] == [True]


def test_batch_asset_between_two_streams_is_named_before_anything_is_taken(pipeline: Pipeline, tmp_path: Path) -> None:
    monthly = Stage(tmp_path, "monthly", catalog=pipeline.totals.catalog)
    monthly.batch_inputs = [BatchInput("totals", "report"), BatchInput("gone", "report")]
    monthly.read_as("delta")
    between = (
        r"monthly from asset report of totals: a batch asset is between them, and what it has read is not recorded"
    )

    with pytest.raises(RequestFailedError, match=between):
        pipeline.client.trigger_savepoint_set("orders+")

    assert [edge.upstream for edge in pipeline.client.stream_edges() if edge.reader == "monthly"] == ["totals"]


@pytest.mark.thorough
def test_a_reader_that_was_cut_while_the_log_it_reads_was_empty_proves_nothing(pipeline: Pipeline) -> None:
    for entry in (pipeline.orders.sink / "_spark_metadata").iterdir():
        entry.unlink()

    with pytest.raises(RequestFailedError, match="does not record how far it has read"):
        pipeline.take(after={"orders": pipeline.orders.commit})


def test_older_sets_are_released(pipeline: Pipeline) -> None:
    kept = pipeline.client.trigger_savepoint_set("orders+", label="by hand")

    made = [pipeline.client.trigger_savepoint_set("orders+", keep=2) for _ in range(4)]

    assert pipeline.client.savepoint_sets() == [made[3], made[2], kept]


def test_sets_are_in_the_order_in_which_they_were_taken_whatever_the_clock_says(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(10_000_000)
    monkeypatch.setattr(pipeline.catalog.database, "_clock", clock)
    first = pipeline.client.trigger_savepoint_set("orders+", label="june", keep=3)
    clock.now_ms -= 3_600_000
    second = pipeline.client.trigger_savepoint_set("orders+", label="june", keep=3)

    assert pipeline.client.savepoint_sets() == [second, first]
    assert pipeline.catalog.savepoint_sets.get("june") == second

    third = pipeline.client.trigger_savepoint_set("orders+", keep=1)
    assert pipeline.client.savepoint_sets() == [third]


def test_a_way_back_that_an_earlier_restart_left_is_not_taken_for_a_new_one(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock(10_000_000)
    monkeypatch.setattr(pipeline.catalog.database, "_clock", clock)
    june = pipeline.client.trigger_savepoint_set("orders+", label="june")
    pipeline.commit()
    pipeline.client.restart_savepoint_set("june", start=False)
    clock.now_ms -= 3_600_000
    for stage in pipeline.stages:
        stage.execute(str(stage.live))
    pipeline.commit(3)
    was = pipeline.batches

    pipeline.client.restart_savepoint_set("june", start=False)

    before = pipeline.catalog.savepoint_sets.get(f"before-{june.set_id[:8]}-2")
    assert [before.savepoints[stage.name].batch_id for stage in pipeline.stages] == was


def test_what_is_read_while_the_streams_of_a_set_stop_is_not_undone(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.client.trigger_savepoint_set("orders+", label="june")
    late = Stage(tmp_path, "late", pipeline.totals)
    late.commit()
    pipeline.commit()
    was = pipeline.batches

    def suspend(*_arguments: object) -> list[str]:
        late.commit()
        return ["left", "orders"]

    started: list[str] = []
    monkeypatch.setattr(savepoint_set, "suspend_set", suspend)
    monkeypatch.setattr(Client, "restart", lambda _self, stream, **_: started.append(stream))

    with pytest.raises(RequestFailedError, match="downstream stream late has read undone rows"):
        pipeline.client.restart_savepoint_set("june", start=False)

    assert (pipeline.batches, started) == (was, ["orders", "left"])


def test_an_asset_that_two_streams_have_written_names_neither(pipeline: Pipeline) -> None:
    old = replace(pipeline.orders.stream, stream_id="orders-of-2025", name="old", asset_key="raw/orders")
    old.register()
    new = replace(pipeline.orders.stream, asset_key="raw/orders")
    new.register()

    with pytest.raises(StreamNotFoundError, match="has no stream 'raw/orders'"):
        graph_of(pipeline.catalog, "raw/orders+")


@pytest.mark.parametrize(
    ("status", "waits"),
    [("FAILED", True), ("RUNNING", True), ("CANCELED", False), ("FINISHED", False), ("SUSPENDED", False)],
)
def test_before_a_set_is_restored_only_streams_that_may_go_on_are_suspended(
    monkeypatch: pytest.MonkeyPatch, status: str, *, waits: bool
) -> None:
    """One that has ended cannot be suspended, even if its clean-up is not over."""
    last = Mock(settled=False, status=ExecutionStatus(status))
    stream: Any = Mock()
    stream.catalog.executions.latest.return_value = last
    monkeypatch.setattr("dagster_ckpt.client.savepoint_set.is_running", lambda _stream: False)

    assert suspend_set(Mock(streams=("orders",)), {"orders": stream}, Mock()) == (["orders"] if waits else [])


def test_rebuilt_catalog_has_the_sets_that_were_not_released(pipeline: Pipeline) -> None:
    made = [pipeline.client.trigger_savepoint_set("orders+", label=label) for label in ("june", "july")]
    pipeline.client.release_savepoint_set("june")

    catalog, reports = pipeline.rebuilt()

    (found,) = catalog.savepoint_sets.all()
    assert replace(found, savepoints={}) == replace(made[1], savepoints={})
    assert {stream: each.snapshot_id for stream, each in found.savepoints.items()} == {
        stream: each.snapshot_id for stream, each in made[1].savepoints.items()
    }
    assert [report.sets for report in reports] == [(), (), (), ("savepoint set july",)]
    assert "the catalog lacks its savepoint of left, right, totals" in reports[0].incomplete_sets[0]
    assert {(edge.reader, edge.upstream) for edge in edges_in(catalog)} == {
        ("left", "orders"), ("right", "orders"), ("totals", "left"), ("totals", "right")
    }  # fmt: skip
    with pytest.raises(SnapshotHeldError, match=f"savepoint set {made[1].set_id}"):
        as_writer(catalog).mark_deleting(found.savepoints["left"].snapshot_id)
    catalog.close()


@pytest.mark.thorough(but="[]")
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"savepoints": {"left": "1"}, "id": 1}'])
def test_damaged_record_of_a_set_is_left_out_of_a_rebuilt_catalog(pipeline: Pipeline, content: bytes) -> None:
    made = pipeline.client.trigger_savepoint_set("orders+")
    for stage in pipeline.stages:
        Path(made.savepoints[stage.name].location.removeprefix("file://"), "_set").write_bytes(content)  # type: ignore[union-attr]

    catalog, reports = pipeline.rebuilt()

    assert catalog.savepoint_sets.all() == []
    assert all(report.registered for report in reports)
    catalog.close()


def test_record_of_a_set_goes_with_its_savepoint(pipeline: Pipeline) -> None:
    made = pipeline.client.trigger_savepoint_set("orders+")
    location = made.savepoints["left"].location or ""

    pipeline.left.stream.store.discard(location)

    assert not Path(location.removeprefix("file://")).exists()
    assert pipeline.rebuilt()[0].savepoint_sets.all() == []


def test_restart_takes_every_stream_and_sink_back(pipeline: Pipeline) -> None:
    june = pipeline.client.trigger_savepoint_set("orders+", label="june")
    pipeline.commit(4)
    reported: list[str] = []

    pipeline.client.restart_savepoint_set("june", start=False, report=reported.append)

    assert pipeline.batches == [june.savepoints[stream].batch_id for stream in june.streams] == [1, 1, 1, 1]
    assert [message for message in reported if message.startswith("restored")] == [
        f"restored {stream} to batch 1" for stream in reversed(june.streams)
    ]
    pipeline.commit(5)
    pipeline.assert_uninterrupted()


def test_streams_are_started_upstream_first(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.client.trigger_savepoint_set("orders+", label="june")
    started: list[str] = []
    monkeypatch.setattr(Client, "restart", lambda _self, stream, **_: started.append(stream))

    pipeline.client.restart_savepoint_set("june")

    assert started == ["orders", "left", "right", "totals"]


@pytest.mark.thorough(but="between the cuts")
@pytest.mark.parametrize("compacted", ["between the cuts", "before what was read"])
def test_compaction_of_a_sink_log_hides_no_batch(pipeline: Pipeline, compacted: str) -> None:
    pipeline.commit(COMPACTED_EVERY - 3)
    if compacted == "between the cuts":
        made = pipeline.take(after={"totals": pipeline.commit, "left": lambda: pipeline.commit(2)})
    else:
        pipeline.commit(2)
        made = pipeline.take()

    assert any(".compact" in path.name for path in (pipeline.orders.sink / "_spark_metadata").iterdir())
    for stage in pipeline.stages[1:]:
        savepoint = made.savepoints[stage.name]
        reads = {each["upstream"]: each["batch"] for each in savepoint.properties["reads"]}
        assert reads == dict.fromkeys((each.name for each in stage.upstream), savepoint.batch_id)
    pipeline.commit(COMPACTED_EVERY)
    pipeline.client.restart_savepoint_set(made.set_id, start=False)
    assert pipeline.batches == [made.savepoints[stream].batch_id for stream in made.streams]
    pipeline.commit(2)
    pipeline.assert_uninterrupted()


def test_stream_added_while_a_set_is_taken_is_not_part_of_it(pipeline: Pipeline, tmp_path: Path) -> None:
    late: list[Stage] = []
    made = pipeline.take(after={"left": lambda: late.append(Stage(tmp_path, "late", pipeline.totals))})
    assert made.streams == ("orders", "left", "right", "totals")
    late[0].commit()
    # It has read nothing that a restart undoes, so it stays as it is.
    pipeline.client.restart_savepoint_set(made.set_id, start=False)
    late[0].commit()
    assert late[0].has_read() == set(listed(pipeline.totals.sink))


def test_stream_removed_while_a_set_is_taken_leaves_none(pipeline: Pipeline) -> None:
    def remove() -> None:
        live = pipeline.orders.live
        live.rename(live.with_name("removed"))

    with pytest.raises(CkptError, match="orders"):
        pipeline.take(after={"left": remove})

    assert pipeline.client.savepoint_sets() == []


@pytest.mark.thorough
def test_set_outlives_a_connection_that_is_gone(pipeline: Pipeline) -> None:
    june = pipeline.client.trigger_savepoint_set("orders+", label="june")
    pipeline.commit()
    pipeline.totals.upstream = (pipeline.left,)
    pipeline.totals.execute(str(pipeline.totals.live))

    pipeline.client.restart_savepoint_set("june", start=False)

    assert pipeline.batches == [june.savepoints[stream].batch_id for stream in june.streams]
    # Before their next starts too, the graph is known, and a set of it is proven.
    assert pipeline.client.trigger_savepoint_set("orders+").streams == ("orders", "left", "right", "totals")


@pytest.mark.parametrize("fails", ["a savepoint is gone", "a reader is not in the set"])
def test_restart_is_refused_before_anything_changes(pipeline: Pipeline, tmp_path: Path, fails: str) -> None:
    june = pipeline.client.trigger_savepoint_set("orders+", label="june")
    pipeline.commit()
    refusal: Callable[[], object] = lambda: pipeline.client.restart_savepoint_set("june", start=False)  # noqa: E731
    if fails == "a savepoint is gone":
        savepoint = june.savepoints["left"].snapshot_id
        pipeline.catalog.savepoint_sets.release(june.set_id)
        pipeline.catalog.savepoint_sets.record(
            june, [each.snapshot_id for each in june.savepoints.values() if each.snapshot_id != savepoint]
        )
        with pytest.raises(SnapshotNotFoundError, match="lost the savepoint of left"):
            refusal()
    else:
        late = Stage(tmp_path, "late", pipeline.totals)
        late.commit()
        with pytest.raises(RequestFailedError, match="downstream stream late has read undone rows"):
            refusal()

    assert pipeline.batches == [2, 2, 2, 2]


@pytest.mark.parametrize(("reads", "is_new"), [([("orders", "daily")], True), ([("orders", "elsewhere")], False)])
def test_only_a_topic_that_another_stream_of_the_set_reads_is_written_again(
    monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, str]], is_new: bool
) -> None:
    topic = "ForeachBatchSink[kafka://broker:9092/orders?id=shop]"
    edges = [Edge(reader, "0", upstream, topic, EdgeKind.TOPIC) for upstream, reader in reads]
    monkeypatch.setattr(savepoint_set, "edges_in", lambda _: edges)
    monkeypatch.setattr(savepoint_set, "sinks_written", lambda _: [topic])
    savepoint = SimpleNamespace(snapshot_id="one", properties={})
    found: Any = SimpleNamespace(streams=("orders", "daily"), savepoints={"orders": savepoint})
    stream: Any = SimpleNamespace(stream_id="orders", catalog=None)

    assert savepoint_set._start_from(found, stream) == StartFrom("one", new_query_id=is_new)
