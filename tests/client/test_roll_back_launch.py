"""A stream whose drivers Dagster launches goes back to the code before: which, from where, and when it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import IS_LAUNCHED, LAUNCH, LAUNCH_OF, RequestKind, StartCause
from dagster_ckpt.client.launching import DriverLaunch, launch_to_use, record_of
from dagster_ckpt.client.platforms import PlatformLaunch
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.policies.retention import Latest
from dagster_ckpt.recovery.checkpoint_retention import subsume
from dagster_ckpt.stream.predecessor import predecessor
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import HOLDER, STREAM, Shelf
from tests.support.verbs import client_of

OLD, NEW = ("spark-submit", "orders-1.py"), ("spark-submit", "orders-2.py")
SECRET = ("spark-submit", "--password", "hunter2", "orders-1.py")


class Cluster(PlatformLaunch):
    """A platform."""

    def submit(self, request: Any) -> str:
        raise NotImplementedError

    def end(self, run: str) -> str | None:
        raise NotImplementedError

    def cancel(self, run: str) -> None:
        raise NotImplementedError


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = Shelf.at(tmp_path)
    yield shelf
    shelf.stream.catalog.close()


def ran(
    shelf: Shelf, execution_id: str, version: str, launch: dict[str, Any] | None = None, *, run_id: str | None = None
) -> None:
    began(shelf, execution_id, version, run_id=run_id)
    executions = as_writer(shelf.stream.catalog, STREAM).executions
    executions.running(execution_id, live_directory=str(shelf.live), recovery={IS_LAUNCHED: True})
    if launch is not None:
        shelf.stream.catalog.executions.note(execution_id, {LAUNCH: launch})


def began(shelf: Shelf, execution_id: str, version: str | None, *, run_id: str | None = None) -> None:
    """An execution whose query does not run yet."""
    executions = as_writer(shelf.stream.catalog, STREAM).executions
    run = run_id or execution_id
    executions.start(execution_id, run_id=run, cause=StartCause.MANUAL, holder=HOLDER, code_version=version)


def command(words: tuple[str, ...]) -> dict[str, Any]:
    return record_of(DriverLaunch(words, "/logs"))


def test_the_newest_snapshot_of_the_code_before_and_its_launch_are_found(shelf: Shelf) -> None:
    ran(shelf, "old", "1", command(OLD))
    ran(shelf, "old again", "1", command(OLD))
    ran(shelf, "new", "2", command(NEW))

    found = predecessor(shelf.stream.catalog, STREAM)

    assert found is not None
    assert (found.execution.execution_id, found.cannot, found.snapshot) == ("old again", None, None)
    assert found.describe() == "code version 1 (launched by spark-submit orders-1.py)"
    with pytest.raises(RequestFailedError, match=r"nothing was changed: no snapshot of code version 1 .* is left"):
        client_of(shelf.stream).roll_back_launch(STREAM)


@pytest.mark.parametrize("again", [OLD, SECRET])
def test_the_newest_checkpoint_of_the_code_before_is_kept_where_its_driver_can_be_launched_again(
    shelf: Shelf, again: tuple[str, ...]
) -> None:
    shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, num_retained=1, retention=Latest(1)))
    ran(shelf, "old", "1", command(again))
    shelf.taken_by = "old"
    for _ in range(2):
        shelf.checkpoint()
    ran(shelf, "new", "2", command(NEW))
    shelf.taken_by = "new"
    for _ in range(3):
        shelf.checkpoint()

    dropped = [each.number for each in subsume(shelf.stream)]

    assert dropped == ([1, 3, 4] if again == OLD else [1, 2, 3, 4])


CANNOT = {
    "nothing was recorded": (None, command(NEW), "how it was launched was not recorded"),
    "there are secrets": (command(SECRET), command(NEW), "its launch contains secrets, which are not recorded"),
    "it is the same": (command(OLD), command(OLD), "the present code was launched in the same way"),
}


@pytest.mark.parametrize(("old", "new", "why"), CANNOT.values(), ids=CANNOT)
def test_a_launch_that_cannot_be_repeated_is_refused_with_the_code_to_deploy(
    shelf: Shelf, old: dict[str, Any] | None, new: dict[str, Any], why: str
) -> None:
    taken = shelf.checkpoint()
    ran(shelf, "old", "1", old)
    ran(shelf, "new", "2", new)
    if old is None:
        # The snapshot is of an execution before.
        assert taken.execution_id == "first"

    with pytest.raises(RequestFailedError) as refused:
        client_of(shelf.stream).roll_back_launch(STREAM)

    assert f"nothing was changed: {why}. Deploy code version 1" in str(refused.value)
    assert str(refused.value).endswith(f"and restart the stream from {taken.snapshot_id}.")
    assert "hunter2" not in str(refused.value)
    assert shelf.stream.catalog.requests.pending(STREAM) == []


def test_a_stream_that_has_run_one_code_is_not_rolled_back(shelf: Shelf) -> None:
    with pytest.raises(RequestFailedError, match="no other code has run before"):
        client_of(shelf.stream).roll_back_launch(STREAM)


def test_the_start_names_the_execution_whose_driver_is_launched_again(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = shelf.checkpoint()
    ran(shelf, "old", "1", command(OLD))
    ran(shelf, "new", "2", command(NEW))
    asked: dict[str, Any] = {}
    client = client_of(shelf.stream)
    monkeypatch.setattr(type(client), "_restart", lambda _self, *given, **named: asked.update(named, given=given))

    client.roll_back_launch(STREAM)

    assert (asked["given"], asked["launch_of"]) == ((STREAM, taken.snapshot_id), "old")


def test_a_request_of_a_platform_is_repeated_by_the_client_of_the_loaded_code(shelf: Shelf) -> None:
    loaded = Cluster("a client", {"jar": "orders-2", "env": ["{start_request}"]})
    ran(shelf, "old", "1", record_of(Cluster(None, {"jar": "orders-1", "env": ["{start_request}"]})))
    ran(shelf, "new", "2", record_of(loaded))
    catalog = shelf.stream.catalog
    start = catalog.requests.submit(STREAM, RequestKind.START, arguments={LAUNCH_OF: "old"}, origin="a test")

    launch, recorded = launch_to_use(catalog, STREAM, loaded, start)

    assert isinstance(launch, Cluster)
    assert (launch.client, launch.request["jar"]) == ("a client", "orders-1")
    ran(shelf, "back", "1", recorded)
    assert launch_to_use(catalog, STREAM, loaded, None) == (launch, recorded)
    mended = Cluster("a client", {"jar": "orders-3", "env": ["{start_request}"]})
    assert launch_to_use(catalog, STREAM, mended, None) == (mended, record_of(mended))
    with pytest.raises(RequestFailedError, match="the loaded code launches drivers by DriverLaunch"):
        launch_to_use(catalog, STREAM, DriverLaunch(NEW, "/logs"), start)
    assert catalog.executions.get("back").recovery is not None
    assert LAUNCH in (catalog.executions.get("back").recovery or {})


def test_restarts_in_place_and_starts_that_failed_are_no_other_code(shelf: Shelf) -> None:
    """Neither has the launch recorded with it."""
    taken = shelf.checkpoint()
    ran(shelf, "old", "1", command(OLD))
    ran(shelf, "old in place", "1", run_id="old")
    ran(shelf, "new", "2", command(NEW))
    ran(shelf, "new in place", "2", run_id="new")
    began(shelf, "failed", None)

    found = predecessor(shelf.stream.catalog, STREAM)

    assert found is not None
    assert (found.execution.execution_id, found.cannot) == ("old", None)
    assert found.snapshot is not None
    assert found.snapshot.snapshot_id == taken.snapshot_id


def test_code_that_was_rolled_back_is_launched_neither_by_a_restart_nor_by_another_rollback(shelf: Shelf) -> None:
    catalog = shelf.stream.catalog
    loaded = DriverLaunch(NEW, "/logs")
    ran(shelf, "old", "1", command(OLD))
    ran(shelf, "new", "2", record_of(loaded))
    back = catalog.requests.submit(STREAM, RequestKind.START, arguments={LAUNCH_OF: "old"}, origin="a test")
    launch, recorded = launch_to_use(catalog, STREAM, loaded, back)
    ran(shelf, "back", "1", recorded)
    ran(shelf, "back in place", "1", run_id="back")
    began(shelf, "failed", "1")

    assert isinstance(launch, DriverLaunch)
    assert tuple(launch.command) == OLD
    assert launch_to_use(catalog, STREAM, loaded, None) == (launch, recorded)
    assert predecessor(catalog, STREAM) is None
    with pytest.raises(RequestFailedError, match="no other code has run before"):
        client_of(shelf.stream).roll_back_launch(STREAM)
