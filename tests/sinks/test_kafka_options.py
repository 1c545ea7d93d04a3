"""The options of the transactional Kafka sink, and what a claim makes of the markers; no broker is asked."""

from __future__ import annotations

from typing import Any

import pytest

from dagster_ckpt.config.modes import Semantic, kafka_delivery
from dagster_ckpt.errors import LeaseLostError, OptionError, RowsAtRiskError
from dagster_ckpt.sinks.kafka import claim
from dagster_ckpt.sinks.kafka.client import client_properties
from dagster_ckpt.sinks.kafka.marker import Epoch, Marker, Transactions, refuse_others
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.spark.query.kafka_output import KafkaPlace, kafka_place

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
    ],
)
def test_what_cannot_be_continued_is_refused(writers: int, found: list[Marker | None], message: str) -> None:
    with pytest.raises(RowsAtRiskError, match=message):
        claim._position(transactions(writers=writers), found, 7)


def test_whose_marker_may_be_claimed() -> None:
    target = transactions()

    refuse_others(target, 0, None)
    refuse_others(target, 0, marker(6))
    # A catalog that was lost and rebuilt is another deployment; the query is the same.
    refuse_others(target, 0, marker(6, deployment="before"))
    with pytest.raises(LeaseLostError, match="belongs to a later run"):
        refuse_others(target, 0, marker(6, token=6))
    with pytest.raises(LeaseLostError, match="belongs to a later run"):
        refuse_others(target, 0, marker(6, token=5, generation=3))
    with pytest.raises(OptionError, match="belong to deployment theirs"):
        refuse_others(target, 0, marker(6, deployment="theirs", query="query-9"))
    # Prefix "prod.eu" with stream "orders" has the ids of prefix "prod" with stream "eu.orders".
    with pytest.raises(OptionError, match=r"belong to deployment ours, stream 'eu\.orders', and this is"):
        refuse_others(transactions(prefix="prod.eu"), 0, marker(6, stream="eu.orders", query="query-9"))


def test_a_group_of_another_application_is_not_taken_for_a_marker() -> None:
    kept = marker(6)

    assert Marker.of("prod.orders.0", 7, kept.as_metadata()) == kept
    assert Marker.of("prod.orders.0", -1001, None) is None
    for metadata in (None, "", "{}", "[1]", '{"query": "q"}'):
        with pytest.raises(OptionError, match=r"which this sink did not write"):
            Marker.of("prod.orders.0", 7, metadata)
