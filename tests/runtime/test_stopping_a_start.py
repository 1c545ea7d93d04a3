"""A start is canceled, suspended or interrupted between any two of its steps, and the next one does right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestStatus
from dagster_ckpt.client.lifecycle import StopResult
from dagster_ckpt.runtime import run_request
from dagster_ckpt.runtime.execution import execute_stream
from dagster_ckpt.runtime.run_request import EndKind, RunRequest
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.played_query import PlayedQuery
from tests.support.recovery_ladder import Ladder
from tests.support.retention_shelf import HOLDER, STREAM
from tests.support.verbs import cancel, suspend

ME = "a person"
MANY = 400


@pytest.fixture
def ladder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ladder]:
    # At each call, not twice a second.
    monkeypatch.setattr(run_request, "REQUEST_POLL_MS", 0)
    ladder = Ladder(tmp_path)
    yield ladder
    ladder.close()


def unfinished(ladder: Ladder) -> list[Path]:
    return list(Path(ladder.stream.live_root.removeprefix("file://")).rglob("*.partial"))


class AskedAt:
    """Requests of a catalog, into which a person writes one when a start looks for the n-th time."""

    def __init__(self, catalog: Catalog, kind: RequestKind, at: int) -> None:
        self._pending = catalog.requests.pending
        self._ask = lambda: catalog.requests.submit(STREAM, kind, arguments={}, origin="a person")
        self._left = at
        self.request_id: str | None = None

    def __call__(self, stream_id: str) -> Any:
        self._left -= 1
        if self._left == 0:
            self.request_id = self._ask().request_id
        return self._pending(stream_id)


@pytest.mark.thorough(but=("CANCEL-*-latest", "SUSPEND-*-at 10"))
@pytest.mark.parametrize("start_from", ["latest", "at 10"])
@pytest.mark.parametrize(
    ("kind", "end", "status"),
    [
        (RequestKind.CANCEL, EndKind.CANCEL_REQUESTED, ExecutionStatus.CANCELED),
        (RequestKind.SUSPEND, EndKind.SUSPENDED, ExecutionStatus.SUSPENDED),
    ],
)
def test_it_ends_at_whichever_step_it_is_asked_and_the_next_start_goes_on(
    ladder: Ladder, kind: RequestKind, end: EndKind, status: ExecutionStatus, start_from: str
) -> None:
    if start_from == "latest":
        ladder.lose_live_directory()
    catalog = ladder.stream.catalog
    steps = 0
    for at in range(1, MANY):
        asked = AskedAt(catalog, kind, at)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalog.requests, "pending", asked)
            query = PlayedQuery(ends=True)
            outcome = ladder.run(query, start_from=StartFrom(start_from, no_safety_savepoint=True))
        if ladder.stage.started_in:
            break
        steps += 1
        assert asked.request_id is not None
        assert (outcome.end.kind, ladder.last()[0]) == (end, status)
        assert catalog.requests.get(asked.request_id).status is RequestStatus.COMPLETED
        assert unfinished(ladder) == []
        assert catalog.leases.current(STREAM) is None

    assert steps > 5
    assert ladder.batches == ((12, 12) if start_from == "latest" else (10, 10))


@pytest.mark.parametrize(("stop", "status"), [(cancel, ExecutionStatus.CANCELED), (suspend, ExecutionStatus.SUSPENDED)])
def test_a_restore_that_takes_for_ever_is_stopped_by_the_verb(
    ladder: Ladder, stop: Callable[..., str], status: ExecutionStatus
) -> None:
    ladder.lose_live_directory()
    began = threading.Event()

    extract = type(ladder.stream.store).extract

    def of_a_restore(store: Any, *args: Any, **how: Any) -> None:
        (never_ends if "missing" in how else partial(extract, store))(*args, **how)

    def never_ends(_location: str, write: Callable[[Any, Iterator[bytes]], None], **_how: Any) -> None:
        def chunks() -> Iterator[bytes]:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                began.set()
                yield b"x"

        write(SimpleNamespace(path="state/0/0/1.delta"), chunks())

    said: list[StopResult] = []

    def person() -> None:
        began.wait(60)
        said.append(stop(ladder.stream, origin=ME, timeout_s=60))

    thread = threading.Thread(target=person)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(ladder.stream.store), "extract", of_a_restore)
        outcome = ladder.run()
    thread.join()

    assert said
    assert outcome.end.kind in (EndKind.CANCEL_REQUESTED, EndKind.SUSPENDED)
    assert ladder.last()[0] is status
    assert unfinished(ladder) == []
    ladder.run(PlayedQuery(ends=True))
    assert ladder.batches == (12, 12)


def test_a_start_that_is_asked_for_and_then_canceled_is_answered(ladder: Ladder) -> None:
    catalog = ladder.stream.catalog
    start = catalog.requests.submit(STREAM, RequestKind.START, arguments={}, origin="a person").request_id
    catalog.requests.submit(STREAM, RequestKind.CANCEL, arguments={}, origin="a person")

    ladder.run(start_request_id=start)

    answer = catalog.requests.get(start)
    assert answer.status is RequestStatus.FAILED
    assert "was not started: cancel requested by a person" in (answer.error or "")
    assert ladder.batches == (13, 13)


def test_an_interrupt_ends_a_start(ladder: Ladder) -> None:
    outcome = ladder.run(interrupted=lambda: True)

    assert outcome.end.kind is EndKind.INTERRUPTED
    assert ladder.stage.started_in == []
    assert ladder.batches == (13, 13)


def test_a_request_is_looked_for_twice_a_second_at_most(ladder: Ladder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_request, "REQUEST_POLL_MS", 500)
    looks: list[int] = []
    now_ms = 0

    def interrupted() -> bool:
        looks.append(now_ms)
        return False

    lease = ladder.stream.catalog.leases.acquire(STREAM, HOLDER, 60_000)
    watch = run_request.StartWatch(ladder.stream.catalog, lease, interrupted, clock=lambda: now_ms)
    for now_ms in range(0, 2_000, 7):  # noqa: B007 - the clock reads it
        watch()

    assert looks == [504, 1008, 1512]


def test_a_query_that_is_being_started_is_supervised(ladder: Ladder) -> None:
    """A request that comes after the last look is for the supervisor."""
    stream = replace(ladder.stream)

    def start(live: Any) -> Any:
        stream.catalog.requests.submit(STREAM, RequestKind.SUSPEND, arguments={}, origin="a person")
        return PlayedQuery()

    assert execute_stream(stream, RunRequest("run", start)).end.kind is EndKind.SUSPENDED
