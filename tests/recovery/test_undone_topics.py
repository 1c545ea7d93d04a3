"""A start moves the offsets of a Kafka source behind what its upstream has undone; tests/kafka has real topics."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_ckpt.errors import RestoreError, StorageAccessError
from dagster_ckpt.recovery import undone_topics
from dagster_ckpt.recovery.undone_topics import continue_behind_topics
from dagster_ckpt.sinks.kafka.sink import WrittenTopic, written_topic
from dagster_ckpt.sinks.kafka.undone import TopicEnd, Undone
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.query.sources import SourceIdentity
from dagster_ckpt.stream.edges import Edge, EdgeKind
from dagster_ckpt.stream.known_sinks import topic_ends
from tests.support.executioner import Executioner, Killed
from tests.support.stream_graph import place

SINK = "ForeachBatchSink[kafka://broker:9092/orders?id=shop]"
EDGE = Edge("daily", "0", "orders", SINK, EdgeKind.TOPIC)


class Reader:
    """Stream `daily` reads topic `orders` of a stream that went back, and a topic `other`."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.live = LiveDirectory(str(root / "live"))
        self.patch = patch
        self.edges = [EDGE]
        self.sources = [SourceIdentity("kafka")]
        # What is in the offset log besides the offset: of other sources, or of a second use.
        self.before: list[str] = []
        self.uses = 1
        self.written: WrittenTopic | StorageAccessError = WrittenTopic({}, {}, frozenset({"new"}))
        self.restored: TopicEnd | None = None
        self.could_ask = False
        self.ran: list[int] = []
        patch.setattr(undone_topics, "edges_to", lambda *_: self.edges)
        patch.setattr(undone_topics, "query_ids_in", lambda *_: ["old", "new"])
        patch.setattr(undone_topics, "written_topic", lambda *_: self._asked())
        patch.setattr(undone_topics, "_could_ask", lambda *_: self.could_ask)
        patch.setattr(undone_topics, "topic_end_in", lambda *_: self.restored)
        place(root / "live" / "metadata", '{"id":"daily"}')
        place(root / "live" / "sources" / "0" / "0", 'v1\n{"orders":{"0":0,"1":0},"other":{"0":0}}')
        self.plan(0, {"0": 4, "1": 2})
        self.plan(1, {"0": 8, "1": 5})
        self.commit(0)
        self.commit(1)

    def _asked(self) -> WrittenTopic:
        if isinstance(self.written, StorageAccessError):
            raise self.written
        return self.written

    def undone(self, **ranges: list[Undone]) -> None:
        self.written = WrittenTopic({}, {int(name[1:]): each for name, each in ranges.items()}, frozenset({"new"}))

    def plan(self, batch: int, orders: dict[str, int]) -> None:
        metadata = {"batchWatermarkMs": 100 * batch, "batchTimestampMs": 1, "conf": {}}
        offset = json.dumps({"orders": orders, "other": {"0": 3}})
        lines = ["v1", json.dumps(metadata), *self.before, *[offset] * self.uses]
        place(Path(self.live.url) / "offsets" / str(batch), "\n".join(lines))

    def commit(self, batch: int) -> None:
        place(
            Path(self.live.url) / "commits" / str(batch),
            json.dumps({"nextBatchWatermarkMs": 100 * batch + 7}).join(["v1\n", ""]),
        )

    def run_planned(self, batch: int) -> None:
        assert (Path(self.live.url) / "offsets" / str(batch)).exists()
        self.commit(batch)
        self.ran.append(batch)

    def start(self, *, accept_loss: bool = False) -> list[str]:
        catalog = SimpleNamespace(
            now_ms=lambda: 1_000,
            history=SimpleNamespace(begins=lambda _: {1: (0, 3)}),
            streams=SimpleNamespace(get=lambda _: SimpleNamespace(restored_snapshot_id="june")),
            snapshots=SimpleNamespace(by_id=lambda _: {"june": SimpleNamespace(properties={})}),
        )
        stream: Any = SimpleNamespace(catalog=catalog, stream_id="daily")
        return continue_behind_topics(
            stream, self.live, self.sources, nullcontext, self.run_planned, accept_loss=accept_loss
        )

    def read_as(self, *others: str, uses: int, names: tuple[str, ...]) -> None:
        """Let the query read another source twice before the topic, or the topic twice through one DataFrame."""
        self.before, self.uses = list(others), uses
        of_others = [SourceIdentity("rate", offset_names=tuple(map(str, range(len(others)))))] if others else []
        self.sources = [*of_others, SourceIdentity("kafka", offset_names=names)]
        self.edges = [replace(EDGE, source=str(len(of_others)), offset_names=names)]
        self.plan(0, UNMOVED[0])
        self.plan(1, UNMOVED[1])

    @property
    def entries(self) -> list[list[str]]:
        found = sorted((Path(self.live.url) / "offsets").glob("[0-9]*"), key=lambda each: int(each.name))
        return [each.read_text().splitlines()[2:] for each in found]

    @property
    def offsets(self) -> list[dict[str, int]]:
        return [json.loads(each[-1])["orders"] for each in self.entries]

    @property
    def note(self) -> dict[str, dict[str, str]]:
        return json.loads((Path(self.live.url) / "sources" / "0" / "dagster_ckpt_skipped").read_text())


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    return Reader(tmp_path, monkeypatch)


