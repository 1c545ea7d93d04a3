"""A stream whose upstream went back: from where its next start continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest

from dagster_ckpt.catalog.pending_restore import ToBatch, stored_pending
from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.client.preflight import planned_start, start_facts, start_preview
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.policies.retention import Latest, RetentionContext
from dagster_ckpt.recovery import prepare as prepare_module
from dagster_ckpt.recovery.checkpoint_retention import retained_by_policy, subsumption
from dagster_ckpt.recovery.facts import recovery_facts
from dagster_ckpt.recovery.fork import fork
from dagster_ckpt.recovery.plan import RecoveryPlan, Restore, Resume
from dagster_ckpt.recovery.planning import plan_recovery
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.replay import lost_batches
from dagster_ckpt.recovery.undone_reads import reads_at_start, with_undone_reads
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import RunRequest
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.planned_batches import fence
from dagster_ckpt.spark.query.sources import identities_of_record, keyed
from dagster_ckpt.stream.edges import reads_in
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import set_stream
from tests.support.places import path_of
from tests.support.played_query import PlayedQuery
from tests.support.stream_graph import Stage, listed
from tests.support.thorough import either


class Chain:
    """`daily` has read batches 0 to 2 of `orders` up to its savepoint `before`, and two more of them since."""

    def __init__(self, root: Path, *, seen: bool = True) -> None:
        self.orders = Stage(root, "orders")
        self.daily = Stage(root, "daily", self.orders)
        self.commit(1)
        self.daily.savepoint("first")
        self.commit(2)
        self.orders.savepoint("orders-2")
        self.daily.savepoint("before")
        self.commit(2)
        self.orders.savepoint("orders-4")
        self.daily.savepoint("after")
        self.started() if seen else None

    def commit(self, times: int) -> None:
        self.commit_orders(times)
        self.daily.commit()

    def commit_orders(self, times: int) -> None:
        for _ in range(times):
            self.orders.commit()

    def started(self) -> RecoveryPlan:
        """`daily` starts, and runs."""
        facts = start_facts(self.daily.stream, StartFrom())
        plan = plan_recovery(facts)
        if not isinstance(plan, Resume):
            go_back(self.daily, plan)
        self.daily.execute(str(self.daily.live), reads_at_start(facts, plan))
        return plan

    def next_start(self, start_from: str = "latest") -> RecoveryPlan:
        return planned_start(self.daily.stream, StartFrom(start_from))


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def go_back(stage: Stage, plan: RecoveryPlan, accept_undone: str = "") -> None:
    acquired = acquire_for(stage.catalog, stage.name, "a test", StartCause.MANUAL.value)
    with LeaseKeeper(stage.catalog, acquired.record) as lease:
        prepare(stage.stream, plan, lease, accept_undone=accept_undone)


def forked(stage: Stage, start_from: str) -> int:
    into = replace(stage.stream, stream_id=f"from-{start_from}", name="scratch", asset_key="scratch")
    return fork(stage.stream, into, StartFrom(start_from), origin="a test").batch_id


def rewind(stage: Stage, to: str, accept_undone: str = "") -> None:
    start = StartFrom(to, discard_state=to == "empty")
    go_back(stage, planned_start(stage.stream, start), accept_undone)


def test_a_reader_of_undone_rows_goes_back_behind_them(chain: Chain) -> None:
    assert isinstance(chain.next_start(), Resume)
    rewind(chain.orders, "orders-2")

    plan = chain.next_start()

    assert isinstance(plan, Restore)
    assert plan.snapshot.label == "before"
    assert plan.reason.startswith("a stream upstream went back; restore savepoint")
    passed = {each.name: each.why for each in plan.passed}
    assert passed["the live directory"] == "it has read 2 files of orders that were undone"
    assert "it has read batch 4 of orders, which was undone" in passed.values()

    go_back(chain.daily, plan)
    chain.commit(2)
    chain.started()
    assert isinstance(chain.next_start(), Resume)
    assert chain.daily.has_read() == set(listed(chain.orders.sink))


def test_a_fork_of_a_reader_begins_behind_undone_rows_too(chain: Chain) -> None:
    before, after = chain.daily.stream.catalog.snapshots.completed("daily")[1::-1]
    rewind(chain.orders, "orders-2")

    assert (before.label, forked(chain.daily, "latest")) == ("before", before.batch_id)
    assert (after.label, forked(chain.daily, after.snapshot_id)) == ("after", after.batch_id)


def test_a_fork_waits_for_what_a_restore_upstream_undoes(chain: Chain) -> None:
    set_stream(chain.daily.catalog, "orders", pending_restore=json.dumps(stored_pending(ToBatch(batch_id=1))))

    with pytest.raises(RequestFailedError, match="'daily' reads orders, with an unfinished restore"):
        forked(chain.daily, "latest")

    after = chain.daily.catalog.snapshots.completed("daily")[0]
    assert forked(chain.daily, after.snapshot_id) == after.batch_id
    set_stream(chain.daily.catalog, "orders", pending_restore=None)
    assert forked(chain.daily, "latest") == LiveDirectory(str(chain.daily.live)).positions().commit


def test_a_reader_that_lags_goes_on(chain: Chain) -> None:
    chain.orders.commit()
    rewind(chain.orders, "orders-4")

    assert isinstance(chain.next_start(), Resume)


def test_an_accepted_rewind_takes_no_reader_back_and_a_later_one_does(chain: Chain) -> None:
    rewind(chain.orders, "orders-4")
    chain.started()
    rewind(chain.orders, "orders-2", "they only count visits")

    plan = chain.next_start()

    assert isinstance(plan, Resume)
    (branch, *_) = chain.orders.catalog.history.branches("orders")
    assert branch.accepted == "they only count visits"
    # It went on, with the two files that it keeps.
    chain.started()
    chain.commit(1)
    chain.daily.savepoint("later")
    chain.orders.savepoint("orders-3")
    chain.commit(1)
    chain.started()
    rewind(chain.orders, "orders-3")
    back = chain.next_start()
    assert isinstance(back, Restore)
    assert back.snapshot.label == "later"
    assert back.passed[0].why == "it has read 1 files of orders that were undone"


def test_a_start_that_names_its_point_is_obeyed(chain: Chain) -> None:
    rewind(chain.orders, "orders-2")

    plan = chain.next_start(start_from="after")

    assert isinstance(plan, Restore)
    assert plan.snapshot.label == "after"


def test_without_a_point_that_is_free_of_them_it_keeps_the_rows(chain: Chain) -> None:
    rewind(chain.orders, "empty")

    plan = chain.next_start()

    assert isinstance(plan, Resume)
    assert plan.reason.endswith("it keeps rows that were undone upstream: no point that it may use is without them")


def test_a_rewind_from_before_its_last_start_is_history(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    rewind(chain.orders, "orders-2")
    chain.started()

    assert isinstance(chain.next_start(), Resume)


def test_a_reader_that_started_with_an_earlier_version_goes_on(tmp_path: Path) -> None:
    chain = Chain(tmp_path, seen=False)
    rewind(chain.orders, "orders-2")

    assert isinstance(chain.next_start(), Resume)


def test_a_sink_that_cannot_be_rolled_back_keeps_them(chain: Chain) -> None:
    chain.daily.sinks = ["ForeachBatchSink"]
    chain.started()
    rewind(chain.orders, "orders-2")

    ahead = start_preview(chain.daily.stream, StartFrom())

    assert isinstance(ahead.plan, Resume)
    assert "it keeps rows that were undone upstream: sink ForeachBatchSink" in ahead.plan.reason
    recovery = run(chain)
    assert recovery["kind"] == "RESUME"
    assert recovery["reason"] == ahead.plan.reason


def test_recovery_from_damage_skips_snapshots_with_undone_rows(chain: Chain) -> None:
    rewind(chain.orders, "orders-2")
    (chain.daily.live / "commits" / "1").unlink()
    (chain.daily.live / "metadata").write_text("damaged")

    plan = chain.next_start()

    assert isinstance(plan, Restore)
    assert plan.snapshot.label == "before"


def test_retention_keeps_what_the_next_start_goes_back_to(chain: Chain) -> None:
    stream = replace(chain.daily.stream, options=replace(chain.daily.stream.options, count_savepoints=True))
    policy = Latest(1)

    def dropped() -> list[str | None]:
        kept = retained_by_policy(stream)
        labels = {each.snapshot_id: each.label for each in kept}
        decision = subsumption(stream, kept, policy, RetentionContext(stream.catalog.now_ms()))
        return [labels[each.snapshot_id] for each in decision.dropped]

    assert dropped() == ["first", "before"]
    rewind(chain.orders, "orders-2")
    chain.commit(1)
    chain.daily.savepoint("later")
    assert dropped() == ["first", "after"]
    plan = chain.started()
    assert plan.snapshot is not None
    assert plan.snapshot.label == "before"


def test_undone_files_that_were_cleaned_up_are_not_missing_input(chain: Chain) -> None:
    before = set(listed(chain.orders.sink))
    rewind(chain.orders, "orders-2")
    for undone in before - set(listed(chain.orders.sink)):
        Path(undone.removeprefix("file://")).unlink()

    ahead = start_preview(chain.daily.stream, StartFrom())

    assert (ahead.gone, ahead.plan.to_batch) == ("", 1)


def test_files_that_the_log_of_a_sink_dropped_by_age_are_missing_input(chain: Chain) -> None:
    age_out(chain.orders, 4)

    ahead = start_preview(chain.daily.stream, StartFrom("before"))

    lists = f"the log of the sink in file:{chain.orders.sink} no longer lists"
    assert f"{lists} 1 of 2 files that are read again" in ahead.gone


@pytest.mark.parametrize("undoes_something", [False, True])
def test_files_that_the_log_of_a_sink_dropped_by_age_were_not_undone(chain: Chain, undoes_something: bool) -> None:
    chain.commit(3)
    age_out(chain.orders, 4)
    chain.daily.savepoint("aged")
    chain.orders.savepoint("now")
    (chain.commit if undoes_something else chain.commit_orders)(1)
    rewind(chain.orders, "now")

    plan = chain.next_start()

    label = plan.snapshot.label if plan.snapshot is not None else None
    assert label == ("aged" if undoes_something else None)


@pytest.mark.parametrize("starts_between", [False, True])
def test_what_an_empty_start_undid_stays_undone_whatever_follows_it(chain: Chain, starts_between: bool) -> None:
    rewind(chain.orders, "empty")
    chain.orders.execute(str(chain.orders.live))
    chain.commit_orders(1)
    if starts_between:
        chain.started()
    chain.daily.commit()
    chain.daily.savepoint("good")
    chain.orders.savepoint("orders-0")
    chain.commit_orders(2)
    chain.daily.commit()
    rewind(chain.orders, "orders-0")

    plan = chain.next_start()

    if starts_between:
        assert isinstance(plan, Restore)
        assert plan.snapshot.label == "good"
    else:
        assert "keeps rows that were undone upstream" in plan.reason


def test_rows_that_a_restore_without_a_start_took_away_are_not_counted_as_kept(chain: Chain) -> None:
    """As the restart of a savepoint set and the rollback of an upgrade do."""
    rewind(chain.orders, "orders-2", "they only count visits")
    chain.started()
    rewind(chain.daily, "before")
    chain.started()
    (read,) = reads_in(chain.daily.catalog.executions.last_recovery("daily")) or ()
    assert read.undone == 0
    chain.commit(1)
    chain.orders.savepoint("orders-3")
    chain.daily.savepoint("good")
    chain.commit(2)
    rewind(chain.orders, "orders-3")

    plan = chain.next_start()

    assert isinstance(plan, Restore)
    assert plan.snapshot.label == "good"


def age_out(stage: Stage, files: int) -> None:
    """As the option `retention` of Spark's file sink does when it compacts the log."""
    newest = max((stage.sink / "_spark_metadata").glob("*.compact"), key=lambda each: int(each.stem))
    version, *lines = newest.read_text().splitlines()
    newest.write_text("\n".join([version, *lines[files:]]))


