"""One attempt to take an image, and what it does about a running batch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from dagster_ckpt.coordinator.request import TriggerKind
from dagster_ckpt.options import CheckpointingMode, CheckpointOptions


class Alignment(Enum):
    """Which batch an image ends at, if one is running when the attempt begins.

    WAIT_FOR_COMMIT: Aligned. Wait until the running batch is committed and cut there.
    CARRY_IN_FLIGHT: Unaligned. Cut at the newest commit at once, and carry the planned offsets
        of the running batch, so that a restore replays exactly that batch.
    NEWEST_COMMIT: At least once. Cut at the newest commit at once, without the plan of the
        running batch: after a restore it may be planned anew, so its rows may be emitted
        twice, but never lost.
    """

    WAIT_FOR_COMMIT = auto()
    CARRY_IN_FLIGHT = auto()
    NEWEST_COMMIT = auto()


@dataclass(frozen=True)
class Attempt:
    """One attempt to take an image. All times are on the monotonic clock of the events.

    Attributes:
        number: From the job's counter, rising. The `n` of `chk-<n>`; a savepoint takes a number
            too, as in Flink, though its path does not show it.
        kind: What is taken.
        request_id: Whom to answer; None if the timer asked.
        alignment: What to do about a running batch.
        alignment_deadline_ms: When an attempt that waits for a commit gives up waiting and goes
            on as `CARRY_IN_FLIGHT`. None waits until the attempt expires.
        expires_at_ms: When the coordinator aborts the attempt.
    """

    number: int
    kind: TriggerKind
    request_id: str | None
    alignment: Alignment
    alignment_deadline_ms: int | None
    expires_at_ms: int


def alignment_of(options: CheckpointOptions, kind: TriggerKind) -> Alignment:
    """What an attempt does about a running batch when it begins.

    The order of the rules is that of Flink's `CheckpointOptions.forConfig`: the mode decides
    first, a savepoint is never unaligned, and an alignment timeout of 0 does not wait at all.
    """
    if options.mode is CheckpointingMode.AT_LEAST_ONCE:
        return Alignment.NEWEST_COMMIT
    if kind.is_savepoint or not options.unaligned or options.alignment_timeout_ms > 0:
        return Alignment.WAIT_FOR_COMMIT
    return Alignment.CARRY_IN_FLIGHT


def begin_attempt(
    options: CheckpointOptions, *, number: int, kind: TriggerKind, request_id: str | None, now_ms: int
) -> Attempt:
    """An attempt that begins now, with its deadlines.

    Args:
        options: The job's checkpointing options.
        number: Number of the attempt.
        kind: What is taken.
        request_id: Whom to answer; None if the timer asked.
        now_ms: Monotonic time.
    """
    alignment = alignment_of(options, kind)
    may_turn_unaligned = alignment is Alignment.WAIT_FOR_COMMIT and options.unaligned and not kind.is_savepoint
    return Attempt(
        number=number,
        kind=kind,
        request_id=request_id,
        alignment=alignment,
        alignment_deadline_ms=now_ms + options.alignment_timeout_ms if may_turn_unaligned else None,
        expires_at_ms=now_ms + options.timeout_ms,
    )
