"""A stop request that is not answered is waited for only for a limited time, by the catalog's clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import DesiredRecord, UpgradePhase
from dagster_ckpt.catalog.records import EventType, Holder, RequestRecord, RequestStatus, StartCause
from dagster_ckpt.client.health import HealthCheck, Verdict, judge
from dagster_ckpt.client.health_facts import HealthSettings, health_facts
from dagster_ckpt.client.reconciliation import Definition, Orchestrator, StepRuns, reconcile_desired
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.policies.upgrade import UpgradePolicy
from dagster_ckpt.values.modes import DesiredState
from tests.support.as_writer import as_writer

LIMIT_MS = 600_000
POLICY = UpgradePolicy(preflight=False, stop_timeout_ms=LIMIT_MS)
HOST = Holder("execution", "the run", "far away", 77, process_start_ticks=1, boot_id="boot")


class House:
    """A stream whose run goes on and whose process does nothing of what it is asked."""

    def __init__(self, folder: Path) -> None:
        self.now_ms = 1_000_000
        self.catalog = Catalog(f"sqlite:///{folder / 'catalog.db'}", clock=lambda: self.now_ms)
        self.catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
        self.catalog.desired_states.ensure("orders", origin="definition")
        as_writer(self.catalog).executions.start(
            "execution", run_id="the run", cause=StartCause.MANUAL, holder=HOST, code_version="1"
        )
        as_writer(self.catalog).executions.running("execution", live_directory="/live", recovery={})
        self.run_is_over = False

    def look(self, *, code_version: str = "1") -> None:
        orchestrator = Orchestrator(lambda _: self.run_is_over, lambda _: None, lambda _: StepRuns())
        definition = Definition("orders", DesiredState.RUNNING, POLICY, code_version)
        reconcile_desired(self.catalog, self.row, definition, orchestrator)

    @property
    def row(self) -> DesiredRecord:
        row = self.catalog.desired_states.find("orders")
        assert row is not None
        return row

    @property
    def request(self) -> RequestRecord:
        request = self.catalog.requests.find(self.row.request_id)
        assert request is not None
        return request

    @property
    def phase(self) -> UpgradePhase | None:
        return self.row.upgrade.phase if self.row.upgrade is not None else None

    def alerts(self) -> list[str]:
        return [event.payload["alert"] for event in self.catalog.events.after(0) if event.type is EventType.ALERT]


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.catalog.close()


def ask_to_upgrade(house: House) -> None:
    house.look(code_version="2")
    house.look(code_version="2")
    assert (house.phase, house.request.status) == (UpgradePhase.STOPPING, RequestStatus.PENDING)


def test_an_upgrade_takes_its_request_back_and_is_given_up(house: House) -> None:
    ask_to_upgrade(house)
    house.now_ms += LIMIT_MS - 1
    house.look(code_version="2")
    assert house.request.status is RequestStatus.PENDING
    house.now_ms += 1
    for _ in range(4):
        house.look(code_version="2")

    assert (house.phase, house.request.status) == (UpgradePhase.REFUSED, RequestStatus.WITHDRAWN)
    [alert] = house.alerts()
    for words in (
        "STOP_WITH_SAVEPOINT",
        "10 min",
        "process 77 on far away",
        "run the run",
        "no heartbeat recently",
        "terminate",
    ):
        assert words in alert
    settings = {"orders": HealthSettings()}
    facts = health_facts(house.catalog, settings, now_ms=house.now_ms)["orders"]
    found = judge(facts, CheckpointConfig().options, settings["orders"], now_ms=house.now_ms)
    [check] = [each for each in found if each.check is HealthCheck.DESIRED_STATE]
    # The process has not sent a heartbeat for ten minutes, so nothing shows that the stream runs on.
    assert (check.verdict, "no process received STOP_WITH_SAVEPOINT" in check.message) == (Verdict.ERROR, True)


def test_a_stream_that_takes_the_request_up_at_the_last_moment_is_upgraded(house: House) -> None:
    ask_to_upgrade(house)
    house.now_ms += LIMIT_MS
    assert as_writer(house.catalog).requests.accept(house.request.request_id)
    house.look(code_version="2")
    assert (house.phase, house.request.status) == (UpgradePhase.STOPPING, RequestStatus.ACCEPTED)
    assert "received STOP_WITH_SAVEPOINT, but did not answer" in (house.row.alert or "")

    as_writer(house.catalog).requests.resolve(
        house.request.request_id, RequestStatus.COMPLETED, snapshot_id="savepoint"
    )
    house.run_is_over = True
    house.look(code_version="2")

    assert (house.phase, house.row.alert) == (UpgradePhase.STARTING, None)


def test_a_stream_that_is_to_rest_stays_asked_and_people_are_told_once(house: House) -> None:
    house.catalog.desired_states.put("orders", DesiredState.SUSPENDED, origin="a person")
    house.look()
    for _ in range(3):
        house.now_ms += LIMIT_MS
        house.look()
    assert house.request.status is RequestStatus.PENDING
    assert len(house.alerts()) == 1

    house.run_is_over = True
    for _ in range(3):
        house.look()

    assert (house.row.alert, house.row.reached) == (None, house.row.generation)