UNMOVED = [{"0": 4, "1": 2}, {"0": 8, "1": 5}]


def test_a_reader_gets_no_offset_of_a_new_partition_that_it_is_not_assigned(reader: Reader) -> None:
    reader.undone(p2=[Undone(0, 5)])
    reader.edges = [replace(EDGE, options={"assign": '{"orders":[0,1]}'})]

    assert reader.start() == []
    assert reader.offsets == UNMOVED

    reader.edges = [EDGE]
    assert reader.start() != []
    assert reader.offsets[-1]["2"] == 5


def test_a_reader_at_the_end_of_what_is_kept_continues_behind_what_is_undone(reader: Reader) -> None:
    reader.undone(p0=[Undone(8, 12)], p1=[])

    (message,) = reader.start()

    assert message == f"source 0 continues behind what was undone in {SINK}"
    assert (reader.offsets, reader.ran) == ([UNMOVED[0], {"0": 12, "1": 5}], [])
    assert reader.note == {"orders": {"0": "8-12", "1": "5-5"}}
    # The other topic of the source stays where it is, and the note is nothing that the doctor minds.
    assert '"other": {"0": 3}' in (Path(reader.live.url) / "offsets" / "1").read_text().replace(":", ": ").replace(
        ":  ", ": "
    )
    assert diagnose(reader.live).can_resume
    assert reader.start() == []


def test_a_reader_that_lags_first_runs_a_batch_up_to_it_and_passes_each_range(reader: Reader) -> None:
    reader.undone(p0=[Undone(9, 12), Undone(14, 20)], p1=[Undone(5, 6)])

    messages = reader.start()

    assert reader.ran == [2, 3]
    assert reader.offsets == [*UNMOVED, {"0": 12, "1": 6}, {"0": 20, "1": 6}]
    assert len(messages) == 4
    planned = json.loads((Path(reader.live.url) / "offsets" / "2").read_text().splitlines()[1])
    assert (planned["batchWatermarkMs"], planned["batchTimestampMs"]) == (107, 1_000)


def test_a_partition_that_was_added_since_is_read_behind_it(reader: Reader) -> None:
    reader.undone(p0=[], p1=[], p2=[Undone(0, 4)])
    reader.start()
    assert reader.offsets[-1] == {"0": 8, "1": 5, "2": 4}


def test_a_batch_that_is_planned_runs_as_it_was_planned(reader: Reader) -> None:
    reader.plan(2, {"0": 9, "1": 5})
    reader.undone(p0=[Undone(10, 12)], p1=[])
    reader.start()
    assert reader.offsets == [*UNMOVED, {"0": 9, "1": 5}, {"0": 12, "1": 5}]


@pytest.mark.parametrize("lags", [True, False])
def test_killed_anywhere_the_next_start_finishes_it(tmp_path: Path, lags: bool) -> None:
    whole: tuple[Any, ...] | None = None
    for passing in range(100):
        with pytest.MonkeyPatch.context() as patch:
            reader = Reader(tmp_path / f"{passing}", patch)
            reader.undone(p0=[Undone(9 if lags else 8, 12)], p1=[Undone(5, 9)])
            if whole is None:
                reader.start()
                whole = (reader.offsets, reader.note)
                continue
            with pytest.MonkeyPatch.context() as killing:
                Executioner(killing, passing - 1)
                try:
                    reader.start()
                except Killed:
                    killed = True
                else:
                    killed = False
            reader.start()
            skipped = {partition: text.rpartition(",")[2] for partition, text in reader.note["orders"].items()}
            assert (reader.offsets, {"orders": skipped}) == whole, passing
            if not killed:
                assert passing > 3
                return
    pytest.fail("it has no end")