def test_what_the_stream_went_on_with_is_not_counted_again(chain: Chain) -> None:
    rewind(chain.orders, "orders-2", "they only count visits")
    chain.started()
    chain.orders.commit()
    chain.orders.savepoint("orders-3")
    chain.orders.commit()
    (reader,) = start_preview(chain.orders.stream, StartFrom("orders-3")).readers
    rewind(chain.orders, "orders-3")

    assert reader.has_read_undone is False
    assert isinstance(chain.next_start(), Resume)


def test_a_rewind_that_is_not_accepted_takes_it_back_behind_that_only(chain: Chain) -> None:
    rewind(chain.orders, "orders-2", "they only count visits")
    chain.orders.commit()
    chain.orders.savepoint("orders-3")
    chain.orders.commit()
    chain.daily.commit()
    rewind(chain.orders, "orders-3")

    plan = chain.next_start()

    # Its snapshot has the rows whose loss was accepted.
    assert plan.snapshot is not None
    assert plan.snapshot.label == "after"


def test_the_reason_of_a_rewind_that_was_finished_later_counts(chain: Chain) -> None:
    plan = planned_start(chain.orders.stream, StartFrom("orders-2"))
    with (
        patch.object(prepare_module._Preparation, "finish", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        go_back(chain.orders, plan, "they only count visits")
    # So that it continues in another directory.
    fence(LiveDirectory(str(chain.orders.live)).folder, by="a test", wait_s=0)
    go_back(chain.orders, planned_start(chain.orders.stream, StartFrom()))

    assert [each.accepted for each in chain.orders.catalog.history.branches("orders")] == 2 * ["they only count visits"]
    assert isinstance(chain.next_start(), Resume)


def test_a_rewind_to_what_an_accepted_one_left_undoes_what_was_written_between(chain: Chain) -> None:
    rewind(chain.orders, "orders-2", "they only count visits")
    chain.started()
    chain.commit(1)
    chain.daily.savepoint("later")
    rewind(chain.orders, "orders-4")

    plan = chain.next_start()

    assert plan.snapshot is not None
    assert plan.snapshot.label == "after"


@pytest.mark.parametrize("of", ["orders", "daily"])
def test_what_an_unfinished_restore_hides_is_judged_by_the_next_start(chain: Chain, of: str) -> None:
    rewind(chain.orders, "orders-2")
    set_stream(chain.daily.catalog, of, pending_restore=json.dumps(stored_pending(ToBatch(batch_id=1))))

    facts = start_facts(chain.daily.stream, StartFrom())

    assert facts.undone.points == {}
    assert [each.timeline for each in facts.undone.reads] == [1]


def test_an_upstream_row_that_cannot_be_read_takes_no_reader_back(chain: Chain) -> None:
    rewind(chain.orders, "orders-2")
    set_stream(chain.orders.catalog, "orders", state_edits="{")

    assert isinstance(chain.next_start(), Resume)


def test_a_log_that_cannot_be_read_takes_no_reader_back_until_it_can(chain: Chain) -> None:
    rewind(chain.orders, "orders-2")
    log = chain.orders.sink / "_spark_metadata" / "2"
    whole = log.read_text()
    log.write_text("damaged")
    assert isinstance(chain.started(), Resume)

    log.write_text(whole)

    assert isinstance(chain.next_start(), Restore)


def test_lost_batches_that_may_have_read_undone_rows_are_not_replayed(chain: Chain) -> None:
    rewind(chain.orders, "orders-2")
    (chain.daily.live / "metadata").write_text("damaged")
    facts = start_facts(chain.daily.stream, StartFrom())
    plan = plan_recovery(facts)
    assert isinstance(plan, Restore)

    assert facts.undone.went_back
    assert lost_batches(chain.daily.stream, facts, plan) is None


def test_a_source_that_this_process_cannot_reach_stops_no_start(chain: Chain) -> None:
    orders = chain.orders
    sources = [{"kind": "file", "identity": {"path": "hdfs://namenode/in", "format": "parquet"}, "options": {}}]
    orders.execute(str(orders.live), sources=sources)

    assert start_preview(orders.stream, StartFrom("orders-2")).plan.to_batch == 2


@pytest.mark.parametrize("damaged", [["before"], ["before", "first"]])
def test_a_damaged_point_is_passed_over(tmp_path: Path, damaged: list[str]) -> None:
    chain = Chain(tmp_path)
    rewind(chain.orders, "orders-2")
    for snapshot in chain.daily.catalog.snapshots.completed("daily"):
        if snapshot.label in damaged:
            path_of(f"{snapshot.location}/_metadata").write_bytes(b"damaged")

    assert run(chain)["kind"] == ("RESTORE" if damaged == ["before"] else "RESUME")


def run(chain: Chain) -> dict[str, Any]:
    """A whole start of `daily`, with a query that ends at once; what its execution records."""
    execute_stream(chain.daily.stream, RunRequest(run_id="run", start_query=lambda _live: PlayedQuery(ends=True)))
    return chain.daily.catalog.executions.of_stream("daily")[0].recovery or {}


def test_a_first_start_records_what_it_reads(tmp_path: Path) -> None:
    orders = Stage(tmp_path, "orders")
    orders.commit()
    orders.savepoint("orders-0")
    orders.commit()
    rewind(orders, "orders-0")
    daily = Stage(tmp_path, "daily", orders)
    sources = keyed(identities_of_record(daily.sources()) or [])
    facts = recovery_facts(daily.stream, StartFrom(), predecessor_ended=True)

    found = with_undone_reads(daily.catalog, facts, sources)

    assert [(each.upstream, each.timeline, each.undone) for each in found.undone.reads] == [("orders", 2, 0)]


@pytest.mark.parametrize("seed", range(either(quick=2, thorough=60)))
def test_after_any_life_a_started_reader_has_read_what_is_there(tmp_path: Path, seed: int) -> None:
    """Random commits, savepoints, rewinds, also to what a rewind left, and starts."""
    random = Random(seed)
    chain = Chain(tmp_path)
    orders, daily = chain.orders, chain.daily
    for step in range(40):
        match random.choices(["orders", "daily", "save", "keep", "rewind", "start"], [8, 6, 3, 4, 2, 3])[0]:
            case "orders":
                orders.commit()
            case "daily":
                daily.commit()
            case "save":
                orders.savepoint(f"orders-{step}a")
            case "keep":
                daily.savepoint(f"daily-{step}")
            case "rewind":
                saved = [each.snapshot_id for each in orders.catalog.snapshots.completed("orders")]
                rewind(orders, random.choice(saved))
            case "start":
                plan = chain.started()
                # Its first snapshot has read a batch that every life of `orders` has.
                assert "keeps rows" not in plan.reason
                assert daily.has_read() <= set(listed(orders.sink)), step
    chain.started()
    daily.commit()
    assert daily.has_read() == set(listed(orders.sink))
