"""Runs a function in a child process, which is replaced after its death without importing anything again.

The child is a fork of this process, so it must be made before a JVM is started here.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from dagster_ckpt.errors import CkptError

T = TypeVar("T")

_POLL_S = 0.1
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Returned(Generic[T]):
    """The function has returned."""

    value: T


@dataclass(frozen=True)
class Raised:
    """`trace` is the traceback of the error's cause, or its own."""

    error: BaseException
    trace: str


@dataclass(frozen=True)
class Died:
    """For example "was killed by SIGKILL"."""

    pid: int
    how: str


class ChildTracebackError(CkptError):
    """Traceback of an error in a child process, as the cause of the same error here."""


def in_child(work: Callable[[], T], *, interrupted: Callable[[], bool]) -> Returned[T] | Raised | Died:
    """Run a function in a child process until it ends; what it returns or raises must pickle.

    The child gets one SIGINT as soon as `interrupted` returns True, and is killed if this call ends with an error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _answer(work, writing)
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        answer, status = _await(pid, reading, interrupted)
    except BaseException:
        # Nobody would wait for the child, which would continue to write.
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        raise
    finally:
        os.close(reading)
    # Half an answer is none.
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0:
        answered: Returned[T] | Raised = pickle.loads(answer)
        return answered
    return Died(pid, _how_it_ended(status))


def _await(pid: int, reading: int, interrupted: Callable[[], bool]) -> tuple[bytes, int]:
    answer, is_told = b"", False
    while True:
        if not is_told and interrupted():
            is_told = True
            os.kill(pid, signal.SIGINT)
        if select.select([reading], [], [], _POLL_S)[0]:
            received = _read(reading)
            answer += received
            if received:
                continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            # A process that the child has left may keep the pipe open, so its end is not waited for.
            while received := _read(reading):
                answer += received
            return answer, status


def _read(pipe: int) -> bytes:
    try:
        return os.read(pipe, _CHUNK)
    except BlockingIOError:
        return b""


def _answer(work: Callable[[], T], writing: int) -> NoReturn:
    """Ends this process without its parent's exit handlers."""
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
    except Exception:  # noqa: BLE001 - of an error of a user's code
        return pickle.dumps(Raised(CkptError(f"{type(error).__name__}: {error}"), trace))
    return data


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"ended with exit status {os.WEXITSTATUS(status)}"
