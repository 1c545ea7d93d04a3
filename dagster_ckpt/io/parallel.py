"""Run tasks in parallel and fail fast: if one fails, the rest are canceled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dagster_ckpt.errors import SnapshotAbortedError

Part = TypeVar("Part")
Result = TypeVar("Result")
# Raises SnapshotAbortedError once another task has failed.
CancelCheck = Callable[[], None]


def in_threads(count: int, parts: Sequence[Part], work: Callable[[Part, CancelCheck], Result]) -> list[Result]:
    """In up to `count` threads, with the results in the order of the inputs.

    Raises the error of the task that failed first; a single task runs in the caller's thread.
    """
    failed = False

    def check_canceled() -> None:
        if failed:
            raise SnapshotAbortedError("Another part of the snapshot failed, so this part was canceled.")

    def do(part: Part) -> Result:
        nonlocal failed
        try:
            return work(part, check_canceled)
        except BaseException:
            failed = True
            raise

    if count < 2 or len(parts) < 2:
        return [do(part) for part in parts]
    with ThreadPoolExecutor(count, thread_name_prefix="snapshot") as pool:
        futures = [pool.submit(do, part) for part in parts]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # Errors of canceled tasks come last.
    for error in sorted(errors, key=lambda error: isinstance(error, SnapshotAbortedError)):
        raise error
    return [future.result() for future in futures]


def start_in_thread(work: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by `Future.result`
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    return future
