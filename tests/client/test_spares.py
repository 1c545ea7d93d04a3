"""A process that waits as a spare of a stream: when it continues, and when it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, Holder, LeaseRecord, RequestKind, StartCause
from dagster_ckpt.catalog.tables import leases
from dagster_ckpt.client.launching import start_order
from dagster_ckpt.client.spares import await_turn
from dagster_ckpt.errors import CatalogError, StartStoppedError
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.log_lines import collecting
from tests.support.streams import stream_at

ELSEWHERE = Holder("first", "run", "another host", 1, 1, "its boot")
LONG_MS = 600_000
ENOUGH = 20


class Pair:
    """A stream that runs on another machine, and its spare here; what happens, happens while the spare waits."""

    def __init__(self, root: Path, *, delay_ms: int | None = 0) -> None:
        strategy = (
            RestartStrategies.no_restart() if delay_ms is None else RestartStrategies.fixed_delay_restart(3, delay_ms)
        )
        self.stream = stream_at(root, restart=strategy)
        self.catalog: Catalog = self.stream.catalog
        self.stream.register()
        self.lease: LeaseRecord = self.catalog.leases.acquire("orders", ELSEWHERE, LONG_MS)
        self.catalog.executions.start(
            self.lease, "first", run_id="run", cause=StartCause.MANUAL, holder=ELSEWHERE, code_version=None
        )
        self.said: list[str] = []

    def ends(self, status: ExecutionStatus, reason: str = "it was asked to") -> None:
        self.catalog.executions.end(self.lease, "first", status, reason, settled=True)
        self.catalog.leases.release(self.lease)

    def loses_its_machine(self) -> None:
        with self.catalog.database.writing() as connection:
            connection.execute(leases.update().values(expires_at_ms=1))

    def wait(self, *happens: Callable[[], object], has_lost: bool = False) -> bool:
        """Whether the spare has waited; it is of no use any more some looks after the last of what happens."""
        left = iter(happens)
        looks = iter(range(len(happens) + ENOUGH))
        with collecting(self.said):
            return await_turn(
                self.stream,
                lambda: lambda: next(looks, None) is not None,
                has_lost=has_lost,
                pause=lambda _seconds: next(left, lambda: None)(),
            )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**how: Any) -> Pair:
        made.append(Pair(tmp_path / str(len(made)), **how))
        return made[-1]

    yield make
    for each in made:
        each.catalog.close()


def continues(pair: Pair, *, has_waited: bool) -> StartCause:
    otherwise = StartFrom(start_from="a savepoint")
    order = start_order(pair.catalog, "orders", otherwise=otherwise, has_waited=has_waited, environment={})
    assert (order.start_from == otherwise) is not has_waited
    return order.cause


def test_a_stream_that_does_not_run_is_started_at_once(pair: Callable[..., Pair]) -> None:
    stopped = pair()
    stopped.ends(ExecutionStatus.SUSPENDED)

    assert stopped.wait() is False
    assert stopped.said == []


def test_a_spare_continues_what_failed_elsewhere(pair: Callable[..., Pair]) -> None:
    running = pair()

    assert running.wait(lambda: None, lambda: running.ends(ExecutionStatus.FAILED, "out of memory")) is True
    assert [line for line in running.said if "spare" in line] == [
        "Stream orders: this process waits as a spare: another process runs it"
    ]
    assert continues(running, has_waited=True) is StartCause.RESTART_NEW_RUN


def test_a_spare_continues_once_the_lease_of_a_lost_machine_has_expired(pair: Callable[..., Pair]) -> None:
    running = pair()

    assert running.wait(lambda: None, running.loses_its_machine) is True
    latest = running.catalog.executions.latest("orders")
    assert latest is not None
    assert (latest.status, latest.reason) == (ExecutionStatus.FAILED, "its process died")


@pytest.mark.parametrize("status", [ExecutionStatus.SUSPENDED, ExecutionStatus.CANCELED, ExecutionStatus.FINISHED])
def test_what_a_user_stops_waits_for_a_start_that_a_user_requests(
    pair: Callable[..., Pair], status: ExecutionStatus
) -> None:
    running = pair()
    with pytest.raises(StartStoppedError, match="has ended"):
        running.wait(lambda: running.ends(status))
    assert (
        running.said[-1]
        == f"Stream orders: this process waits as a spare: the stream is {status.value} (it was asked to)"
    )

    again = pair()

    def start() -> None:
        again.catalog.requests.submit("orders", RequestKind.START, origin="a user")

    assert again.wait(lambda: again.ends(status), lambda: None, start) is True
    assert continues(again, has_waited=True) is StartCause.MANUAL


def test_a_spare_that_was_slower_does_not_start_what_a_user_stopped_at_that_moment(pair: Callable[..., Pair]) -> None:
    stopped = pair()
    stopped.ends(ExecutionStatus.SUSPENDED)

    with pytest.raises(StartStoppedError):
        stopped.wait(has_lost=True)

    failed = pair()
    failed.ends(ExecutionStatus.FAILED)
    assert failed.wait(has_lost=True) is True


def test_the_restart_strategy_decides(pair: Callable[..., Pair]) -> None:
    never = pair(delay_ms=None)
    with pytest.raises(StartStoppedError):
        never.wait(lambda: never.ends(ExecutionStatus.FAILED))
    assert "the stream has failed" in never.said[-1]

    later = pair(delay_ms=LONG_MS)
    with pytest.raises(StartStoppedError):
        later.wait(lambda: later.ends(ExecutionStatus.FAILED))


def test_an_unavailable_catalog_keeps_it_waiting(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    running = pair()
    current = running.catalog.leases.current

    def fails(_stream_id: str) -> None:
        raise CatalogError("the database is away")

    def comes_back() -> None:
        monkeypatch.setattr(running.catalog.leases, "current", current)
        running.ends(ExecutionStatus.FAILED)

    assert running.wait(lambda: monkeypatch.setattr(running.catalog.leases, "current", fails), comes_back) is True