@pytest.mark.parametrize(
    ("undone", "planned", "why"),
    [
        ([Undone(6, 12)], None, "it has read some of the undone records"),
        ([Undone(None, 12)], None, "where the undone records begin is no longer recorded"),
        ([Undone(10, 12)], {"0": 11, "1": 5}, "its next batch is planned, and reads undone records"),
    ],
)
def test_a_reader_that_cannot_skip_it_goes_on_and_says_so(
    reader: Reader, undone: list[Undone], planned: dict[str, int] | None, why: str
) -> None:
    if planned is not None:
        reader.plan(2, planned)
    reader.undone(p0=undone, p1=[])

    (message,) = reader.start()

    assert message.endswith(f"it continues to read, although {why}")
    assert reader.offsets[:2] == UNMOVED


@pytest.mark.parametrize(("begin", "batches"), [(8, []), (9, [2])])
def test_each_offset_of_a_source_that_is_read_twice_is_moved(reader: Reader, begin: int, batches: list[int]) -> None:
    reader.read_as(uses=2, names=("0", "1"))
    reader.undone(p0=[Undone(begin, 12)], p1=[])

    reader.start()

    assert reader.ran == batches
    assert reader.offsets[-1] == {"0": 12, "1": 5}
    assert all(len(each) == 2 and len(set(each)) == 1 for each in reader.entries)


def test_a_source_behind_one_that_is_read_twice_is_moved_and_the_other_stays(reader: Reader) -> None:
    reader.read_as("7", "7", uses=1, names=("2",))
    reader.undone(p0=[Undone(8, 12)], p1=[])

    (message,) = reader.start()

    assert message == f"source 1 continues behind what was undone in {SINK}"
    assert reader.offsets == [UNMOVED[0], {"0": 12, "1": 5}]
    assert [each[:2] for each in reader.entries] == [["7", "7"]] * 2
    assert (Path(reader.live.url) / "sources" / "1" / "dagster_ckpt_skipped").exists()


@pytest.mark.parametrize(("uses", "names"), [(2, ()), (2, ("0", "1", "2")), (3, ("0", "1"))])
def test_offsets_of_another_query_are_not_moved(reader: Reader, uses: int, names: tuple[str, ...]) -> None:
    reader.read_as(uses=uses, names=names)
    reader.undone(p0=[Undone(8, 12)], p1=[])
    before = reader.entries

    with pytest.raises(RestoreError, match=r"batch 1 has the offsets 0, 1.* each used as often; or start with accept_"):
        reader.start()
    (message,) = reader.start(accept_loss=True)

    assert "it continues to read, although batch 1 has the offsets" in message
    assert reader.entries == before


@pytest.mark.parametrize("sink", ["KafkaTable[broker:9092/orders]", SINK.replace("shop", "app")])
def test_nothing_is_skipped_where_another_stream_writes_too(reader: Reader, sink: str) -> None:
    reader.undone(p0=[Undone(8, 12)], p1=[])
    reader.edges = [EDGE, replace(EDGE, upstream="web", sink=sink, kind=EdgeKind.UNKNOWN)]
    assert [each.partition("although ")[2] for each in reader.start()] == ["web writes to the topic too"]
    assert reader.offsets == UNMOVED


def test_a_reader_waits_for_an_upstream_that_has_not_started_since_it_went_back(reader: Reader) -> None:
    reader.written = WrittenTopic({}, {}, frozenset({"old"}))
    reader.restored = TopicEnd({0: 8, 1: 5}, {})
    with pytest.raises(RestoreError, match="Start orders first"):
        reader.start()
    assert reader.start(accept_loss=True) == []
    # It has read what will be undone.
    reader.restored = TopicEnd({0: 7, 1: 5}, {})
    assert reader.start() == []


def test_a_process_that_never_could_ask_goes_on_and_says_so(reader: Reader) -> None:
    reader.written = StorageAccessError("confluent-kafka is not installed")
    (message,) = reader.start()
    assert "confluent-kafka is not installed" in message
    reader.could_ask = True
    with pytest.raises(StorageAccessError):
        reader.start()


def test_without_the_client_of_kafka_a_savepoint_and_a_start_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reader = Reader(tmp_path, monkeypatch)
    monkeypatch.setattr(undone_topics, "written_topic", written_topic)
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)

    (message,) = reader.start()

    assert "pip install 'dagster-ckpt[kafka]'" in message
    assert topic_ends([sink_of(SINK)], ["new"], "new", 1) == {}
