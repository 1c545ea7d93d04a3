"""Doing the parts of one work at the same time, of which none is worth anything without the others."""

from __future__ import annotations

import _thread
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dagster_ckpt.errors import SnapshotAbortedError

Part = TypeVar("Part")
Result = TypeVar("Result")
# To be called now and then; raises SnapshotAbortedError once another part has failed.
GoOn = Callable[[], None]


def in_threads(count: int, parts: Sequence[Part], work: Callable[[Part, GoOn], Result]) -> list[Result]:
    """Do some parts in threads; a single one, or with a single thread, in the caller's.

    Args:
        count: At most so many at a time.
        parts: The parts.
        work: Does one.

    Returns:
        The results, in the order of the parts.

    Raises:
        Exception: The error of the part that failed first; the others gave up because of it.
    """
    failed = False

    def go_on() -> None:
        if failed:
            raise SnapshotAbortedError("Another part of the snapshot failed, so this one is not worth going on with.")

    def do(part: Part) -> Result:
        nonlocal failed
        try:
            return work(part, go_on)
        except BaseException:
            failed = True
            raise

    if count < 2 or len(parts) < 2:
        return [do(part) for part in parts]
    with ThreadPoolExecutor(count, thread_name_prefix="snapshot") as pool:
        futures = [pool.submit(do, part) for part in parts]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # Those that gave up come last.
    for error in sorted(errors, key=lambda error: isinstance(error, SnapshotAbortedError)):
        raise error
    return [future.result() for future in futures]


def begin(work: Callable[[], Result]) -> Future[Result]:
    """Do something beside the caller; the error it may raise is the result's.

    Raises:
        RuntimeError: The system gives no more threads.
    """
    future: Future[Result] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - told to the one who asks for the result
            future.set_exception(error)

    # `threading.Thread` would wait until it runs, which takes as long as writing a few hundred kilobytes.
    _thread.start_new_thread(do, ())
    return future
