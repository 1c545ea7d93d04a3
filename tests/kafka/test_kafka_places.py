"""Other queries, prefixes and topics of a stream, against a real broker: what earlier starts wrote is known."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_broker import Kafka
from kafka_rows import committed_rows, new_topic
from share_program import Life, all_rows, share, transactions

from dagster_ckpt.errors import CkptError, RowsAtRiskError
from dagster_ckpt.sinks.kafka.claim import Past, claim
from dagster_ckpt.sinks.kafka.executor_write import write_share
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.sinks.sink import FoundSink, Replay, SinkEffect

pytestmark = [pytest.mark.kafka]


@pytest.fixture
def life(kafka: Kafka) -> Life:
    return Life(kafka.servers, new_topic(kafka.servers), "", writers=1)


def write(target: Transactions, *batches: int) -> None:
    for batch in batches:
        for writer in range(target.writers):
            write_share(target, writer, batch, share(batch, writer, target.writers))


def second(life: Life, **more: object) -> Transactions:
    return transactions(life, owner="second", epoch=Epoch(2, 2), **more)


def test_after_one_accepted_repeat_the_first_query_is_still_known(life: Life) -> None:
    first = transactions(life)
    claim(first, 0)
    write(first, 0, 1, 2)
    anew = second(life, query_id="query-2")
    claim(anew, 1)
    # Shares carry on what the claim has noted.
    write(anew, 1, 2)

    forecast = sink_of(f"ForeachBatchSink[kafka://{life.servers}/{life.topic}?id={life.topic}]").forecast(
        Replay(0, "query-1")
    )
    assert forecast.effect is SinkEffect.IRREVERSIBLE
    with pytest.raises(RowsAtRiskError, match="up to 2 of query query-1, and then some of query query-2"):
        claim(transactions(life, owner="third", epoch=Epoch(3, 3)), 1)


def test_markers_that_kafka_has_deleted_do_not_let_a_batch_be_written_again(life: Life) -> None:
    first = transactions(life)
    claim(first, 0)
    write(first, 0)
    # As the broker does with a group that commits nothing for offsets.retention.minutes.
    admin = AdminClient({"bootstrap.servers": life.servers})
    (deleted,) = admin.delete_consumer_groups([first.id_of(0)]).values()
    deleted.result(30)

    with pytest.raises(RowsAtRiskError, match="unknown whether the topic has batch 0"):
        claim(second(life), 0, Past(has_written=True))
    assert committed_rows(life.servers, life.topic) == all_rows(1)


@pytest.mark.thorough(but="topic")
@pytest.mark.parametrize("changed", ["prefix", "topic"])
def test_a_stream_that_writes_elsewhere_fences_its_predecessor_and_repeats_nothing(life: Life, changed: str) -> None:
    life = replace(life, writers=2)
    zombie = transactions(life)
    claim(zombie, 0)
    write(zombie, 0)
    # A part of the batch in flight.
    write_share(zombie, 0, 1, share(1, 0, 2))
    elsewhere = {"prefix": f"{life.topic}-renamed"} if changed == "prefix" else {"topic": new_topic(life.servers)}
    moved = second(life, **elsewhere)
    past = Past(((life.topic, life.topic),), has_written=True)
    claim(moved, 1, past)
    assert write_share(moved, 0, 1, share(1, 0, 2)).was_done

    # The first try of a share is fenced; Spark tries again.
    for _ in range(2):
        for writer in range(2):
            with suppress(CkptError):
                write_share(zombie, writer, 1, share(1, writer, 2))
    write_share(moved, 1, 1, share(1, 1, 2))

    seen = committed_rows(life.servers, life.topic)
    if changed == "topic":
        seen += committed_rows(life.servers, moved.topic)
    assert seen == all_rows(2)
    # Killed before the catalog knew of a batch: the former place, which is behind, is asked again.
    again = replace(moved, owner="third")
    claim(again, 1, past)
    assert all(write_share(again, writer, 1, share(1, writer, 2)).was_done for writer in range(2))


def test_two_deployments_with_the_same_ids_and_other_topics_do_not_fence_each_other(life: Life) -> None:
    mine = transactions(life)
    theirs = second(life, topic=new_topic(life.servers), deployment="other", query_id="query-9")
    for each in (mine, theirs):
        claim(each, 0)
    for batch in range(2):
        write(mine, batch)
        write(theirs, batch)

    assert committed_rows(life.servers, life.topic) == committed_rows(life.servers, theirs.topic) == all_rows(2)


def test_a_topic_that_was_deleted_and_made_again_has_another_id(life: Life) -> None:
    admin = AdminClient({"bootstrap.servers": life.servers})
    sink = sink_of(f"ForeachBatchSink[kafka://{life.servers}/{life.topic}?id={life.topic}]")

    before, again = sink.look(), sink.look()
    admin.delete_topics([life.topic])[life.topic].result()
    deadline = time.monotonic() + 60
    while (gone := sink.look()) != FoundSink(None) and time.monotonic() < deadline:
        time.sleep(0.1)
    # To look for a topic does not make it.
    assert gone == sink.look() == FoundSink(None)
    admin.create_topics([NewTopic(life.topic, 1, 1)])[life.topic].result()
    while (after := sink.look()) == FoundSink(None) and time.monotonic() < deadline:
        time.sleep(0.1)

    assert before == again != after
    assert None not in (before, after)
