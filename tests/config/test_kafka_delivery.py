import pickle

import pytest

from dagster_ckpt.config.modes import Semantic, kafka_delivery
from dagster_ckpt.config.validation import Effect
from dagster_ckpt.errors import OptionError, OptionTypeError


@pytest.mark.parametrize("semantic", [Semantic.AT_LEAST_ONCE, "AT_LEAST_ONCE"])
def test_at_least_once_waits_for_all_replicas_and_says_that_a_replayed_batch_is_written_again(
    semantic: Semantic | str,
) -> None:
    delivery = kafka_delivery(semantic)
    assert (delivery.semantic, delivery.effect) == (Semantic.AT_LEAST_ONCE, Effect.REAL)
    assert delivery.writer_options["kafka.acks"] == "all"
    assert "none is lost" in delivery.statement
    assert "written again" in delivery.statement


def test_exactly_once_gets_the_strongest_there_is_and_says_plainly_that_it_is_not_exactly_once() -> None:
    delivery = kafka_delivery(Semantic.EXACTLY_ONCE)
    assert delivery.effect is Effect.NONE
    assert delivery.writer_options == kafka_delivery(Semantic.AT_LEAST_ONCE).writer_options
    assert delivery.statement.startswith("Not exactly once: this is at least once.")
    assert "without transactions" in delivery.statement


def test_none_waits_for_nothing() -> None:
    delivery = kafka_delivery(Semantic.NONE)
    assert (delivery.effect, delivery.writer_options["kafka.acks"]) == (Effect.REAL, "0")


@pytest.mark.parametrize("semantic", list(Semantic))
def test_every_option_is_one_that_sparks_sink_hands_to_the_producer(semantic: Semantic) -> None:
    delivery = kafka_delivery(semantic)
    assert all(name.startswith("kafka.") for name in delivery.writer_options)
    assert not any("transaction" in name for name in delivery.writer_options)
    assert pickle.loads(pickle.dumps(delivery)) == delivery


def test_what_is_no_semantic_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"semantic is 'TWICE', but must be one of Semantic\.EXACTLY_ONCE"):
        kafka_delivery("TWICE")
    with pytest.raises(OptionTypeError, match="semantic is 0"):
        kafka_delivery(0)  # type: ignore[arg-type]
