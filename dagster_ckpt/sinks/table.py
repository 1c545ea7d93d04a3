"""Tables that remember batches and can go back. Cases of `verdict`: tests/sinks/table_verdicts.yaml."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from dagster_ckpt.errors import CkptError, SinkRollbackError, StorageAccessError
from dagster_ckpt.sinks.sink import Replay, RollBack, Sink, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import StillMine

# Other writers, such as OPTIMIZE, may commit between `plan` and `commit`.
_ATTEMPTS = 10
_AGAIN = "The table is not rolled back. It does not know the new query id, so it accepts the rewound batches again."


class VersionTakenError(Exception):
    """Another commit came after the plan; the table is unchanged."""


class NoSessionError(SinkRollbackError):
    """This process has no Spark session: the start of the stream rolls the table back."""


@dataclass(frozen=True)
class Obstacle:
    """Why a table cannot be rolled back.

    The effect is LOSE if it is unknown what to undo, IRREVERSIBLE if that is known, UNKNOWN if only the start can
    decide.

    Attributes:
        may_stay: Whether the table keeps its rows and gets the batches again under a new query id.
    """

    effect: SinkEffect
    reason: str
    advice: str = ""
    may_stay: bool = False


@dataclass(frozen=True, kw_only=True)
class TablePlan:
    """What a roll-back to a batch would do to a table.

    Attributes:
        moves: Whether there is anything to undo.
        how: Beginning of a sentence, such as "The table is restored to version 3".
        command: Command with which a person does the same.
        others: What others have written since and would lose, such as "versions 4, 5".
        basis: What `commit` needs, such as the table's version at the time.
    """

    moves: bool
    how: str = "Its later rows are deleted"
    command: str = ""
    others: str = ""
    obstacle: Obstacle | None = None
    basis: Any = None


class Step(StrEnum):
    """What a start does to a table; REFUSE: the query is not started."""

    LEAVE = "LEAVE"
    ROLL_BACK = "ROLL_BACK"
    REFUSE = "REFUSE"


@dataclass(frozen=True)
class TableVerdict:
    step: Step
    effect: SinkEffect
    reason: str
    advice: str = ""


def verdict(plan: TablePlan | None, to: RollBack) -> TableVerdict:
    """Decide, from values alone, what a start does to a table."""
    if plan is None and to.batch_id < 0:
        return TableVerdict(Step.LEAVE, SinkEffect.EXACT, "There is no such table yet.")
    if plan is None:
        return TableVerdict(
            Step.LEAVE,
            SinkEffect.LOSE,
            f"There is no such table here: the rows of batches up to {to.batch_id} would be missing.",
            "Bring the table back, or start with accept_loss to begin a new one.",
        )
    if plan.obstacle is not None:
        return _hindered(plan.obstacle, to, others=bool(plan.others))
    back = f"It has to be rolled back to batch {to.batch_id}"
    run = f"run: {plan.command}" if plan.command else "roll it back by hand"
    if plan.others and to.may_repeat:
        return TableVerdict(
            Step.LEAVE,
            SinkEffect.DUPLICATE,
            f"Others have written {plan.others} since. {_AGAIN}",
            f"To undo theirs as well, {run}.",
        )
    if plan.others:
        return TableVerdict(
            Step.REFUSE,
            SinkEffect.IRREVERSIBLE,
            f"{back}, and others have written {plan.others} since: their rows would be undone as well.",
            f"To undo theirs as well, {run}. To leave them and write the batches again, start with new_query_id.",
        )
    if not plan.moves:
        reason = f"The table holds no batch of this stream after {to.batch_id}."
        return TableVerdict(Step.LEAVE, SinkEffect.EXACT, reason)
    if not to.roll_back_tables:
        reason = f"{back}, which this stream leaves to you (roll_back_tables is False)."
        return TableVerdict(
            Step.REFUSE, SinkEffect.IRREVERSIBLE, reason, f"{run[0].upper()}{run[1:]}. Then start again."
        )
    reason = f"{plan.how}: it then holds no batch of this stream after {to.batch_id}."
    return TableVerdict(Step.ROLL_BACK, SinkEffect.EXACT, reason)


def _hindered(obstacle: Obstacle, to: RollBack, *, others: bool) -> TableVerdict:
    is_unsure = obstacle.effect is SinkEffect.LOSE
    repeats = to.may_repeat and (is_unsure or obstacle.may_stay or others)
    if repeats and obstacle.effect is SinkEffect.IRREVERSIBLE:
        return TableVerdict(Step.LEAVE, SinkEffect.DUPLICATE, f"{obstacle.reason} {_AGAIN}")
    is_left = repeats or (is_unsure and to.accepts_loss) or obstacle.effect is SinkEffect.UNKNOWN
    step = Step.LEAVE if is_left else Step.REFUSE
    return TableVerdict(step, obstacle.effect, obstacle.reason, obstacle.advice)


class TableSink(Sink):
    """A table that is rolled back with the stream: override `names`, `last_batch`, `plan`, `commit`, `table_format`."""

    noun = "table"
    table_format: ClassVar[str] = ""
    rolls_back = True

    def plan(self, to: RollBack) -> TablePlan | None:
        """Return what a roll-back would do, without changing anything; None if there is no table.

        Raises:
            StorageAccessError: The table cannot be reached.
            LiveDirectoryError: Its memory of batches cannot be parsed.
            SinkRollbackError: This process cannot roll it back.
        """
        raise NotImplementedError(f"{type(self).__name__} is a TableSink but does not define plan.")

    def commit(self, plan: TablePlan) -> None:
        """Carry out a plan, if possible in one conditional commit.

        Raises:
            VersionTakenError: The table was changed since the plan.
        """
        raise NotImplementedError(f"{type(self).__name__} is a TableSink but does not define commit.")

    def fence(self, plan: TablePlan) -> None:
        """Make what a former lease holder has planned fail, where nothing is undone. Raises as `commit`."""

    def foresee(self, to: RollBack) -> TablePlan | None:
        """Return what `plan` will probably return, where a forecast needs less than a roll-back."""
        return self.plan(to)

    def forecast(self, replay: Replay) -> SinkForecast:
        to = replay.back
        try:
            with self._answering():
                found = verdict(self.foresee(to), to)
        except StorageAccessError as error:
            return self.forecast_as(SinkEffect.UNREACHABLE, str(error))
        except CkptError as error:
            return self.forecast_as(
                SinkEffect.LOSE,
                f"The batches that the table remembers cannot be read from here ({error}): it may skip the rewound "
                "ones.",
                "Roll the table back, or start with new_query_id and accept repeated rows.",
            )
        goes_on = found.step is Step.ROLL_BACK and self.remembers_undone
        continues = " The query continues under a new id." if goes_on else ""
        return self.forecast_as(found.effect, f"{found.reason}{continues}", found.advice)

    def check_roll_back(self, to: RollBack) -> None:
        with self._answering():
            found = self.foresee(to)
        self._refuse(verdict(found, to))

    def roll_back(self, to: RollBack, still_mine: StillMine) -> None:
        """Plan, check and commit, again after `VersionTakenError`; a repeated call finds nothing to undo.

        The lease is checked between plan and commit, so that a successor's commits come after the plan and make this
        commit fail. A table with nothing to undo is fenced.
        """
        if not to.roll_back_tables:
            # A person has rolled it back, or the start is refused.
            self.check_roll_back(to)
            return
        taken: VersionTakenError | None = None
        for _ in range(_ATTEMPTS):
            plan = self.plan(to)
            if plan is None:
                return
            # Before the verdict, which must not blame a successor's writes.
            with still_mine():
                pass
            found = verdict(plan, to)
            self._refuse(found)
            try:
                (self.commit if found.step is Step.ROLL_BACK else self.fence)(plan)
            except VersionTakenError as error:
                taken = error
                continue
            with still_mine():
                pass
            return
        raise SinkRollbackError(
            f"{self._title} could not be rolled back to batch {to.batch_id}: others committed to it during each of "
            f"{_ATTEMPTS} attempts. Stop the other writers, and start again."
        ) from taken

    def _refuse(self, found: TableVerdict) -> None:
        if found.step is Step.REFUSE:
            raise SinkRollbackError(
                f"{self._title} was not changed, and the stream is not started. {found.reason} {found.advice}".rstrip()
            )

    @property
    def _title(self) -> str:
        return f"The {f'{self.table_format} table'.strip()} {self.place or self.name}"

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except CkptError:
            raise
        except Exception as error:
            raise StorageAccessError(
                f"{self._title} cannot be read: {type(error).__name__}: {error}. Make it reachable, then start again."
            ) from error
