import pickle
from typing import Any

import pytest

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.modes import Semantic, kafka_delivery
from dagster_ckpt.values.validation import Effect


@pytest.mark.parametrize("semantic", [Semantic.AT_LEAST_ONCE, "AT_LEAST_ONCE"])
def test_at_least_once_waits_for_all_replicas_and_says_that_a_replayed_batch_is_written_again(
    semantic: Semantic | str,
) -> None:
    delivery = kafka_delivery(semantic)
    assert (delivery.semantic, delivery.effect) == (Semantic.AT_LEAST_ONCE, Effect.REAL)
    assert delivery.writer_options["kafka.acks"] == "all"
    assert "none is lost" in delivery.statement
    assert "written again" in delivery.statement


def test_exactly_once_is_real_and_names_its_conditions() -> None:
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE, transactional_id="eu", writers=4)
    assert delivery.effect is Effect.REAL
    assert delivery.writer_options.items() >= kafka_delivery(Semantic.AT_LEAST_ONCE).writer_options.items()
    # Spark's own sink fails with this option, so a query that is started without dagster_ckpt does not write.
    assert delivery.writer_options["kafka.transactional.id"] == "eu"
    assert delivery.writer_options["kafka.transaction.writers"] == "4"
    assert "read_committed" in delivery.statement
    assert "Conditions:" in delivery.statement


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transactional_id": "a b"}, "transactional_id is 'a b'"),
        ({"transactional_id": ""}, "transactional_id is ''"),
        ({"writers": 0}, "writers is 0"),
        ({"writers": 1001}, "writers is 1001"),
    ],
)
def test_ids_and_number_of_writers_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        kafka_delivery(Semantic.EXACTLY_ONCE, **options)


def test_none_waits_for_nothing() -> None:
    delivery = kafka_delivery(Semantic.NONE)
    assert (delivery.effect, delivery.writer_options["kafka.acks"]) == (Effect.REAL, "0")


@pytest.mark.parametrize("semantic", list(Semantic))
def test_every_option_is_one_that_sparks_sink_hands_to_the_producer(semantic: Semantic) -> None:
    delivery = kafka_delivery(semantic)
    assert all(name.startswith("kafka.") for name in delivery.writer_options)
    assert any("transaction" in name for name in delivery.writer_options) is (semantic is Semantic.EXACTLY_ONCE)
    assert pickle.loads(pickle.dumps(delivery)) == delivery


def test_what_is_no_semantic_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"semantic is 'TWICE', but must be one of Semantic\.EXACTLY_ONCE"):
        kafka_delivery("TWICE")
    with pytest.raises(OptionTypeError, match="semantic is 0"):
        kafka_delivery(0)  # type: ignore[arg-type]
