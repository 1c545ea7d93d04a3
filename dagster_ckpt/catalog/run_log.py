"""What the log of a Dagster run shows of a stream: a line a minute about periodic checkpoints, and every other line.

Dagster keeps each line of a run forever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from dagster_ckpt.catalog.records import EventType, SnapshotTrigger
from dagster_ckpt.values.modes import SnapshotKind

ROUTINE_INTERVAL_S = 60

Send = Callable[[int, str], object]
_TAKEN = ("completed", "renewed")


class RunLog:
    """Passes the transitions of one stream on, in order.

    The first periodic checkpoint completed in each minute is passed on. The others are counted; the newest of them
    precedes the next line that is not about periodic checkpoints.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_running = False
        self._asked_for: set[object] = set()
        self._minute: float | None = None
        self._held: logging.LogRecord | None = None
        self._counted: Counter[str] = Counter()

    def take(self, record: logging.LogRecord) -> None:
        what = self._routine(record)
        if what is None:
            self.flush()
            self._send(record.levelno, record.getMessage())
            return
        self._counted[what] += 1
        if what not in _TAKEN:
            return
        self._held = record
        minute = record.created // ROUTINE_INTERVAL_S
        if minute != self._minute:
            self._minute = minute
            self.flush()

    def flush(self) -> None:
        """Pass on the checkpoint that is held back, if any."""
        held, counted = self._held, self._counted
        if held is None:
            return
        self._held, self._counted = None, Counter()
        counts = ", ".join(f"{counted[what]:,} {what}" for what in (*_TAKEN, "deleted") if counted[what])
        several = sum(counted[what] for what in _TAKEN) > 1
        self._send(held.levelno, held.getMessage() + (f"; since the previous line: {counts}" if several else ""))

    def _routine(self, record: logging.LogRecord) -> str | None:
        """What happened to a periodic checkpoint while the query runs; None for any other line."""
        event, number, trigger = (getattr(record, name, None) for name in ("event", "ckpt_number", "ckpt_trigger"))
        if event in (EventType.EXECUTION_RUNNING, EventType.EXECUTION_ENDED):
            self._is_running = event == EventType.EXECUTION_RUNNING
        if getattr(record, "ckpt_kind", None) != SnapshotKind.CHECKPOINT or not self._is_running:
            return None
        if trigger not in (None, SnapshotTrigger.PERIODIC):
            self._asked_for.add(number)
        if number in self._asked_for or event == EventType.CHECKPOINT_FAILED:
            return None
        if event is None:
            return "triggered" if trigger is not None else "renewed"
        return "completed" if event == EventType.CHECKPOINT_COMPLETED else "deleted"
