"""Detect a stalled query, and kill a JVM that does not answer (Flink: `heartbeat.timeout`).

A stalled query looks alive: it keeps its lease, and checkpoints of the same batch complete. A hanging JVM keeps its
driver in a call, and so the lease from a successor. Polling sources, waiting for a trigger, and a long batch whose
tasks finish are activity.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from dagster_ckpt.catalog.event_log import log_transition
from dagster_ckpt.spark.query.query import QueryActivity, TaskCounts
from dagster_ckpt.stream.liveness import JVM_GRACE_S, Liveness, ProcessIdentity
from dagster_ckpt.values.durations import rounded_duration

# Most batches have finished by then.
LOOK_AT_TASKS_AFTER_MS = 10_000


@dataclass(frozen=True)
class QueryInactivity:
    doing: str
    is_idle: bool
    stalled_for_ms: int
    tasks: TaskCounts | None = None

    def is_over(self, limit_ms: int) -> bool:
        """Whether the query is stalled for longer. One with a running task is slow, not stalled."""
        works = self.tasks is not None and self.tasks.running > 0
        return self.stalled_for_ms > limit_ms and not (self.is_idle or works)

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of_record(record: object) -> QueryInactivity | None:
        if not isinstance(record, Mapping):
            return None
        try:
            tasks = record.get("tasks")
            return QueryInactivity(
                doing=str(record["doing"]),
                is_idle=bool(record["is_idle"]),
                stalled_for_ms=int(record["stalled_for_ms"]),
                tasks=None if tasks is None else TaskCounts(**tasks),
            )
        except (KeyError, TypeError, ValueError):
            return None


class StallDetector:
    def __init__(self, now_ms: int) -> None:
        self._moved_at_ms = now_ms
        self._batch: int | None = None
        self._activity: QueryActivity | None = None
        self._tasks: TaskCounts | None = None

    def note(
        self, activity: QueryActivity, *, batch: int | None, tasks: Callable[[], TaskCounts | None], now_ms: int
    ) -> QueryInactivity:
        if activity.is_idle or activity != self._activity or batch != self._batch:
            self._moved(now_ms)
        self._activity, self._batch = activity, batch
        counts = tasks() if now_ms - self._moved_at_ms >= LOOK_AT_TASKS_AFTER_MS else None
        if counts is not None:
            if self._tasks is not None and counts != self._tasks:
                self._moved(now_ms)
            self._tasks = counts
        return QueryInactivity(activity.doing, activity.is_idle, now_ms - self._moved_at_ms, counts)

    def _moved(self, now_ms: int) -> None:
        self._moved_at_ms = now_ms
        self._tasks = None


# No call of a supervised query, and no garbage collection, should take as long.
LONGEST_CALL_MS = 600_000
_LOOK_S = 1.0
# Time for the JVM to print its stacks.
_PRINT_S = 3.0


class JvmWatch:
    """Watches in a thread which `call` of a query waits for the JVM, and kills a hanging JVM of this machine."""

    def __init__(
        self, stream_id: str, jvm: ProcessIdentity | None, call: Callable[[], object | None], *, limit_ms: int
    ) -> None:
        self._stream_id = stream_id
        self._jvm = jvm
        self._call = call
        self._limit_ms = limit_ms
        self._over = threading.Event()
        # Why the JVM was killed, once it has provably ended.
        self.ended: str | None = None
        self._thread = threading.Thread(target=self._watch, name=f"jvm-watch-{stream_id}", daemon=True)

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
        # Looks are counted, not the time: after a pause of the whole machine the JVM gets its time again.
        look_ms = min(_LOOK_S * 1000, self._limit_ms / 4)
        waited_ms, before = 0.0, None
        while self.ended is None and not self._over.wait(look_ms / 1000):
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
            # It has answered after all. A JVM that runs with -Xrs ends at SIGQUIT.
            return
        what = f"its JVM, process {jvm.pid}, did not answer for {rounded_duration(self._limit_ms)} and was killed"
        if jvm.kill(within_s=JVM_GRACE_S):
            self.ended = what
            told = f"{what}. If it still could, it has printed the stacks of its threads"
        else:
            told = f"{what}, but has not ended. Kill it: the query may still write"
        log_transition(self._stream_id, f"Stream {self._stream_id}: {told}", level=logging.ERROR)
