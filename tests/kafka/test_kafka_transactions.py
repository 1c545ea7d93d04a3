"""The protocol of the transactional sink against a real broker: whatever is killed, each row is seen once.

No Spark here: `share_program.py` plays driver and executors. Runs of a real query are in `test_kafka_exactly_once.py`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kafka_broker import Kafka
from kafka_rows import committed_rows, new_topic
from share_program import Life, all_rows, share, transactions

from dagster_ckpt.errors import CkptError, LeaseLostError, OptionError, RowsAtRiskError, StorageAccessError
from dagster_ckpt.sinks.kafka.claim import claim
from dagster_ckpt.sinks.kafka.executor_write import write_share
from dagster_ckpt.sinks.kafka.marker import Epoch, Transactions
from dagster_ckpt.sinks.kafka.transaction import Record, Session
from dagster_ckpt.sinks.registry import sink_of
from dagster_ckpt.sinks.sink import Replay, SinkEffect

pytestmark = [pytest.mark.kafka]

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
# A life of two writers and three batches claims twice (calls 1 and 2) and writes six shares (calls 3 to 8).
CALLS = {
    "init_transactions": (1, 2, 3, 4),
    "begin_transaction": (1, 2, 3, 6),
    "produce": (1, 5, 10),
    "send_offsets_to_transaction": (1, 2, 3, 6),
    "commit_transaction": (1, 2, 3, 4, 5, 6),
}
DEATHS = [(call, when, nth) for call, numbers in CALLS.items() for when in ("before", "after") for nth in numbers]
# Where outcomes differ: between the two claims, within a share, between rows and marker, and around the commit.
IN_THE_MAIN_SUITE = [
    ("commit_transaction", "before", 2),
    ("produce", "after", 5),
    ("send_offsets_to_transaction", "after", 6),
    ("commit_transaction", "before", 5),
    ("commit_transaction", "after", 5),
]


@pytest.fixture
def life(kafka: Kafka, tmp_path: Path) -> Life:
    return Life(kafka.servers, new_topic(kafka.servers), str(tmp_path / "ledger"))


def start(life: Life) -> subprocess.Popen[bytes]:
    code = str(Path(__file__).with_name("share_program.py"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, code, life.as_argument()], env=environment, stderr=subprocess.PIPE)


def run(life: Life) -> tuple[int, str]:
    process = start(life)
    _, said = process.communicate(timeout=DEADLINE_S)
    return process.returncode, said.decode()


def assert_each_row_once(life: Life) -> None:
    assert committed_rows(life.servers, life.topic) == all_rows(life.batches)


def dies_and_is_followed(life: Life, call: str, when: str, nth: int) -> None:
    code, said = run(replace(life, call=call, when=when, nth=nth))
    assert code == -signal.SIGKILL, said
    code, said = run(replace(life, owner="second"))
    assert code == 0, said
    assert_each_row_once(life)


@pytest.mark.thorough(but="commit_transaction-before-2")
@pytest.mark.parametrize(("call", "when", "nth"), IN_THE_MAIN_SUITE, ids=str)
def test_a_process_killed_within_the_protocol_leaves_each_row_once(life: Life, call: str, when: str, nth: int) -> None:
    dies_and_is_followed(life, call, when, nth)


@pytest.mark.kafka_matrix
@pytest.mark.parametrize(("call", "when", "nth"), DEATHS, ids=str)
def test_a_process_killed_at_every_step_leaves_each_row_once(life: Life, call: str, when: str, nth: int) -> None:
    dies_and_is_followed(life, call, when, nth)


@pytest.mark.kafka_matrix
@pytest.mark.parametrize(("call", "when", "nth"), DEATHS[::3], ids=str)
def test_two_deaths_in_a_row_leave_each_row_once(life: Life, call: str, when: str, nth: int) -> None:
    assert run(replace(life, call=call, when=when, nth=nth))[0] == -signal.SIGKILL
    code, said = run(replace(life, owner="second", call="commit_transaction", when="after", nth=3))
    assert code in (0, -signal.SIGKILL), said
    code, said = run(replace(life, owner="third"))
    assert code == 0, said
    assert_each_row_once(life)


@pytest.mark.thorough(but="open transaction")
@pytest.mark.parametrize(
    ("call", "nth"), [("commit_transaction", 5), ("init_transactions", 3)], ids=["open transaction", "not yet begun"]
)
def test_a_zombie_that_wakes_after_its_successor_began_writes_nothing(life: Life, call: str, nth: int) -> None:
    zombie = start(replace(life, call=call, nth=nth, how="STOP"))
    try:
        wait_until_stopped(zombie.pid)
        code, said = run(replace(life, owner="second", token=2))
        assert code == 0, said
        os.kill(zombie.pid, signal.SIGCONT)
        _, said = (text.decode() if text else "" for text in zombie.communicate(timeout=DEADLINE_S))
    finally:
        zombie.kill()
        zombie.wait()
    assert zombie.returncode == 1
    assert "later run" in said
    assert_each_row_once(life)


def wait_until_stopped(pid: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_zombie_that_starts_its_query_late_cannot_claim_the_topic(life: Life) -> None:
    claim(transactions(life, epoch=Epoch(2, 1), owner="second"), 0)

    with pytest.raises(LeaseLostError, match="belongs to a later run of stream 'orders'"):
        claim(transactions(life), 0)


@pytest.mark.thorough
def test_the_successor_goes_on_while_the_zombie_is_refused(life: Life) -> None:
    zombie, successor = transactions(life), transactions(life, epoch=Epoch(2, 1), owner="second")
    claim(zombie, 0)
    write_all(zombie, 0)
    claim(successor, 1)
    write_share(successor, 0, 1, share(1, 0, 2))

    for writer in range(2):
        with pytest.raises(CkptError, match="later run"):
            write_share(zombie, writer, 1, share(1, writer, 2))

    write_share(successor, 1, 1, share(1, 1, 2))
    assert_each_row_once(replace(life, batches=2))


def write_all(target: Transactions, batch: int) -> None:
    for writer in range(target.writers):
        write_share(target, writer, batch, share(batch, writer, target.writers))


def test_a_share_that_is_run_again_writes_nothing(life: Life) -> None:
    target = transactions(life)
    claim(target, 0)
    write_all(target, 0)

    again = [write_share(target, writer, 0, share(0, writer, 2)) for writer in range(2)]

    assert [(each.records, each.was_done) for each in again] == [(0, True), (0, True)]
    assert_each_row_once(replace(life, batches=1))


def test_a_transaction_that_times_out_is_aborted_and_written_again(life: Life) -> None:
    client = {"bootstrap.servers": life.servers, "transaction.timeout.ms": "1000", "message.timeout.ms": "1000"}
    target = transactions(life, client=client, writers=1)
    claim(target, 0)

    def slow() -> Iterator[Record]:
        yield from share(0, 0, 1)
        # Longer than the transaction may last, and than the broker takes to look.
        time.sleep(4)

    with pytest.raises(StorageAccessError, match="aborted"):
        write_share(target, 0, 0, slow())
    assert not committed_rows(life.servers, life.topic)

    write_share(target, 0, 0, share(0, 0, 1))
    assert_each_row_once(replace(life, batches=1))


@pytest.mark.kafka_matrix
def test_a_broker_killed_within_a_transaction_loses_and_repeats_nothing(kafka: Kafka, life: Life) -> None:
    target = transactions(life, writers=1)
    claim(target, 0)
    write_share(target, 0, 0, share(0, 0, 1))

    def interrupted() -> Iterator[Record]:
        rows = list(share(1, 0, 1))
        yield from rows[:3]
        kafka.kill()
        yield from rows[3:]
        kafka.start()

    try:
        write_share(target, 0, 1, interrupted())
    except StorageAccessError:
        # The producer may find its transaction aborted. Spark runs the task again.
        write_share(target, 0, 1, share(1, 0, 1))
    write_share(target, 0, 2, share(2, 0, 1))
    assert_each_row_once(life)


def test_a_query_that_went_back_is_refused_until_the_rows_may_come_twice(life: Life) -> None:
    target = transactions(life)
    claim(target, 0)
    for batch in range(3):
        write_all(target, batch)

    with pytest.raises(RowsAtRiskError, match=r"has batches up to 2 of query query-1.*new_query_id"):
        claim(transactions(life, owner="second"), 1)

    anew = transactions(life, owner="second", query_id="query-2", epoch=Epoch(2, 2))
    claim(anew, 1)
    write_all(anew, 1)
    seen = committed_rows(life.servers, life.topic)
    assert {row for row, times in seen.items() if times == 2} == {f"row-{number}" for number in range(6, 12)}


@pytest.mark.thorough(but="fewer")
@pytest.mark.parametrize("others", [1, 3], ids=["fewer", "more"])
def test_another_number_of_writers_is_taken_between_batches_and_refused_within_one(life: Life, others: int) -> None:
    target = transactions(life)
    claim(target, 0)
    write_all(target, 0)
    write_share(target, 0, 1, share(1, 0, 2))

    with pytest.raises(RowsAtRiskError, match=r"Writers \[0\] .* start it once with the same number"):
        claim(transactions(life, owner="second", writers=others), 1)

    as_before = transactions(life, owner="as before")
    claim(as_before, 1)
    write_all(as_before, 1)
    changed = transactions(life, owner="third", writers=others)
    claim(changed, 1)
    assert all(write_share(changed, writer, 1, share(1, writer, others)).was_done for writer in range(others))
    write_all(changed, 2)
    assert_each_row_once(life)


@pytest.mark.thorough(but="2-2-4")
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("commits", [1, 2, 3])
def test_a_claim_with_another_number_of_writers_that_dies_repeats_no_row(
    life: Life, before: int, after: int, commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = transactions(life, writers=before)
    claim(target, 0)
    for batch in range(2):
        write_all(target, batch)
    commit = Session.commit
    done: list[int] = []

    def dies(session: Session, batch: int, entry: str, **undone: Any) -> None:
        if len(done) == commits:
            raise KeyboardInterrupt
        commit(session, batch, entry, **undone)
        done.append(batch)

    with monkeypatch.context() as patched:
        patched.setattr(Session, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            claim(transactions(life, owner="second", writers=after), 1)

    # Spark had not noted batch 1 as written, so it comes again.
    for owner, writers in (("third", after), ("fourth", before)):
        again = transactions(life, owner=owner, writers=writers)
        claim(again, 1)
        assert all(write_share(again, writer, 1, share(1, writer, writers)).was_done for writer in range(writers))
    write_all(again, 2)
    assert_each_row_once(life)


def test_a_record_as_large_as_the_java_client_sends_is_written(life: Life) -> None:
    target = transactions(life, writers=1)
    claim(target, 0)
    value = b"x" * 1_040_000

    write_share(target, 0, 0, [Record(value)])

    assert committed_rows(life.servers, life.topic) == {value.decode(): 1}


def test_a_topic_that_does_not_exist_yet_is_created_by_the_cluster_as_for_any_producer(life: Life) -> None:
    target = transactions(life, topic=f"{life.topic}-new")
    claim(target, 0)
    write_all(target, 0)

    assert committed_rows(life.servers, target.topic) == all_rows(1)


def test_two_deployments_with_the_same_ids_are_told_apart(life: Life) -> None:
    claim(transactions(life), 0)

    with pytest.raises(OptionError, match=r"belong to deployment tests.*kafka.transactional.id"):
        claim(transactions(life, deployment="other", query_id="query-2"), 0)


def test_the_marker_can_be_read_with_kafkas_own_tools(life: Life) -> None:
    from confluent_kafka import Consumer, TopicPartition

    target = transactions(life, writers=1)
    claim(target, 0)
    write_share(target, 0, 0, share(0, 0, 1))

    consumer = Consumer({"bootstrap.servers": life.servers, "group.id": f"{life.topic}.orders:{life.topic}:0"})
    (found,) = consumer.committed([TopicPartition(life.topic, 0)], timeout=10)
    consumer.close()
    assert found.offset == 1
    assert json.loads(found.metadata or "")["query"] == "query-1"


def test_the_forecast_asks_the_topic(life: Life) -> None:
    target = transactions(life)
    claim(target, 0)
    for batch in range(3):
        write_all(target, batch)
    sink = sink_of(f"ForeachBatchSink[kafka://{life.servers}/{life.topic}?id={life.topic}]")

    def effect(to_batch: int, query: str = "query-1", **more: object) -> SinkEffect:
        return sink.forecast(Replay(to_batch, query, **more)).effect  # type: ignore[arg-type]

    assert effect(2) is SinkEffect.EXACT
    assert effect(1, in_flight=2) is SinkEffect.SKIP
    assert effect(1) is SinkEffect.IRREVERSIBLE
    assert effect(0, in_flight=1) is SinkEffect.IRREVERSIBLE
    assert effect(0, keeps_query_id=False) is SinkEffect.DUPLICATE
    assert effect(0, query="another") is SinkEffect.UNKNOWN


def test_a_broker_that_is_away_is_told_from_one_without_batches() -> None:
    told = sink_of("ForeachBatchSink[kafka://127.0.0.1:1/orders?id=x]").forecast(Replay(0, "query-1"))

    assert told.effect is SinkEffect.UNREACHABLE
    assert "127.0.0.1:1" in told.reason


@pytest.mark.kafka_matrix
def test_a_soak_of_random_deaths_loses_and_repeats_nothing(
    kafka: Kafka, life: Life, record_property: Callable[[str, object], None]
) -> None:
    minutes, seed = float(os.environ.get("KAFKA_SOAK_MINUTES", "3")), random.randrange(2**32)
    draw, outcomes = random.Random(seed), Counter[str]()
    print(f"\nsoak of {minutes} minutes, seed {seed}, topic {life.topic}")
    deadline = time.monotonic() + 60 * minutes
    number = 0
    while time.monotonic() < deadline:
        number += 1
        done = len(Path(life.ledger).read_text().splitlines()) if Path(life.ledger).exists() else 0
        dies = replace(
            life,
            batches=done + 4,
            owner=f"life-{number}",
            token=number,
            call=draw.choice(list(CALLS)),
            when=draw.choice(["before", "after"]),
            nth=draw.randint(1, 30 if number % 3 else 6),
        )
        process = start(dies)
        if number % 7 == 0:
            time.sleep(draw.uniform(0.2, 1.5))
            kafka.kill()
            kafka.start()
        process.communicate(timeout=DEADLINE_S)
        outcomes[{0: "ended", -signal.SIGKILL: "killed"}.get(process.returncode, "failed")] += 1
    done = len(Path(life.ledger).read_text().splitlines())
    code, said = run(replace(life, batches=done + 1, owner="last", token=number + 1))
    assert code == 0, said
    ends = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
    record_property("soak", f"{minutes:g} minutes, {number} lives ({ends}), {done + 1} batches, seed {seed}")
    assert_each_row_once(replace(life, batches=done + 1))
