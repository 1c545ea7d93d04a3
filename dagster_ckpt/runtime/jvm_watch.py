"""Kills a JVM that no longer answers, so that nothing waits for it forever.

A JVM that hangs (out of memory, a deadlock, a paused process) keeps its driver in a call that never returns. The driver
keeps its lease all the while, so no successor could start. Flink's counterpart is `heartbeat.timeout`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from dagster_ckpt.catalog.transitions import log_transition
from dagster_ckpt.stream.liveness import JVM_GRACE_S, Liveness, ProcessIdentity
from dagster_ckpt.values.durations import rounded_duration

# No call of a supervised query takes as long, and no collection of garbage should.
LONGEST_CALL_MS = 600_000
_LOOK_S = 1.0
# For the JVM to print its stacks.
_PRINT_S = 3.0


class JvmWatch:
    """Watches the JVM calls of one supervised query, in a background thread.

    Args:
        stream_id: The stream, for the log.
        jvm: The JVM; None, or one that is not of this machine, is never ended.
        call: Returns something that identifies the call that is waiting for the JVM; None: no call is.
        limit_ms: How long a call may take.
    """

    def __init__(
        self, stream_id: str, jvm: ProcessIdentity | None, call: Callable[[], object | None], *, limit_ms: int
    ) -> None:
        self._stream_id = stream_id
        self._jvm = jvm
        self._call = call
        self._limit_ms = limit_ms
        self._over = threading.Event()
        self._ended: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"jvm-watch-{stream_id}", daemon=True)

    @property
    def ended(self) -> str | None:
        """Why the JVM was killed, once it has provably ended; None if it was not."""
        return self._ended

    def __enter__(self) -> JvmWatch:
        if self._jvm is not None and self._jvm.liveness() is Liveness.ALIVE:
            self._thread.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            # Afterwards, `ended` is final.
            self._thread.join()

    def _watch(self) -> None:
        # Looks are counted, not the time: where the whole machine was paused, the JVM gets its time again.
        look_ms = min(_LOOK_S * 1000, self._limit_ms / 4)
        waited_ms, before = 0.0, None
        while self._ended is None and not self._over.wait(look_ms / 1000):
            call = self._call()
            waited_ms = waited_ms + look_ms if call is not None and call is before else 0.0
            before = call
            if waited_ms >= self._limit_ms and self._jvm is not None:
                self._end(self._jvm, call)
                waited_ms = 0.0

    def _end(self, jvm: ProcessIdentity, call: object) -> None:
        with suppress(ProcessLookupError, PermissionError):
            jvm.send(signal.SIGQUIT)
        self._over.wait(_PRINT_S)
        if self._call() is not call and jvm.liveness() is Liveness.ALIVE:
            # It has answered after all. One that runs with -Xrs has ended at SIGQUIT.
            return
        what = f"its JVM, process {jvm.pid}, did not answer for {rounded_duration(self._limit_ms)} and was killed"
        if jvm.kill(within_s=JVM_GRACE_S):
            self._ended = what
            told = f"{what}. If it still could, it has printed the stacks of its threads"
        else:
            told = f"{what}, but has not ended. Kill it: the query may still write"
        log_transition(self._stream_id, f"Stream {self._stream_id}: {told}", level=logging.ERROR)
