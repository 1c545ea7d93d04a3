"""People say what a stream is to be; the sensor says how far it is, and never undoes a person's word."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import text

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import AlertUntil, PreflightRecord, UpgradePhase, UpgradeRecord
from dagster_ckpt.catalog.records import EventType, RequestKind, RequestStatus, StartCause
from dagster_ckpt.policies.upgrade import UpgradeMode
from dagster_ckpt.values.modes import DesiredState
from tests.catalog.conftest import holder
from tests.support.as_writer import as_writer
from tests.support.manual_clock import ManualClock

UPGRADE = UpgradeRecord(
    UpgradePhase.UPGRADING,
    "1",
    "2",
    UpgradeMode.SAVEPOINT,
    1_000,
    "started",
    starts=1,
    started_at_ms=2_000,
    snapshot_id="i",
)


def events(catalog: Catalog) -> list[EventType]:
    return [event.type for event in catalog.events.after(0)]


def test_a_stream_that_nobody_spoke_of_is_not_managed(catalog: Catalog) -> None:
    assert catalog.desired_states.find("orders") is None
    assert catalog.desired_states.all() == {}


def test_the_newest_word_of_a_person_counts_and_raises_the_generation(catalog: Catalog, clock: ManualClock) -> None:
    catalog.desired_states.put("orders", DesiredState.RUNNING, origin="anna")
    clock.now_ms += 5
    said = catalog.desired_states.put("orders", DesiredState.SUSPENDED, origin="bert")

    assert (said.desired, said.origin, said.changed_at_ms) == (DesiredState.SUSPENDED, "bert", clock.now_ms)
    assert said.generation == catalog.desired_states.all()["orders"].generation == 3
    assert said.reached == 0
    assert events(catalog) == [EventType.DESIRED_STATE_SET] * 2


def test_what_was_decided_on_an_older_word_does_not_replace_a_newer_one(catalog: Catalog) -> None:
    seen = catalog.desired_states.put("orders", DesiredState.RUNNING, origin="anna")
    said = catalog.desired_states.put("orders", DesiredState.RUNNING, origin="bert")

    assert catalog.desired_states.put("orders", DesiredState.SUSPENDED, origin="the sensor", seen=seen) == said
    assert catalog.desired_states.all()["orders"] == said
    taken = catalog.desired_states.put("orders", DesiredState.SUSPENDED, origin="the sensor", seen=said)
    assert (taken.desired, taken.generation) == (DesiredState.SUSPENDED, said.generation + 1)


def test_the_definition_decides_where_a_person_left_it_to_it(catalog: Catalog) -> None:
    assert catalog.desired_states.ensure("orders", origin="definition").desired is None
    catalog.desired_states.put("orders", DesiredState.CANCELED, origin="anna")
    assert catalog.desired_states.put("orders", None, origin="anna").desired is None


def test_the_progress_of_an_upgrade_is_kept_and_told_once(catalog: Catalog) -> None:
    row = catalog.desired_states.put("orders", DesiredState.RUNNING, origin="anna")
    for _ in range(2):
        assert catalog.desired_states.advance(
            row, upgrade=UPGRADE, alert="look", alert_until=AlertUntil.STOPPED, request_id="r", reached=True
        )

    kept = catalog.desired_states.find("orders")
    assert kept is not None
    assert (kept.upgrade, kept.alert, kept.request_id, kept.reached) == (UPGRADE, "look", "r", row.generation)
    assert kept.alert_until is AlertUntil.STOPPED
    assert events(catalog)[1:] == [EventType.UPGRADE_CHANGED, EventType.ALERT]


def test_what_was_thought_out_for_an_earlier_wish_is_not_recorded(catalog: Catalog) -> None:
    row = catalog.desired_states.put("orders", DesiredState.RUNNING, origin="anna")
    catalog.desired_states.put("orders", DesiredState.SUSPENDED, origin="anna")

    assert not catalog.desired_states.advance(row, upgrade=UPGRADE, alert=None, request_id=None)
    assert catalog.desired_states.all()["orders"].upgrade is None


@pytest.mark.parametrize(
    ("phase", "retry", "is_kept"),
    [
        (UpgradePhase.REFUSED, True, False),
        (UpgradePhase.ROLLED_BACK, True, False),
        (UpgradePhase.REFUSED, False, True),
        (UpgradePhase.RESTORING, True, True),
        (UpgradePhase.STABLE, True, True),
    ],
)
def test_a_refused_version_is_forgotten_only_on_request(
    catalog: Catalog, phase: UpgradePhase, retry: bool, is_kept: bool
) -> None:
    row = catalog.desired_states.ensure("orders", origin="definition")
    upgrade = replace(UPGRADE, phase=phase)
    catalog.desired_states.advance(row, upgrade=upgrade, alert="refused", request_id=None)

    said = catalog.desired_states.put("orders", DesiredState.RUNNING, origin="anna", retry_refused=retry)

    assert (said.upgrade, said.alert) == (upgrade if is_kept else None, None)


def test_a_preflight_is_noted_whoever_asked_for_it(catalog: Catalog) -> None:
    preflight = PreflightRecord("2", False, "another key", 7, 1_000)
    catalog.desired_states.note_preflight("orders", preflight)
    assert catalog.desired_states.all()["orders"].preflight == preflight


@pytest.mark.parametrize(
    "damage", ["desired = 'FLYING'", "upgrade = 'no json'", 'upgrade = \'{"phase":"NEW"}\'', "preflight = '[]'"]
)
def test_a_row_that_cannot_be_read_is_listed_and_says_so(catalog: Catalog, damage: str) -> None:
    catalog.desired_states.put("orders", DesiredState.RUNNING, origin="anna")
    with catalog.database.writing() as connection:
        connection.execute(text(f"UPDATE desired_states SET {damage}"))
    assert catalog.desired_states.all()["orders"].broken is not None


def test_an_execution_keeps_the_version_of_its_code(catalog: Catalog) -> None:
    begun = as_writer(catalog).executions.start(
        "e", run_id="r", cause=StartCause.MANUAL, holder=holder(), code_version="7"
    )
    assert begun.code_version == "7"


def test_a_request_with_an_id_of_its_own_is_made_once(catalog: Catalog) -> None:
    first = catalog.requests.submit("orders", RequestKind.START, origin="sensor", request_id="mine")
    as_writer(catalog).requests.resolve("mine", RequestStatus.COMPLETED)
    again = catalog.requests.submit("orders", RequestKind.START, origin="sensor", request_id="mine")
    assert (first.request_id, again.status) == ("mine", RequestStatus.COMPLETED)
    assert catalog.requests.find("another") is None
