"""Run a function in a forked child process, and another child after its death, without importing anything again.

No JVM may be started before a fork.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from dagster_ckpt.errors import CkptError

T = TypeVar("T")

_POLL_S = 0.1
_CHUNK = 1 << 16
# A prepared spare writes this before its answer; no pickle begins with it.
_READY = b"\0"
_GO = b"\1"
# Pipes to the spares of this process: a byte is the order to work, a closed pipe means that this process has ended.
_spare_pipes: set[int] = set()


@dataclass(frozen=True)
class Returned(Generic[T]):
    value: T


@dataclass(frozen=True)
class Raised:
    """`trace` is the traceback of the error's cause, or its own."""

    error: BaseException
    trace: str


@dataclass(frozen=True)
class Died:
    pid: int
    how: str


class ChildTracebackError(CkptError):
    """Traceback of an error in a child process."""


def in_child(
    work: Callable[[], T], *, interrupted: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None
) -> Returned[T] | Raised | Died:
    """Run a function in a child process until it ends; what it returns must pickle.

    The child gets one SIGINT once `interrupted` returns True, and is killed if this call ends with an error.
    `meanwhile` is called several times a second.
    """
    return _outcome(*_fork(lambda writing: _answer(work, writing)), interrupted, meanwhile)


class Spare(Generic[T]):
    """A child process that calls `prepare`, and `work` once this process takes it over.

    It ends with this process, or once the result of `prepare` says that it is of no use.
    """

    def __init__(self, prepare: Callable[[], Callable[[], bool]], work: Callable[[], T]) -> None:
        waiting, self._go_pipe = os.pipe()
        _spare_pipes.add(self._go_pipe)
        try:
            self.pid, self._reading = _fork(lambda writing: _stand_by(prepare, work, waiting, writing))
        except OSError:
            self._close_go_pipe()
            raise
        finally:
            os.close(waiting)
        self._received = b""

    @property
    def is_ready(self) -> bool:
        self._received = self._received or _read(self._reading)
        return bool(self._received)

    def how_it_ended(self) -> str | None:
        """Return how the process ended; None while it lives. Do not use it after its end."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            return None
        self._close_go_pipe()
        os.close(self._reading)
        return _how_it_ended(status)

    def take_over(
        self, *, interrupted: Callable[[], bool], meanwhile: Callable[[], object] = lambda: None
    ) -> Returned[T] | Raised | Died:
        """Let it run `work` once it is prepared, and wait as `in_child` does."""
        with suppress(BrokenPipeError):
            os.write(self._go_pipe, _GO)
        self._close_go_pipe()
        return _outcome(self.pid, self._reading, interrupted, meanwhile)

    def end(self) -> None:
        self._close_go_pipe()
        _kill(self.pid)
        os.close(self._reading)

    def _close_go_pipe(self) -> None:
        _spare_pipes.discard(self._go_pipe)
        os.close(self._go_pipe)


def _fork(child: Callable[[int], NoReturn]) -> tuple[int, int]:
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    if pid == 0:
        # Otherwise a spare would not see that its parent has ended.
        for end in (reading, *_spare_pipes):
            os.close(end)
        _spare_pipes.clear()
        child(writing)
    os.close(writing)
    os.set_blocking(reading, False)
    return pid, reading


def _outcome(
    pid: int, reading: int, interrupted: Callable[[], bool], meanwhile: Callable[[], object]
) -> Returned[T] | Raised | Died:
    try:
        answer, status = _await(pid, reading, interrupted, meanwhile)
    except BaseException:
        # The child would continue to run the stream.
        _kill(pid)
        raise
    finally:
        os.close(reading)
    # After any other end, the answer may be incomplete.
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        answered: Returned[T] | Raised = pickle.loads(answer.removeprefix(_READY))
        return answered
    return Died(pid, _how_it_ended(status))


def _kill(pid: int) -> None:
    with suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == 0:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _await(
    pid: int, reading: int, interrupted: Callable[[], bool], meanwhile: Callable[[], object]
) -> tuple[bytes, int]:
    answer, is_interrupted = b"", False
    while True:
        if not is_interrupted and interrupted():
            is_interrupted = True
            os.kill(pid, signal.SIGINT)
        meanwhile()
        if select.select([reading], [], [], _POLL_S)[0]:
            received = _read(reading)
            answer += received
            if received:
                continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            # No wait for its end: a process that the child started may keep the pipe open.
            while received := _read(reading):
                answer += received
            return answer, status


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, _CHUNK)
    except BlockingIOError:
        return b""


def _stand_by(prepare: Callable[[], Callable[[], bool]], work: Callable[[], T], waiting: int, writing: int) -> NoReturn:
    may_work = threading.Event()

    def listen() -> None:
        # The read is empty when the parent has ended.
        if os.read(waiting, 1) != _GO:
            os._exit(0)
        may_work.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        is_of_use = prepare()
        os.write(writing, _READY)
        while not may_work.wait(_POLL_S):
            if not is_of_use():
                os._exit(1)
    except BaseException:  # noqa: BLE001 - if the spare works, that shows the cause
        if not may_work.is_set():
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    _answer(work, writing)


def _answer(work: Callable[[], T], writing: int) -> NoReturn:
    """Write the function's result or error, and end without the parent's exit handlers."""
    status = 1
    try:
        try:
            data = pickle.dumps(Returned(work()))
        except BaseException as error:  # noqa: BLE001 - raised again by the parent
            data = _pickled(error)
        with open(writing, "wb") as pipe:
            pipe.write(data)
        status = 0
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _pickled(error: BaseException) -> bytes:
    trace = "".join(traceback.format_exception(error.__cause__ or error))
    try:
        data = pickle.dumps(Raised(error, trace))
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - a user's error may not pickle
        return pickle.dumps(Raised(CkptError(f"{type(error).__name__}: {error}"), trace))
    return data


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"


# A spare that starts with the driver would slow it down.
DELAY_S = 15.0
# Between spares that keep ending, as on a machine without memory for them.
LONGEST_DELAY_S = 900.0


class Standby(Generic[T]):
    """Keeps at most one spare, and none if `start` is None."""

    def __init__(
        self,
        start: Callable[[], Spare[T]] | None,
        report: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._report = report
        self._clock = clock
        self._spare: Spare[T] | None = None
        self._is_reported = False
        self._lost = 0
        self._due_s = clock() + DELAY_S

    def tend(self) -> None:
        """Start a spare if it is time; report that it is ready or has ended."""
        if self._spare is None:
            if self._start is not None and self._clock() >= self._due_s:
                self._spare, self._is_reported = self._started(self._start), False
            return
        ended = self._spare.how_it_ended()
        if ended is not None:
            self._lose(f"The spare process {self._spare.pid} {ended}")
        elif not self._is_reported and self._spare.is_ready:
            self._is_reported = True
            self._say(f"The spare process {self._spare.pid} is ready")

    def take(self) -> Spare[T] | None:
        """Hand over the spare, if any; another one follows."""
        if self._spare is not None:
            self.tend()
        taken, self._spare = self._spare, None
        if taken is not None:
            self._lost, self._due_s = 0, self._clock() + DELAY_S
        return taken

    def end(self) -> None:
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _started(self, start: Callable[[], Spare[T]]) -> Spare[T] | None:
        try:
            return start()
        except OSError as error:
            self._lose(f"No spare process could be started ({error})")
            return None

    def _lose(self, what: str) -> None:
        self._spare = None
        delay_s = min(DELAY_S * 2**self._lost, LONGEST_DELAY_S)
        self._lost += 1
        self._due_s = self._clock() + delay_s
        self._say(f"{what}; the stream continues, and the next one is started in {delay_s:.0f} s")

    def _say(self, what: str) -> None:
        # A log that cannot be written must not end the driver.
        with suppress(Exception):
            self._report(what)
