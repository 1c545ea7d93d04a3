"""A restart whose new run checks its code beside the running query, which it suspends only then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.desired_states import AlertUntil
from dagster_ckpt.catalog.records import IS_LAUNCHED, ExecutionStatus, RequestKind, RequestRecord, RequestStatus
from dagster_ckpt.client import preflight
from dagster_ckpt.client.launching import hand_over, hands_over
from dagster_ckpt.errors import CkptError, RequestFailedError, RequestTimeoutError
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import STREAM
from tests.support.rewind_history import History
from tests.support.running_process import RunningProcess
from tests.support.verbs import restart

ORIGIN = "a test"
STRANGERS = 'v1\n{"path":"file:///strangers","action":"add"}'


class NewRun:
    """The run that the supervisor launches for a request, with code that is loaded."""

    def __init__(self, history: History, describe: Callable[[], Any] = lambda: None) -> None:
        self.history, self.describe = history, describe
        self.requests = history.shelf.stream.catalog.requests
        self.told: list[str] = []
        self.failed: BaseException | None = None
        self.ended = threading.Event()

    def launch(self) -> None:
        request = self._asked()
        stream = self.history.shelf.stream
        try:
            hand_over(
                stream,
                request.request_id,
                self.describe,
                StartFrom(str(request.arguments["start_from"])),
                report=self.told.append,
            )
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.failed = error
            self.ended.set()
            return
        as_writer(stream.catalog).requests.resolve(request.request_id, RequestStatus.COMPLETED)

    def _asked(self) -> RequestRecord:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            for request in self.requests.pending(STREAM):
                if request.kind is RequestKind.START:
                    return request
            time.sleep(0.01)
        raise TimeoutError("no start was requested")

    @contextmanager
    def launched(self) -> Iterator[None]:
        thread = threading.Thread(target=self.launch)
        thread.start()
        yield
        thread.join()


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[History]:
    history = History(tmp_path)
    monkeypatch.setattr("dagster_ckpt.client.requests.POLL_S", 0.02)
    monkeypatch.setattr(preflight, "named_output", lambda _: NamedOutput("parquet", str(history.sink)))
    monkeypatch.setattr(preflight, "plan_of_writer", lambda _: None)
    as_writer(history.shelf.stream.catalog, STREAM).executions.running(
        "first", live_directory=str(history.shelf.live), recovery={IS_LAUNCHED: True}
    )
    yield history
    history.close()


def status(history: History) -> ExecutionStatus:
    execution = history.shelf.stream.catalog.executions.latest(STREAM)
    assert execution is not None
    return execution.status


def strangers_write(history: History) -> None:
    for path in (history.sink / "_spark_metadata").iterdir():
        path.write_text(STRANGERS)


def raising() -> None:
    raise ValueError("no such column")


REFUSED: dict[str, tuple[Callable[[History], None], Callable[[], Any], str]] = {
    "its sink": (strangers_write, lambda: None, "SharedSinkError: Stream .* nothing was changed"),
    "its code": (lambda _: None, raising, "ValueError: no such column"),
}


@pytest.mark.parametrize(("change", "describe", "why"), REFUSED.values(), ids=REFUSED)
def test_a_start_that_the_loaded_code_refuses_leaves_the_query_running(
    history: History, change: Callable[[History], None], describe: Callable[[], Any], why: str
) -> None:
    told: list[str] = []

    def described() -> Any:
        # What the operator could not see before the request.
        change(history)
        return describe()

    new = NewRun(history, described)
    with RunningProcess(history, before_the_stop=lambda: pytest.fail("suspended")), new.launched():
        with pytest.raises(RequestFailedError, match=why):
            restart(history.shelf.stream, StartFrom(), origin=ORIGIN, timeout_s=30, report=told.append)
        assert status(history) is ExecutionStatus.RUNNING

    assert told[-1] == "the running query was not stopped and goes on"
    assert history.shelf.stream.catalog.requests.pending(STREAM) == []


def test_a_query_is_suspended_once_the_loaded_code_has_been_checked(history: History) -> None:
    new, stopped = NewRun(history), threading.Event()
    with RunningProcess(history, before_the_stop=stopped.set), new.launched():
        restart(history.shelf.stream, StartFrom(), origin=ORIGIN, timeout_s=30)

    assert new.failed is None
    assert new.told[-1] == "the loaded code can continue; suspending the running query"
    assert stopped.is_set()
    assert status(history) is ExecutionStatus.SUSPENDED


def test_a_query_runs_on_if_nothing_launches_the_new_run(history: History) -> None:
    told: list[str] = []
    with RunningProcess(history, before_the_stop=lambda: pytest.fail("suspended")):
        with pytest.raises(RequestTimeoutError):
            restart(history.shelf.stream, StartFrom(), origin=ORIGIN, timeout_s=0.2, report=told.append)
        assert status(history) is ExecutionStatus.RUNNING

    assert "is the supervisor sensor on" in told[-1]
    assert history.shelf.stream.catalog.requests.pending(STREAM) == []


def test_a_query_that_no_code_location_defines_is_not_stopped(history: History) -> None:
    rows = history.shelf.stream.catalog.desired_states
    row = rows.ensure(STREAM, origin=ORIGIN)
    rows.advance(row, upgrade=None, alert="no asset has it", alert_until=AlertUntil.DEFINED, request_id=None)

    with (
        RunningProcess(history, before_the_stop=lambda: pytest.fail("suspended")),
        pytest.raises(RequestFailedError, match="is not restarted, nothing was changed: no asset has it"),
    ):
        restart(history.shelf.stream, StartFrom(), origin=ORIGIN, timeout_s=30, suspend_first=True)

    assert status(history) is ExecutionStatus.RUNNING


def test_the_query_is_suspended_first_if_that_is_asked_for_and_what_is_not_checked_is_said(history: History) -> None:
    told: list[str] = []
    with RunningProcess(history, before_the_stop=lambda: None) as process:
        restart(history.shelf.stream, StartFrom(), origin=ORIGIN, timeout_s=30, report=told.append, suspend_first=True)

    assert len(process.starts) == 1
    assert any(
        message.startswith("the plan and the sources of the new code are checked by its start") for message in told
    )


@pytest.mark.parametrize("start_from", [StartFrom(), StartFrom("batch-5", accept_loss=True)], ids=str)
def test_a_start_that_is_withdrawn_while_the_query_is_stopped_for_it_starts_that_again(
    history: History, start_from: StartFrom
) -> None:
    requests = history.shelf.stream.catalog.requests
    new = NewRun(history)

    def withdraw() -> None:
        [start] = [each for each in requests.pending(STREAM) if each.kind is RequestKind.START]
        assert hands_over(history.shelf.stream, start.request_id)
        assert requests.withdraw(start.request_id)

    withdrawn = pytest.raises(CkptError, match="withdrawn")
    with (
        RunningProcess(history, before_the_stop=lambda: None, after_the_stop=withdraw) as process,
        new.launched(),
        withdrawn,
    ):
        restart(history.shelf.stream, start_from, origin=ORIGIN, timeout_s=30)

    assert "started again where it stopped" in str(new.failed)
    assert [request.arguments["start_from"] for request in process.starts] == ["latest"]


def test_a_query_does_not_stop_for_a_start_that_is_withdrawn_first(history: History) -> None:
    requests = history.shelf.stream.catalog.requests
    new = NewRun(history)

    def withdraw() -> None:
        [start] = [each for each in requests.pending(STREAM) if each.kind is RequestKind.START]
        assert requests.withdraw(start.request_id)

    with RunningProcess(history, before_the_stop=withdraw) as process, new.launched():
        with pytest.raises(CkptError, match="withdrawn"):
            restart(history.shelf.stream, StartFrom(), origin=ORIGIN, timeout_s=30)
        new.ended.wait(30)
        assert status(history) is ExecutionStatus.RUNNING

    assert isinstance(new.failed, RequestFailedError)
    assert (process.starts, requests.pending(STREAM)) == ([], [])
