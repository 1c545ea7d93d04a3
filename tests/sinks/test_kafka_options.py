"""The options of the transactional Kafka sink, and what a claim makes of the markers; no broker is asked."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from confluent_kafka import KafkaException

from dagster_ckpt.errors import LeaseLostError, OptionError, RowsAtRiskError
from dagster_ckpt.sinks.kafka import claim, transaction
from dagster_ckpt.sinks.kafka import sink as kafka_sink
from dagster_ckpt.sinks.kafka.claim import KEPT_FOR_MS, Past, past_of
from dagster_ckpt.sinks.kafka.marker import (
    MOST_EARLIER,
    Epoch,
    Marker,
    Position,
    Transactions,
    earlier_queries,
    fields_of,
    metadata_of,
    query_mark,
    refuse_others,
    with_position,
)
from dagster_ckpt.sinks.kafka.sink import may_hold_marker, topic_end
from dagster_ckpt.sinks.kafka.transaction import Session, client_properties
from dagster_ckpt.sinks.kafka.undone import TopicEnd
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.sinks.sink import FoundSink, Replay, SinkEffect
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import plan_digest
from dagster_ckpt.spark.query.output import KafkaPlace, kafka_place
from dagster_ckpt.stream.known_sinks import seen_sinks
from dagster_ckpt.values.modes import Semantic, kafka_delivery

OPTIONS = {
    **kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id="prod", writers=3).writer_options,
    "kafka.bootstrap.servers": "a:9092, b:9092",
    "topic": "alerts",
}


def test_a_query_with_the_options_of_exactly_once_names_its_topic() -> None:
    place = kafka_place(OPTIONS)

    assert place is not None
    assert str(place) == "kafka://a:9092,b:9092/alerts?id=prod"
    assert place.writers == 3
    assert place.client == {"bootstrap.servers": "a:9092, b:9092", "acks": "all", "enable.idempotence": "true"}
    parsed = KafkaPlace.parse(str(place))
    assert parsed is not None
    assert (parsed.servers, parsed.topic, parsed.prefix) == ("a:9092,b:9092", "alerts", "prod")
    assert parsed.client == place.client


def test_two_topics_on_the_same_servers_have_their_own_credentials() -> None:
    places = [kafka_place({**OPTIONS, "topic": topic, "kafka.sasl.username": topic}) for topic in ("a", "b")]

    parsed = [KafkaPlace.parse(str(place)) for place in places]

    assert [place.client["sasl.username"] for place in parsed if place is not None] == ["a", "b"]


@pytest.mark.parametrize("semantic", [Semantic.AT_LEAST_ONCE, Semantic.NONE])
def test_the_other_semantics_leave_sparks_sink(semantic: Semantic) -> None:
    assert kafka_place({**kafka_delivery(semantic).writer_options, "topic": "alerts"}) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topic": ""}, "needs the option topic"),
        ({"kafka.bootstrap.servers": ""}, "needs the option kafka.bootstrap.servers"),
        ({"kafka.transactional.id": "a/b"}, "kafka.transactional.id is 'a/b'"),
        ({"kafka.transaction.writers": "0"}, "kafka.transaction.writers is '0'"),
        ({"kafka.transaction.writers": "x"}, "kafka.transaction.writers is 'x'"),
    ],
)
def test_what_is_missing_or_wrong_is_named(changed: dict[str, str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kafka_place({**OPTIONS, **changed})


def test_secrets_of_the_client_are_in_no_name_and_no_repr() -> None:
    place = kafka_place({**OPTIONS, "kafka.sasl.password": "planted"})

    assert "planted" not in f"{place} {place!r}"
    assert "planted" not in repr(transactions(client={"sasl.password": "planted"}))


def test_names_of_the_java_client_are_translated() -> None:
    login = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="me" password="se;cret";'

    assert client_properties(
        {"bootstrap.servers": "a:9092", "sasl.jaas.config": login, "max.request.size": "5", "key.serializer": "x"}
    ) == {"bootstrap.servers": "a:9092", "sasl.username": "me", "sasl.password": "se;cret", "message.max.bytes": "5"}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("ssl.truststore.location", r"kafka\.ssl\.ca\.location"),
        ("sasl.jaas.config", r"kafka\.sasl\.username"),
    ],
)
def test_what_only_the_java_client_has_is_refused_with_its_counterpart(option: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        client_properties({option: "/etc/trust.jks"})


@pytest.mark.parametrize(("cluster", "known"), [("eu", "eu"), (None, None), (KafkaException(), None)])
def test_ids_of_a_topic_and_its_cluster_are_looked_up(
    cluster: object, known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Admin:
        def __init__(self, _: object) -> None: ...

        def describe_topics(self, *_: object, **__: object) -> dict[str, Future[Any]]:
            return {"alerts": answered(SimpleNamespace(topic_id="v1+a=="))}

        def describe_cluster(self, **_: object) -> Future[Any]:
            return answered(cluster if isinstance(cluster, Exception) else SimpleNamespace(cluster_id=cluster))

    def answered(answer: object) -> Future[Any]:
        found: Future[Any] = Future()
        if isinstance(answer, Exception):
            found.set_exception(answer)
        else:
            found.set_result(answer)
        return found

    monkeypatch.setattr("confluent_kafka.admin.AdminClient", Admin)
    sink = sink_of("ForeachBatchSink[kafka://a:9092/alerts?id=prod]")

    assert sink.look() == FoundSink("v1+a==", cluster=known)
    of_cluster = {"cluster": known} if known is not None else {}
    assert seen_sinks([sink], ()) == {sink.name: {"id": "v1+a==", "batch": None, **of_cluster}}


def test_one_topic_is_one_sink_by_whichever_brokers_it_is_reached() -> None:
    one, other, different = (
        sink_of(f"ForeachBatchSink[kafka://{servers}/{topic}?id=prod]")
        for servers, topic in (("a:1", "alerts"), ("b:1", "alerts"), ("a:1", "orders"))
    )

    assert one.is_same(other)
    assert not one.is_same(different)


def transactions(**known: Any) -> Transactions:
    default: dict[str, Any] = {
        "client": {},
        "topic": "alerts",
        "prefix": "prod",
        "writers": 2,
        "deployment": "ours",
        "stream": "orders",
        "query_id": "query-1",
        "epoch": Epoch(5, 2),
        "owner": "second",
    }
    return Transactions(**default | known)


def marker(batch: int, **known: Any) -> Marker:
    default: dict[str, Any] = {
        "query": "query-1",
        "deployment": "ours",
        "stream": "orders",
        "token": 4,
        "generation": 1,
        "owner": "first",
        "writers": 2,
    }
    return Marker(batch, **default | known)


@pytest.mark.parametrize(
    ("says", "writers", "found", "position"),
    [
        ("the first start", 2, [None, None], 6),
        ("the batch before is complete", 2, [marker(6), marker(6)], 6),
        ("the batch is complete", 2, [marker(7), marker(7)], 7),
        ("a part of the batch is written", 2, [marker(7), marker(6)], None),
        ("another query of the stream wrote before", 2, [marker(90, query="query-0")] * 2, 6),
        ("more writers, after a whole batch", 3, [marker(6), marker(6), None], 6),
        ("more writers, and the batch is complete", 3, [marker(7), marker(7), None], 7),
        ("fewer writers, and the batch is complete", 1, [marker(7), marker(7)], 7),
        ("a claim was interrupted", 2, [marker(6, owner="another"), marker(6)], 6),
        ("the query went on without the sink", 2, [marker(3), marker(3)], 6),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_the_markers_stand_when_the_query_continues_with_batch_7(
    says: str, writers: int, found: list[Marker | None], position: int | None
) -> None:
    assert claim._position(transactions(writers=writers), found, 7) == position, says


@pytest.mark.parametrize(
    ("writers", "found", "message"),
    [
        (2, [marker(8), marker(7)], "has batches up to 8 of query query-1"),
        (3, [marker(7), marker(6), None], r"Writers \[0\] .* start it once with the same number"),
        (1, [marker(6), marker(7)], r"Writers \[1\] .* start it once with the same number"),
        (2, [marker(7), None], "offsets.retention.minutes"),
        (2, [marker(7, entry="another"), marker(6)], "planned differently .* may have other rows"),
    ],
)
def test_what_cannot_be_continued_is_refused(writers: int, found: list[Marker | None], message: str) -> None:
    with pytest.raises(RowsAtRiskError, match=message):
        claim._position(transactions(writers=writers), found, 7)


@pytest.mark.parametrize(
    ("writers", "found", "lost"),
    [
        (2, [None, None], "0, 1"),
        (1, [None], "0"),
        (2, [marker(6), None], "1"),
        (1, [marker(6, writers=3), None, marker(6, writers=3)], "1"),
        (2, [marker(6, query="query-0")] * 2, "0, 1"),
    ],
)
def test_markers_that_a_query_must_have_and_kafka_has_deleted_are_not_those_of_a_new_sink(
    writers: int, found: list[Marker | None], lost: str
) -> None:
    with pytest.raises(RowsAtRiskError, match=rf"writers \[{lost}\] .* whether the topic has batch 7.*retention"):
        claim._position(transactions(writers=writers), found, 7, must_exist=True)


@pytest.mark.parametrize(
    ("says", "writers", "found"),
    [
        ("to more", 4, [marker(6), marker(6), None, marker(6, writers=4)]),
        ("to more, and then back", 2, [marker(6), marker(6), None, marker(6, writers=4)]),
        ("to fewer", 2, [marker(6, writers=3), marker(6, writers=3), marker(6)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_claim_with_another_number_of_writers_that_died_has_lost_no_marker(
    says: str, writers: int, found: list[Marker | None]
) -> None:
    assert claim._position(transactions(writers=writers), found, 7, must_exist=True) == 6, says


def test_a_query_that_was_left_for_another_is_never_continued() -> None:
    # The new one may have written the same rows in fewer batches.
    left = marker(6, query="query-2", earlier={"query-1": 9})
    with pytest.raises(RowsAtRiskError, match=r"up to 9 of query query-1, .* of query query-2.*new_query_id"):
        claim._refuse_a_left_query(transactions(), [marker(6), left])
    claim._refuse_a_left_query(transactions(query_id="query-2"), [marker(6), left])
    claim._refuse_a_left_query(transactions(query_id="query-3"), [marker(6), left])


def test_a_marker_keeps_the_newest_earlier_queries_and_fits_into_an_offset() -> None:
    kept = marker(7, deployment="d" * 40, stream="s" * 128, owner="o" * 32, entry="e" * 16)
    for number in range(50):
        query_id = f"{number:036}"
        kept = replace(kept, query=query_id, earlier=earlier_queries([kept, kept], query_id))

    assert list(kept.earlier) == [f"{number:036}" for number in range(49 - MOST_EARLIER, 49)]
    assert Marker.of("group", 8, kept.as_metadata()) == kept
    assert len(kept.as_metadata()) < 4096


def test_an_earlier_query_has_its_newest_batch_of_any_writer() -> None:
    found = [marker(7, query="query-2", earlier={"query-0": 3, "query-1": 9}), marker(8, query="query-1")]

    assert earlier_queries(found, "query-2") == {"query-0": 3, "query-1": 9}
    assert earlier_queries(found, "query-3") == {"query-0": 3, "query-1": 9, "query-2": 7}


HERE = "ForeachBatchSink[kafka://a:1/alerts?id=prod]"
THERE = "ForeachBatchSink[kafka://a:1/alerts?id=test]"
LIVE, OTHER_LIVE = "live", "other"


NOW_MS = 10 + KEPT_FOR_MS


def execution(
    sink: str, batch: int | None, live: str = LIVE, query: str = "query-1", at_ms: int = 10
) -> dict[str, Any]:
    return {"live": live, "at_ms": at_ms, "progress": {"sinks": [sink], "batch_id": batch, "query_id": query}}


@pytest.mark.parametrize(
    ("says", "executions", "planned", "past"),
    [
        ("never started", [], 7, Past(is_new=True)),
        ("not yet at its first batch", [execution(HERE, None)], 7, Past(is_new=True)),
        ("ended between two batches", [execution(HERE, None), execution(HERE, 6)], 6, Past()),
        ("which was long ago", [execution(HERE, None), execution(HERE, 6, at_ms=9)], 6, Past(may_lack_markers=True)),
        ("killed within a batch", [execution(HERE, None), execution(HERE, 6)], 7, Past(has_written=True)),
        ("goes on in another directory", [execution(HERE, 8, OTHER_LIVE)], 6, Past(has_written=True)),
        ("with a new query id", [execution(HERE, 8, OTHER_LIVE, "query-0")], 6, Past(is_new=True)),
        ("renamed", [execution(HERE, None), execution(THERE, 6)], 7, Past((("alerts", "test"),), has_written=True)),
        (
            "renamed, and no batch yet",
            [execution(HERE, None), execution(THERE, None)],
            6,
            Past((("alerts", "test"),), is_new=True),
        ),
        ("renamed long ago", [execution(HERE, 6), execution(THERE, 5)], 6, Past()),
        ("wrote files before", [execution("FileSink[/out]", 6)], 7, Past(is_new=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_catalog_knows_of_a_query(
    says: str, executions: list[dict[str, Any]], planned: int, past: Past, tmp_path: Path
) -> None:
    for name in (f"offsets/{planned}", "offsets/6", "commits/6"):
        (tmp_path / LIVE / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / LIVE / name).write_text("v1\n{}")
    (tmp_path / LIVE / "metadata").write_text('{"id":"query-1"}')
    known = [
        SimpleNamespace(
            live_directory=str(tmp_path / each["live"]), progress=each["progress"], heartbeat_at_ms=each["at_ms"]
        )
        for each in executions
    ]
    place = kafka_place({**OPTIONS, "kafka.bootstrap.servers": "b:1"})
    assert place is not None

    assert past_of(place, cast("Any", known), LiveDirectory(str(tmp_path / LIVE)), now_ms=NOW_MS) == past, says


def test_an_execution_of_an_unknown_query_is_none_of_a_query_that_begins(tmp_path: Path) -> None:
    # As a rebuild of the catalog notes it; a live directory before its first start has no query id either.
    progress = {"sinks": [HERE], "batch_id": 6}
    rebuilt = SimpleNamespace(live_directory="lost", progress=progress, heartbeat_at_ms=0)
    place = kafka_place({**OPTIONS, "kafka.bootstrap.servers": "b:1"})
    assert place is not None

    assert past_of(place, cast("Any", [rebuilt]), LiveDirectory(str(tmp_path / LIVE)), now_ms=NOW_MS) == Past(
        is_new=True
    )


def test_partitions_that_were_added_get_positions_with_the_next_share(monkeypatch: pytest.MonkeyPatch) -> None:
    partitions = {0: None}

    def list_topics(topic: str, _timeout: float) -> SimpleNamespace:
        return SimpleNamespace(topics={topic: SimpleNamespace(partitions=dict(partitions))})

    producer = SimpleNamespace(list_topics=list_topics, begin_transaction=lambda: None, produce=None)
    monkeypatch.setattr(transaction, "_producer", lambda *_: producer)
    monkeypatch.setattr(transaction, "_marker_consumer", lambda *_: None)
    monkeypatch.setattr(transaction, "kafka_errors", lambda: ConnectionError)
    monkeypatch.setattr(Session, "ends", lambda self: dict.fromkeys(range(self._partitions()), 7))
    session = Session(transactions(), 0)

    session.send([])
    before = dict(session._begins)
    partitions[1] = None
    session.send([])

    assert (before, session._begins) == ({0: 7}, {0: 7, 1: 7})


def positions(*begins: tuple[int, int]) -> str:
    text = ""
    for batch, offset in begins:
        text = with_position(text, Position(batch, offset, (4, 1), query_mark("query-1")), 2)
    return text


@pytest.mark.parametrize(
    ("recorded", "ends", "end"),
    [
        ([positions((5, 50), (6, 60)), positions((5, 5), (6, 10))], {0: 70, 1: 20}, {0: 60, 1: 10}),
        # Where batch 6 begins there is not known.
        ([positions((5, 50), (6, 60)), ""], {0: 70, 1: 20}, None),
        ([positions((5, 50), (6, 60)), ""], {0: 70, 1: 0}, {0: 60, 1: 0}),
        # A new query that has written nothing yet.
        (["", ""], {0: 70, 1: 20}, {0: 70, 1: 20}),
    ],
    ids=["recorded", "added while the query ran", "added and empty", "nothing written"],
)
def test_the_end_of_a_batch_is_known_in_each_partition_or_not_at_all(
    recorded: list[str], ends: dict[int, int], end: dict[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = kafka_place({**OPTIONS, "kafka.bootstrap.servers": "b:1"})
    assert place is not None
    first = SimpleNamespace(offset=7, metadata=marker(6, positions=recorded[0]).as_metadata())
    commits = {0: first, 1: SimpleNamespace(offset=1, metadata=metadata_of(recorded[1], ""))}
    monkeypatch.setattr(kafka_sink, "_stable_ends", lambda _: ends)
    monkeypatch.setattr(kafka_sink, "_commits", lambda *_, **__: {transactions().id_of(0): commits})

    found = topic_end(place, ["query-1"], "query-1", 5)

    assert found == (None if end is None else TopicEnd(end, {0: [], 1: []}))


def test_a_plan_is_told_from_another_of_its_number_by_its_times_and_offsets() -> None:
    def digest(time_ms: int, partitions: int, offset: str) -> str:
        metadata = {
            "batchWatermarkMs": 0,
            "batchTimestampMs": time_ms,
            "conf": {"spark.sql.shuffle.partitions": str(partitions)},
        }
        return plan_digest(f"v1\n{json.dumps(metadata)}\n{offset}".encode(), "offsets/7")

    assert digest(1, 4, '{"logOffset":2}') == digest(1, 8, '{"logOffset":2}')
    assert len({digest(1, 4, '{"logOffset":2}'), digest(2, 4, '{"logOffset":2}'), digest(1, 4, '{"logOffset":3}')}) == 3


@pytest.mark.parametrize(
    ("glance", "is_believed"),
    [
        (None, False),
        (marker(6), False),
        (marker(5, owner="second"), False),
        (marker(6, owner="second"), True),
        (marker(7, owner="second"), True),
        (marker(6, token=6), True),
    ],
    ids=["none yet", "of the run before", "of two batches before", "of the batch before", "done", "of a later run"],
)
def test_a_glance_that_may_be_older_than_the_claim_is_not_believed(
    glance: Marker | None, is_believed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {"read_uncommitted": glance, "read_committed": marker(6, owner="second")}
    monkeypatch.setattr(transaction, "_looked_up", lambda target, writer, isolation: answers[isolation])

    found = transaction.marker_before_share(transactions(), 0, 7)
    assert found == answers["read_uncommitted" if is_believed else "read_committed"]


@pytest.mark.parametrize(
    ("query", "keeps_query_id", "effect"),
    [
        ("query-1", True, SinkEffect.IRREVERSIBLE),
        ("query-1", False, SinkEffect.DUPLICATE),
        ("query-2", True, SinkEffect.EXACT),
        ("query-3", True, SinkEffect.UNKNOWN),
    ],
)
def test_the_forecast_of_a_topic_knows_the_queries_before(
    query: str, keeps_query_id: bool, effect: SinkEffect, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [marker(6, query="query-2", earlier={"query-1": 5})] * 2
    monkeypatch.setattr(kafka_sink, "markers_in_kafka", lambda _: found)
    monkeypatch.setattr(kafka_sink, "consumer_groups", lambda _: [])
    sink = sink_of(HERE)

    assert sink.forecast(Replay(8, query, keeps_query_id=keeps_query_id)).effect is effect
    assert [sink.last_batch(each) for each in ("query-1", "query-2", "query-3")] == [5, 6, None]


def test_only_the_groups_of_the_sink_are_asked_for_markers() -> None:
    place = KafkaPlace.parse("kafka://a:1/alerts?id=prod")
    assert place is not None

    assert may_hold_marker(place, transactions().id_of(11))
    assert may_hold_marker(place, transactions(stream="eu.orders").id_of(0))
    for group in ("prod.dashboards", "prod.orders:alerts-staging:0", "prod.orders:alerts:x", "prod.:alerts:0"):
        assert not may_hold_marker(place, group)
    assert fields_of("") is None


def test_whose_marker_may_be_claimed() -> None:
    target = transactions()

    refuse_others(target, 0, None)
    refuse_others(target, 0, marker(6))
    # A catalog that was lost and rebuilt is another deployment; the query is the same.
    refuse_others(target, 0, marker(6, deployment="before"))
    with pytest.raises(LeaseLostError, match="belongs to a later run"):
        refuse_others(target, 0, marker(6, token=6))
    with pytest.raises(LeaseLostError, match=r"later run.* live-3-5, .* live-2-5\..* prod.orders:alerts:\*"):
        refuse_others(target, 0, marker(6, token=5, generation=3))
    # It counts from 1 again.
    refuse_others(target, 0, marker(6, deployment="before", token=40))
    with pytest.raises(OptionError, match="belong to deployment theirs"):
        refuse_others(target, 0, marker(6, deployment="theirs", query="query-9"))
    # Prefix "prod.eu" with stream "orders" has the ids of prefix "prod" with stream "eu.orders".
    with pytest.raises(OptionError, match=r"belong to deployment ours, stream 'eu\.orders', and this is"):
        refuse_others(transactions(prefix="prod.eu"), 0, marker(6, stream="eu.orders", query="query-9"))


def test_a_group_of_another_application_is_not_taken_for_a_marker() -> None:
    kept = marker(6)

    assert Marker.of("prod.orders:alerts:0", 7, kept.as_metadata()) == kept
    assert Marker.of("prod.orders:alerts:0", -1001, None) is None
    for metadata in (None, "", "{}", "[1]", '{"query": "q"}', '{"format": 2, "query": "q"}'):
        with pytest.raises(OptionError, match=r"which this sink did not write"):
            Marker.of("prod.orders:alerts:0", 7, metadata)
    with pytest.raises(OptionError, match=r"has format 3, and this version .* reads format 2.*new_query_id"):
        Marker.of("prod.orders:alerts:0", 7, '{"format": 3}')
