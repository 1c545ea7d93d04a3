"""A stream whose upstream went back: from where its next start continues."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import StartCause
from dagster_ckpt.client.preflight import planned_start, start_preview
from dagster_ckpt.policies.retention import Latest, RetentionContext
from dagster_ckpt.recovery.plan import RecoveryPlan, Restore, Resume
from dagster_ckpt.recovery.prepare import prepare
from dagster_ckpt.recovery.retention import retained_by_policy, subsumption
from dagster_ckpt.stream.lease import LeaseKeeper, acquire_for
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.stream_graph import Stage, listed


class Chain:
    """`daily` has read batches 0 to 2 of `orders` up to its savepoint, and two more of them since."""

    def __init__(self, root: Path, *, seen: bool = True) -> None:
        self.orders = Stage(root, "orders")
        self.daily = Stage(root, "daily", self.orders)
        self.commit(3)
        self.orders.savepoint("orders-2")
        self.daily.savepoint("before")
        self.commit(2)
        self.orders.savepoint("orders-4")
        self.daily.savepoint("after")
        self.started(orders=0) if seen else None

    def commit(self, times: int) -> None:
        for _ in range(times):
            self.orders.commit()
        self.daily.commit()

    def started(self, **timelines: int) -> None:
        """`daily` started when its upstream had these."""
        self.daily.execute(str(self.daily.live), timelines)

    def next_start(self, **options: object) -> RecoveryPlan:
        return planned_start(self.daily.stream, StartFrom(**options))  # type: ignore[arg-type]


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def go_back(stage: Stage, plan: RecoveryPlan, accept_undone: str = "") -> None:
    acquired = acquire_for(stage.catalog, stage.name, "a test", StartCause.MANUAL.value)
    with LeaseKeeper(stage.catalog, acquired.record) as lease:
        prepare(stage.stream, plan, lease, accept_undone=accept_undone)


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
    chain.started(orders=1)
    assert isinstance(chain.next_start(), Resume)
    assert chain.daily.has_read() == set(listed(chain.orders.sink))


def test_a_reader_that_lags_goes_on(chain: Chain) -> None:
    chain.orders.commit()
    rewind(chain.orders, "orders-4")

    assert isinstance(chain.next_start(), Resume)


def test_an_accepted_rewind_takes_no_reader_back_and_a_later_one_does(chain: Chain) -> None:
    rewind(chain.orders, "orders-4")
    chain.started(orders=1)
    rewind(chain.orders, "orders-2", "they only count visits")

    plan = chain.next_start()

    assert isinstance(plan, Resume)
    (branch, *_) = chain.orders.catalog.history.branches("orders")
    assert branch.accepted == "they only count visits"
    # It went on, with the two files that it keeps.
    chain.started(orders=2)
    chain.commit(1)
    chain.daily.savepoint("later")
    chain.orders.savepoint("orders-3")
    chain.commit(1)
    chain.started(orders=2)
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
    assert plan.reason.endswith("it keeps rows that were undone upstream: no point is without them")


def test_a_rewind_from_before_its_last_start_is_history(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    rewind(chain.orders, "orders-2")
    chain.started(orders=1)

    assert isinstance(chain.next_start(), Resume)


def test_a_reader_that_started_with_an_earlier_version_goes_on(tmp_path: Path) -> None:
    chain = Chain(tmp_path, seen=False)
    rewind(chain.orders, "orders-2")

    assert isinstance(chain.next_start(), Resume)


def test_a_sink_that_cannot_be_rolled_back_keeps_them(chain: Chain) -> None:
    chain.daily.sinks = ["ForeachBatchSink"]
    chain.started(orders=0)
    rewind(chain.orders, "orders-2")

    ahead = start_preview(chain.daily.stream, StartFrom())

    assert isinstance(ahead.plan, Resume)
    assert "it keeps rows that were undone upstream: sink ForeachBatchSink" in ahead.plan.reason


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

    assert dropped() == ["before"]
    rewind(chain.orders, "orders-2")
    chain.commit(1)
    chain.daily.savepoint("later")
    assert dropped() == ["after"]
    # It went on.
    chain.started(orders=1)
    assert dropped() == ["before", "after"]


def test_undone_files_that_were_cleaned_up_are_not_missing_input(chain: Chain) -> None:
    before = set(listed(chain.orders.sink))
    rewind(chain.orders, "orders-2")
    for undone in before - set(listed(chain.orders.sink)):
        Path(undone.removeprefix("file://")).unlink()

    ahead = start_preview(chain.daily.stream, StartFrom())

    assert (ahead.gone, ahead.plan.to_batch) == ("", 0)


def test_files_that_the_log_of_a_sink_dropped_by_age_are_missing_input(chain: Chain) -> None:
    compacted = chain.orders.sink / "_spark_metadata" / "3.compact"
    compacted.write_text("\n".join(compacted.read_text().splitlines()[:-1]))

    ahead = start_preview(chain.daily.stream, StartFrom("before"))

    assert (
        f"the log of the sink in file:{chain.orders.sink} no longer lists 1 of 2 files that are read again"
        in ahead.gone
    )
