"""Which call to a JVM that does not return ends it."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dagster_ckpt.catalog.records import ExecutionStatus
from dagster_ckpt.errors import QueryStalledError
from dagster_ckpt.runtime import stall
from dagster_ckpt.runtime.stall import JvmWatch
from dagster_ckpt.stream.liveness import ProcessIdentity
from tests.support.played_query import PlayedQuery, Stage

LIMIT_MS = 40
LOOKS_WITHIN_THE_LIMIT = 4


@pytest.fixture
def jvm() -> Iterator[subprocess.Popen[bytes]]:
    # A JVM prints its stacks at SIGQUIT.
    ignores_quit = ["sh", "-c", "trap '' QUIT; echo ready; exec sleep 600"]
    with subprocess.Popen(ignores_quit, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


class Calls:
    """Returns the given calls one by one, and reports when all were returned."""

    def __init__(self, *calls: object | None) -> None:
        self._calls = [*calls]
        self.all_seen = threading.Event()

    def __call__(self) -> object | None:
        if not self._calls:
            self.all_seen.set()
            return None
        return self._calls.pop(0)


@pytest.mark.parametrize(
    "calls",
    [
        Calls(*(object() for _ in range(5 * LOOKS_WITHIN_THE_LIMIT))),
        Calls(*["one"] * LOOKS_WITHIN_THE_LIMIT, None, *["one"] * LOOKS_WITHIN_THE_LIMIT),
        Calls(*[None] * 5 * LOOKS_WITHIN_THE_LIMIT),
    ],
    ids=["many calls that return", "a call that returned just in time", "no call"],
)
def test_a_jvm_that_answers_is_left_alone(jvm: subprocess.Popen[bytes], calls: Calls) -> None:
    with JvmWatch("orders", ProcessIdentity.of(jvm.pid), calls, limit_ms=LIMIT_MS) as watch:
        assert calls.all_seen.wait(60)

    assert watch.ended is None
    assert jvm.poll() is None


def test_a_jvm_that_answers_while_it_prints_its_stacks_is_left_alone(
    jvm: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stall, "_PRINT_S", 0.01)
    calls = Calls(*["one"] * (LOOKS_WITHIN_THE_LIMIT + 1), *[None] * LOOKS_WITHIN_THE_LIMIT)
    with JvmWatch("orders", ProcessIdentity.of(jvm.pid), calls, limit_ms=LIMIT_MS) as watch:
        assert calls.all_seen.wait(60)

    assert watch.ended is None
    assert jvm.poll() is None


def test_an_error_while_a_jvm_that_answered_prints_its_stacks_stops_the_query(
    stage: Callable[..., Stage], jvm: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease must not be released with a query that runs."""
    is_suspected = threading.Event()
    monkeypatch.setattr(ProcessIdentity, "send", lambda *_: is_suspected.set())

    class Answering(PlayedQuery):
        def wait(self, timeout_s: float) -> bool:
            self.call = "wait"
            assert is_suspected.wait(60)
            self.call = None
            raise ValueError("of something else")

    query = Answering()
    play = stage(query)
    play.stream = replace(play.stream, stall_timeout_ms=LIMIT_MS)

    with pytest.raises(ValueError, match="of something else"):
        play.run(jvm_pid=jvm.pid)

    assert query.stopped
    assert jvm.poll() is None


@pytest.mark.parametrize("changed", [{"host": "another-machine"}, {"start_ticks": 1}, {"start_ticks": None}])
def test_a_process_that_is_not_proven_to_be_the_jvm_is_left_alone(
    jvm: subprocess.Popen[bytes], changed: dict[str, Any]
) -> None:
    other = replace(ProcessIdentity.of(jvm.pid), **changed)
    threads = threading.active_count()
    with JvmWatch("orders", other, lambda: "one", limit_ms=1):
        assert threading.active_count() == threads

    assert jvm.poll() is None


def test_a_run_whose_jvm_does_not_answer_fails_and_leaves_the_lease_to_its_successor(
    stage: Callable[..., Stage], jvm: subprocess.Popen[bytes]
) -> None:
    class Hung(PlayedQuery):
        def wait(self, timeout_s: float) -> bool:
            self.call = "wait"
            jvm.wait()
            raise ConnectionResetError(104, "Connection reset by peer")

        def stop(self, *, within_ms: int | None = None) -> None:
            raise AssertionError("a dead JVM stops nothing")

    play = stage(Hung())
    play.stream = replace(play.stream, stall_timeout_ms=LIMIT_MS)

    with pytest.raises(QueryStalledError, match=rf"its JVM, process {jvm.pid}, did not answer for .* and was killed"):
        play.run(jvm_pid=jvm.pid)

    [execution] = play.stream.catalog.executions.of_stream("orders")
    assert (execution.status, execution.settled) == (ExecutionStatus.FAILED, False)
    assert "did not answer" in (execution.reason or "")
    assert play.stream.catalog.leases.current("orders") is None
