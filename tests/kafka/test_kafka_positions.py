"""How far a stream has read the topic of another one, by batch, against a real broker."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition
from exactly_once_program import STREAM, Run, write_input
from kafka_broker import Kafka
from kafka_rows import DEADLINE_S, new_topic
from share_program import Life, share, transactions
from test_kafka_exactly_once import Copying
from test_kafka_transactions import start, wait_until_stopped

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.sinks.kafka.claim import Past, claim
from dagster_ckpt.sinks.kafka.executor_write import write_share
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.sink import TransactionalKafkaSink, topic_end, written_topic
from dagster_ckpt.sinks.kafka.transaction import Record
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.sinks.sink import ReadOfSink, Replay
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.thorough import either

pytestmark = [pytest.mark.kafka]

READ_COMMITTED = {"kafka.isolation.level": "read_committed"}
WRITERS = 2


class Topic:
    """A topic that a stream writes, batch by batch."""

    def __init__(self, servers: str, folder: Path) -> None:
        self.folder = folder
        self.life = Life(servers, new_topic(servers), "", writers=WRITERS)
        self.servers, self.name = servers, self.life.topic
        self.target: Transactions = transactions(self.life)
        sink = sink_of(f"ForeachBatchSink[kafka://{servers}/{self.name}?id={self.name}]")
        assert isinstance(sink, TransactionalKafkaSink)
        self.sink = sink
        # Batch and query of each record, by partition and offset.
        self.records: dict[tuple[int, int], tuple[str, int]] = {}

    def start(self, batch: int) -> None:
        """As a start of the query does, once."""
        claim(self.target, batch)

    def write(self, *batches: int) -> None:
        for batch in batches:
            for writer in range(WRITERS):
                write_share(self.target, writer, batch, share(batch, writer, WRITERS))
            for place in self._places():
                self.records.setdefault(place, (self.target.query_id, batch))

    def go_back(self, query: str) -> None:
        """As a start with a new query id does."""
        epoch = Epoch(self.target.epoch.token + 1, 1)
        self.target = replace(self.target, query_id=query, epoch=epoch, owner=query)

    def read_up_to(
        self, offsets: dict[int, int], *own: str, rewound: bool = False, options: dict[str, str] = READ_COMMITTED
    ) -> ReadOfSink | None:
        text = json.dumps({self.name: {str(partition): at for partition, at in offsets.items()}})
        return self.sink.read_up_to(text, own or ("query-1",), options, rewound=rewound)

    def newest(self, offsets: dict[int, int]) -> int | None:
        """By the records themselves."""
        seen = (batch for (partition, at), (_, batch) in self.records.items() if at < offsets[partition])
        return max(seen, default=None)

    def end(self) -> dict[int, int]:
        """Behind the last record of each partition."""
        ends = dict.fromkeys(range(3), 0)
        for partition, at in self.records:
            ends[partition] = max(ends[partition], at + 1)
        return ends

    def _places(self) -> Iterator[tuple[int, int]]:
        settings = {
            "bootstrap.servers": self.servers,
            "group.id": "a test",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
        consumer = Consumer(settings)
        try:
            consumer.assign([TopicPartition(self.name, partition, 0) for partition in range(3)])
            left = 3
            while left:
                message = consumer.poll(DEADLINE_S)
                assert message is not None
                error = message.error()
                if error is None:
                    yield message.partition() or 0, message.offset() or 0
                else:
                    assert error.code() == KafkaError._PARTITION_EOF, error
                    left -= 1
        finally:
            consumer.close()


@pytest.fixture
def topic(kafka: Kafka, tmp_path: Path) -> Topic:
    return Topic(kafka.servers, tmp_path)


def test_any_position_names_the_newest_batch_that_was_read(topic: Topic) -> None:
    chance = random.Random(3)
    for first in (0, 3):
        # The second start continues, and claims again.
        topic.start(first)
        topic.write(*range(first, first + 3))
        end = topic.end()
        assert topic.read_up_to(end) == ReadOfSink(first + 2)
        for _ in range(either(quick=10, thorough=100)):
            places = {partition: [at for each, at in topic.records if each == partition] for partition in end}
            offsets = {partition: chance.choice([0, *(at + 1 for at in places[partition])]) for partition in places}
            assert topic.read_up_to(offsets) == ReadOfSink(topic.newest(offsets)), offsets
        topic.target = replace(topic.target, owner=f"start {first}")
    assert topic.read_up_to({0: 0, 1: 0, 2: 0}) == ReadOfSink(None)


@pytest.mark.thorough
def test_share_that_was_aborted_and_repeated_moves_no_batch(topic: Topic) -> None:
    topic.start(0)
    topic.write(0)
    before = topic.end()

    def fails() -> Iterator[Record]:
        yield from share(1, 0, WRITERS)
        raise RuntimeError("the task ends")

    with suppress(RuntimeError):
        write_share(topic.target, 0, 1, fails())
    assert topic.read_up_to(before) == ReadOfSink(0)
    topic.write(1, 2)

    assert topic.read_up_to(before) == ReadOfSink(0)
    assert topic.read_up_to(topic.end()) == ReadOfSink(2)


@pytest.mark.thorough
def test_batches_that_a_new_query_wrote_again_are_undone(topic: Topic) -> None:
    topic.start(0)
    topic.write(0, 1, 2, 3)
    before = topic.end()
    topic.go_back("query-2")

    unwritten = topic.read_up_to(before, "query-1", "query-2", rewound=True)
    topic.start(2)
    topic.write(2)

    assert unwritten is not None
    assert "has written no batch since it went back" in unwritten.why
    assert topic.read_up_to(before, "query-1", "query-2", rewound=True) == ReadOfSink(1, undone=2)
    assert topic.read_up_to(topic.end(), "query-1", "query-2", rewound=True) == ReadOfSink(2, undone=2)


@pytest.mark.thorough
def test_position_is_not_taken_while_a_share_is_being_committed(topic: Topic) -> None:
    """Its records may be seen before its position is."""
    topic.start(0)
    topic.write(0)
    life = replace(topic.life, ledger=str(topic.folder / "ledger"), batches=2, owner="second", token=2)
    Path(life.ledger).write_text("0\n")
    # After two claims and the share of the first writer.
    stopped = start(replace(life, call="commit_transaction", nth=4, how="STOP"))
    try:
        wait_until_stopped(stopped.pid)
        with pytest.raises(StorageAccessError, match="did not return the offsets"):
            topic.read_up_to({0: 1, 1: 1, 2: 1})
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    assert stopped.wait(DEADLINE_S) == 0
    assert topic.read_up_to(dict.fromkeys(range(3), 1_000)) == ReadOfSink(1)


def test_source_that_reads_aborted_records_has_no_position(topic: Topic) -> None:
    topic.start(0)
    topic.write(0)
    found = topic.read_up_to(topic.end(), options={})
    assert found is not None
    assert "kafka.isolation.level is not read_committed" in found.why


def test_what_a_new_query_undoes_is_committed_with_its_claim(topic: Topic) -> None:
    topic.start(0)
    topic.write(0, 1)
    end = topic_end(topic.sink.topic, ["query-1"], "query-1", 1)
    topic.write(2, 3)
    assert end is not None
    # Also while later batches are there, as long as the markers know where the next one begins.
    assert topic_end(topic.sink.topic, ["query-1"], "query-1", 1) == end
    topic.go_back("query-2")

    claim(topic.target, 2, Past(restored=end))

    written = written_topic(topic.sink.topic, ["query-1", "query-2"], [0, 1, 2])
    undone = {
        place: of for place, of in topic.records.items() if any(each.has(place[1]) for each in written.undone[place[0]])
    }
    assert written.queries == {"query-2"}
    assert undone == {place: of for place, of in topic.records.items() if of[1] > 1}
    # A batch later, and after another start, it is still there.
    topic.write(2)
    topic.start(3)
    assert written_topic(topic.sink.topic, ["query-2"], [0, 1, 2]).undone == written.undone


def test_preview_names_the_consumers_that_see_rows_twice(topic: Topic) -> None:
    topic.start(0)
    topic.write(0, 1)
    settings = {"bootstrap.servers": topic.servers, "group.id": f"billing-{topic.name}", "enable.auto.commit": False}
    consumer = Consumer(settings)
    consumer.commit(offsets=[TopicPartition(topic.name, 1, 1)], asynchronous=False)
    consumer.close()

    forecast = topic.sink.forecast(Replay(0, "query-1", keeps_query_id=False))

    assert "Consumer groups that read it: " in forecast.reason
    assert f"billing-{topic.name}" in forecast.reason


@pytest.mark.spark
@pytest.mark.thorough
def test_set_of_streams_with_a_topic_between_them_is_proven(kafka: Kafka, tmp_path: Path) -> None:
    copying = Copying(tmp_path, kafka, 3)
    how = replace(copying.how, jars=",".join(map(str, kafka.jars)))
    second = replace(how, stream="second", source=how.topic, topic=new_topic(kafka.servers))

    def run(which: Run) -> None:
        copying.how = which
        assert copying.run() == 0, copying.said()

    def has_read_undone(reference: str) -> list[bool | None]:
        ahead = client.preview_rewind(STREAM, start_from=StartFrom(reference, new_query_id=True))
        return [reader.has_read_undone for reader in ahead.readers]

    run(how)
    run(second)
    with how.client() as client:
        [edge] = client.stream_edges()
        june = client.trigger_savepoint_set(f"{STREAM}+", label="june")
        [read] = june.savepoints["second"].properties["reads"]
        write_input(tmp_path / "input", 3, 5)
        run(how)
        lags = has_read_undone("june")
        july = client.trigger_savepoint_set(f"{STREAM}+", label="july")
        run(second)
        line = client.recovery_line(f"{STREAM}+")

        assert (edge.kind.value, edge.reader, edge.upstream) == ("TOPIC", "second", STREAM)
        assert (june.unproven, july.unproven, line.is_proven) == ((), (), True)
        assert read["batch"] == june.savepoints[STREAM].batch_id == 2
        assert (lags, has_read_undone("june")) == ([False], [True])
