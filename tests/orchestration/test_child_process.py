"""A function in a child process: what comes back of it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.errors import CkptError
from dagster_ckpt.orchestration.child_process import Died, Raised, Returned, Spare, in_child
from dagster_ckpt.orchestration.restart_in_run import _as_raised, _why_another_may_continue
from dagster_ckpt.orchestration.run_status import CRASHED, run_failure

# A child that does not end must not hold the suite.
pytestmark = pytest.mark.timeout(60)


def never() -> bool:
    return False


def test_what_it_returns_comes_back_also_if_no_pipe_holds_it() -> None:
    answer = in_child(lambda: (os.getpid(), b"x" * 3_000_000), interrupted=never)

    assert isinstance(answer, Returned)
    pid, data = answer.value
    assert (pid != os.getpid(), len(data)) == (True, 3_000_000)


def test_an_error_comes_back_with_the_traceback_of_its_cause() -> None:
    def work() -> None:
        try:
            raise ValueError("what happened")
        except ValueError as error:
            raise run_failure("The stream crashed", CRASHED) from error

    answer = in_child(work, interrupted=never)

    assert isinstance(answer, Raised)
    raised = _as_raised(answer)
    assert isinstance(raised, dg.Failure)
    assert (raised.description, raised.allow_retries) == ("The stream crashed", False)
    assert "ValueError: what happened" in str(raised.__cause__)
    assert _why_another_may_continue(answer) == "The stream crashed"


def test_a_refusal_is_left_to_a_person() -> None:
    def work() -> None:
        raise run_failure("rows would be lost", "RowsAtRiskError")

    answer = in_child(work, interrupted=never)

    assert isinstance(answer, Raised)
    assert _why_another_may_continue(answer) is None


def test_an_error_that_does_not_pickle_comes_back_as_its_text() -> None:
    class Local(Exception):  # noqa: N818 - a user's
        pass

    def work() -> None:
        raise Local("of a user's function")

    answer = in_child(work, interrupted=never)

    assert isinstance(answer, Raised)
    assert isinstance(answer.error, CkptError)
    assert str(answer.error) == "Local: of a user's function"


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
        (lambda: os._exit(3), "ended with exit status 3"),
    ],
)
def test_a_death_is_told(ends: object, how: str) -> None:
    answer = in_child(ends, interrupted=never)  # type: ignore[arg-type]

    assert isinstance(answer, Died)
    assert answer.how == how
    assert how in str(_as_raised(answer))


def test_a_process_that_the_child_left_behind_is_not_waited_for() -> None:
    def work() -> int:
        left = os.fork()
        if left == 0:
            # It has the pipe, too.
            time.sleep(60)
            os._exit(0)
        return left

    answer = in_child(work, interrupted=never)

    assert isinstance(answer, Returned)
    os.kill(answer.value, signal.SIGKILL)


def test_no_child_outlives_an_error_of_its_parent(tmp_path: Path) -> None:
    def work() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    def fails() -> bool:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        in_child(work, interrupted=fails)

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_interrupt_reaches_the_child(tmp_path: Path) -> None:
    def work() -> str:
        told: list[int] = []
        signal.signal(signal.SIGINT, lambda number, _frame: told.append(number))
        (tmp_path / "ready").touch()
        while not told:
            time.sleep(0.01)
        return signal.Signals(told[0]).name

    assert in_child(work, interrupted=(tmp_path / "ready").exists) == Returned("SIGINT")


def as_ever() -> Callable[[], bool]:
    return lambda: True


def becomes(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_of(spare: Spare[Any]) -> str:
    ends: list[str] = []
    becomes(lambda: (ended := spare.how_it_ended()) is not None and not ends.append(ended))
    return ends[0]


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_spare_prepares_and_does_its_work_only_when_it_is_told(tmp_path: Path) -> None:
    def prepare() -> Callable[[], bool]:
        (tmp_path / "prepared").touch()
        return lambda: True

    def work() -> tuple[int, bool]:
        (tmp_path / "done").touch()
        return os.getpid(), (tmp_path / "prepared").exists()

    spare = Spare(prepare, work)
    becomes(lambda: spare.is_ready)
    time.sleep(0.2)
    assert (spare.how_it_ended(), (tmp_path / "done").exists()) == (None, False)

    assert spare.take_over(interrupted=never) == Returned((spare.pid, True))


def test_a_spare_that_is_not_ready_goes_on_once_it_is(tmp_path: Path) -> None:
    def prepare() -> Callable[[], bool]:
        becomes((tmp_path / "may").exists)
        return lambda: True

    spare = Spare(prepare, lambda: "done")

    assert spare.take_over(interrupted=never, meanwhile=(tmp_path / "may").touch) == Returned("done")


def test_a_spare_whose_preparation_fails_ends_or_does_the_work_all_the_same(tmp_path: Path) -> None:
    def prepare() -> Callable[[], bool]:
        becomes((tmp_path / "may").exists)
        time.sleep(0.2)
        raise ValueError("no memory for a JVM")

    told, untold = Spare(prepare, lambda: "done"), Spare(prepare, lambda: "done")
    assert told.take_over(interrupted=never, meanwhile=(tmp_path / "may").touch) == Returned("done")

    assert end_of(untold) == "ended with exit status 1"


def test_a_spare_that_is_of_no_use_any_more_ends() -> None:
    assert end_of(Spare(lambda: lambda: False, lambda: None)) == "ended with exit status 1"


def test_a_spare_that_ended_just_before_it_was_told_is_a_death() -> None:
    spare = Spare(as_ever, lambda: None)
    becomes(lambda: spare.is_ready)
    os.kill(spare.pid, signal.SIGKILL)

    answer = spare.take_over(interrupted=never)

    assert answer == Died(spare.pid, "was killed by SIGKILL")


def test_the_end_of_a_spare_leaves_no_process() -> None:
    spare = Spare(as_ever, lambda: None)
    spare.end()

    assert not lives(spare.pid)


_PARENT = """
import os, time
from dagster_ckpt.orchestration.child_process import Spare, in_child

def prepare():
    return lambda: True

def sleeps():
    # Of a later child, which must not keep open what the spare listens to.
    print(os.getpid(), spare.pid, flush=True)
    time.sleep(60)

spare = Spare(prepare, lambda: None)
in_child(sleeps, interrupted=lambda: False)
"""


def test_a_spare_ends_with_a_parent_that_is_killed_also_if_another_child_lives_on() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        driver, spare = map(int, parent.stdout.readline().split())
        parent.kill()
        parent.wait()
        try:
            becomes(lambda: not lives(spare))
            assert lives(driver)
        finally:
            os.kill(driver, signal.SIGKILL)
