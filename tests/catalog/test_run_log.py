"""A Dagster run keeps one line a minute about periodic checkpoints, and every other line."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from dagster_ckpt.catalog.event_log import RunLog, log_event, log_message, log_renewed, log_triggered
from dagster_ckpt.catalog.records import EventType, SnapshotTrigger
from dagster_ckpt.values.modes import SnapshotKind

STREAM = "orders"


class Told:
    """What a run's log shows of transitions that are logged at given seconds."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.log = RunLog(lambda _level, message: self.lines.append(message))
        self.now_s = 0.0
        self.handler = logging.Handler()
        self.handler.emit = self._emit  # type: ignore[method-assign]

    def _emit(self, record: logging.LogRecord) -> None:
        record.created = self.now_s
        self.log.take(record)

    def at(self, now_s: float, log: Callable[..., None], *args: Any) -> None:
        self.now_s = now_s
        log(*args)

    def event(self, now_s: float, event: EventType, number: int | None = None, **payload: Any) -> None:
        kind = {"kind": SnapshotKind.CHECKPOINT, "number": number} if number is not None else {}
        self.at(now_s, log_event, STREAM, event, {**kind, **payload})

    def checkpoint(self, now_s: float, number: int, trigger: SnapshotTrigger = SnapshotTrigger.PERIODIC) -> None:
        """One that deletes the one before."""
        self.at(now_s, log_triggered, _row(number, trigger))
        self.event(now_s, EventType.CHECKPOINT_COMPLETED, number, full_bytes=1000, batch_id=number)
        self.event(now_s, EventType.SNAPSHOT_DELETED, number - 1, reason="subsumed")


def _row(number: int, trigger: SnapshotTrigger = SnapshotTrigger.PERIODIC) -> Mock:
    return Mock(stream_id=STREAM, number=number, kind=SnapshotKind.CHECKPOINT, trigger=trigger, batch_id=number)


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    package = logging.getLogger("dagster_ckpt")
    package.addHandler(told.handler)
    before, _ = package.level, package.setLevel(logging.INFO)
    told.event(0, EventType.EXECUTION_RUNNING, to_batch=3)
    told.lines.clear()
    yield told
    package.removeHandler(told.handler)
    package.setLevel(before)


def completed(number: int) -> str:
    return f"Completed checkpoint {number} of stream orders: 1.0 kB, batch {number}"


def test_an_hour_of_checkpoints_every_ten_seconds_is_a_line_a_minute(told: Told) -> None:
    for number in range(360):
        told.checkpoint(10 * number, number)

    assert len(told.lines) == 60
    assert told.lines[:2] == [completed(0), f"{completed(6)}; since the previous line: 6 completed, 6 deleted"]


def test_a_checkpoint_every_ten_minutes_is_a_line_as_it_is(told: Told) -> None:
    for number in range(3):
        told.checkpoint(600 * number, number)

    assert told.lines == [completed(0), completed(1), completed(2)]


def test_what_was_held_back_precedes_a_failure_and_the_end(told: Told) -> None:
    for number in range(3):
        told.checkpoint(number, number)
    told.event(4, EventType.CHECKPOINT_FAILED, 3, reason="no disk")
    told.checkpoint(5, 4)
    told.at(6, log_renewed, _row(4))
    told.event(7, EventType.EXECUTION_ENDED, status="CANCELED", reason="a test")
    told.event(8, EventType.SNAPSHOT_DELETED, 4, reason="the end")

    assert told.lines == [
        completed(0),
        f"{completed(2)}; since the previous line: 2 completed, 3 deleted",
        "Failed checkpoint 3 of stream orders: no disk",
        "Renewed checkpoint 4 of stream orders: no batch since batch 4; since the previous line: 1 completed, "
        "1 renewed, 1 deleted",
        "Stream orders is CANCELED: a test",
        "Deleted checkpoint 4 of stream orders: the end",
    ]


def test_what_a_person_asked_for_and_other_lines_are_shown_at_once(told: Told) -> None:
    told.checkpoint(0, 1)
    told.checkpoint(1, 2, SnapshotTrigger.MANUAL)
    told.at(2, log_message, STREAM, "something")

    assert told.lines == [
        completed(1),
        "Triggering checkpoint 2 (type=MANUAL) of stream orders",
        completed(2),
        "Stream orders: something",
    ]


def test_the_last_one_is_shown_when_the_log_closes(told: Told) -> None:
    told.checkpoint(0, 1)
    told.checkpoint(1, 2)
    told.log.flush()
    told.log.flush()

    assert told.lines == [completed(1), completed(2)]
