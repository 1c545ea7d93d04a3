"""What a driver was started for, from the catalog and its environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import RESTART_OF, Holder, LaunchRecord, RequestKind, RequestStatus, StartCause
from dagster_ckpt.client import launching as start_order_module
from dagster_ckpt.client.launching import START_REQUEST_VARIABLE, StartOrder, start_order
from dagster_ckpt.errors import CatalogError, RequestFailedError
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import RecoveryClaimMode
from tests.support.as_writer import as_writer

STREAM = "sales"
OTHERWISE = StartFrom("latest-savepoint")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}")
    for stream_id in (STREAM, "others"):
        catalog.streams.ensure(stream_id, name=stream_id, asset_key=stream_id, options={})
    yield catalog
    catalog.close()


def asked(catalog: Catalog, start_from: str = "latest", stream_id: str = STREAM, **more: object) -> str:
    arguments = {"start_from": start_from, **more}
    return catalog.requests.submit(stream_id, RequestKind.START, arguments=arguments, origin="a person").request_id


def order(catalog: Catalog, launched_for: str | None = None) -> StartOrder:
    environment = {START_REQUEST_VARIABLE: launched_for} if launched_for is not None else {}
    return start_order(catalog, STREAM, otherwise=OTHERWISE, environment=environment)


def launched(catalog: Catalog, request_id: str, run_id: str) -> None:
    catalog.launches.record(
        LaunchRecord(
            request_id=request_id,
            stream_id=STREAM,
            run_id=run_id,
            host="h",
            boot_id="b",
            pid=1,
            process_start_ticks=1,
            command="c",
            log="l",
        )
    )


def begun(catalog: Catalog, stream_id: str = STREAM) -> None:
    holder = Holder("e", "run", "h", 1, 1, "b")
    as_writer(catalog, stream_id).executions.start("e", run_id="run", cause=StartCause.MANUAL, holder=holder)


class TestStartedByOthers:
    def test_started_again_by_its_cluster_it_counts_as_a_restart(self, catalog: Catalog) -> None:
        assert order(catalog).cause is StartCause.MANUAL
        begun(catalog)

        assert order(catalog) == StartOrder(start_from=OTHERWISE, cause=StartCause.RESTART_NEW_RUN)

    def test_started_again_on_a_terminal_it_is_a_person(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun(catalog)
        monkeypatch.setattr(start_order_module, "is_by_hand", lambda: True)

        assert order(catalog).cause is StartCause.MANUAL

    def test_a_start_that_a_person_asks_for_is_theirs(self, catalog: Catalog) -> None:
        begun(catalog)
        asked(catalog, "chk-7")

        assert order(catalog).cause is StartCause.MANUAL

    @pytest.mark.parametrize("is_launched", [False, True])
    def test_killed_before_it_could_answer_it_is_begun_again_as_a_restart(
        self, catalog: Catalog, *, is_launched: bool
    ) -> None:
        request_id = asked(catalog, "chk-7")
        begun(catalog)

        found = order(catalog, request_id if is_launched else None)

        assert (found.request_id, str(found.start_from)) == (request_id, "chk-7")
        assert found.cause is StartCause.RESTART_NEW_RUN

    def test_it_starts_as_the_program_says_where_nobody_asked(self, catalog: Catalog) -> None:
        assert order(catalog) == StartOrder(start_from=OTHERWISE)

    def test_it_takes_the_oldest_start_that_was_asked_for(self, catalog: Catalog) -> None:
        first = asked(catalog, "chk-7", claim_mode="CLAIM", accept_loss=True, new_query_id=True)
        asked(catalog, "chk-8")

        taken = order(catalog)

        assert (taken.request_id, str(taken.start_from)) == (first, "chk-7")
        assert taken.start_from.accept_loss
        assert taken.start_from.new_query_id
        assert taken.start_from.claim_mode is RecoveryClaimMode.CLAIM
        assert not taken.has_supervisor

    def test_it_leaves_a_start_to_the_driver_that_is_launched_for_it(self, catalog: Catalog) -> None:
        asked(catalog, "chk-7", run_id="the run that launches a driver")

        assert order(catalog).request_id is None

    def test_other_requests_are_for_the_running_query(self, catalog: Catalog) -> None:
        catalog.requests.submit(STREAM, RequestKind.SAVEPOINT, origin="a person")

        assert order(catalog).request_id is None


class TestLaunched:
    def test_it_starts_as_its_request_says_and_belongs_to_the_run_that_launched_it(self, catalog: Catalog) -> None:
        request_id = asked(catalog, "chk-7", run_id="run")

        found = order(catalog, request_id)

        assert (found.request_id, str(found.start_from), found.run_id) == (request_id, "chk-7", "run")
        assert found.cause is StartCause.MANUAL
        assert found.has_supervisor

    def test_a_request_that_somebody_else_made_belongs_to_the_run_that_launched_its_driver(
        self, catalog: Catalog
    ) -> None:
        request_id = asked(catalog)
        launched(catalog, request_id, run_id="launcher")

        assert order(catalog, request_id).run_id == "launcher"

    def test_a_restart_goes_on_with_the_history_of_failures(self, catalog: Catalog) -> None:
        request_id = asked(catalog, cause=StartCause.RESTART_NEW_RUN.value, **{RESTART_OF: "failed"})

        found = order(catalog, request_id)

        assert (found.cause, found.restart_of) == (StartCause.RESTART_NEW_RUN, "failed")

    def test_started_again_by_its_cluster_it_rewinds_no_second_time(self, catalog: Catalog) -> None:
        request_id = asked(catalog, "chk-7")
        begun(catalog)
        as_writer(catalog, STREAM).requests.resolve(request_id, RequestStatus.COMPLETED)

        found = order(catalog, request_id)

        assert str(found.start_from) == "latest"
        assert found.request_id is None
        assert (found.cause, found.restart_of) == (StartCause.RESTART_NEW_RUN, "e")

    @pytest.mark.parametrize("status", [RequestStatus.FAILED, RequestStatus.WITHDRAWN])
    def test_a_start_that_nobody_waits_for_is_refused(self, catalog: Catalog, status: RequestStatus) -> None:
        request_id = asked(catalog)
        as_writer(catalog, STREAM).requests.resolve(request_id, status)

        with pytest.raises(RequestFailedError, match=rf"is {status.value}: .*Start the stream again"):
            order(catalog, request_id)

    def test_the_request_of_another_stream_is_refused(self, catalog: Catalog) -> None:
        with pytest.raises(
            RequestFailedError, match="a START request of stream 'others', not a START request of 'sales'"
        ):
            order(catalog, asked(catalog, stream_id="others"))

    def test_a_request_that_does_not_exist_is_refused(self, catalog: Catalog) -> None:
        with pytest.raises(CatalogError, match="has no request 'gone'"):
            order(catalog, "gone")
