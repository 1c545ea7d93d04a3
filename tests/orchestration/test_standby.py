"""When a spare process is started, replaced and handed over, with played processes and a played clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.child_process import DELAY_S, LONGEST_DELAY_S, Spare, Standby
from dagster_ckpt.orchestration.stream import StreamSpec


@dataclass
class Played:
    pid: int
    is_ready: bool = False
    end_of_it: str | None = None
    is_ended: bool = False

    def how_it_ended(self) -> str | None:
        return self.end_of_it

    def end(self) -> None:
        self.is_ended = True


@dataclass
class Stage:
    now_s: float = 0.0
    started: list[Played] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    has_memory: bool = True

    def start(self) -> Spare[None]:
        if not self.has_memory:
            raise OSError("Cannot allocate memory")
        self.started.append(Played(len(self.started)))
        return self.started[-1]  # type: ignore[return-value]

    def standby(self) -> Standby[None]:
        return Standby(self.start, self.said.append, clock=lambda: self.now_s)

    def pass_s(self, standby: Standby[None], seconds: float) -> None:
        """Time passes in steps of a second, and `tend` is called in each."""
        for _ in range(round(seconds)):
            self.now_s += 1
            standby.tend()


def test_a_spare_is_started_once_the_driver_has_had_time_to_start() -> None:
    stage = Stage()
    standby = stage.standby()

    stage.pass_s(standby, DELAY_S - 1)
    assert stage.started == []
    stage.pass_s(standby, 100)
    [spare] = stage.started
    assert stage.said == []

    spare.is_ready = True
    stage.pass_s(standby, 100)
    assert stage.said == ["The spare process 0 is ready"]


def test_a_spare_is_handed_over_once_and_another_one_follows() -> None:
    stage = Stage()
    standby = stage.standby()
    stage.pass_s(standby, DELAY_S)

    assert standby.take() is stage.started[0]
    assert standby.take() is None
    stage.pass_s(standby, DELAY_S - 1)
    assert len(stage.started) == 1
    stage.pass_s(standby, 1)
    assert standby.take() is stage.started[1]


def test_a_spare_that_has_just_ended_is_not_handed_over() -> None:
    stage = Stage()
    standby = stage.standby()
    stage.pass_s(standby, DELAY_S)
    stage.started[0].end_of_it = "was killed by SIGKILL"

    assert standby.take() is None
    assert stage.said == [
        "The spare process 0 was killed by SIGKILL; the stream continues, and the next one is started in 15 s"
    ]


def test_spares_that_end_are_replaced_less_and_less_often() -> None:
    stage = Stage()
    standby = stage.standby()
    began = []
    while len(began) < 12:
        stage.pass_s(standby, 1)
        if len(stage.started) > len(began):
            began.append(stage.now_s)
            stage.started[-1].end_of_it = "ended with exit status 1"

    # Its end is seen a second later.
    pauses = [later - earlier - 1 for earlier, later in pairwise(began)]
    assert pauses[:3] == [DELAY_S, 2 * DELAY_S, 4 * DELAY_S]
    assert max(pauses) == pauses[-1] == LONGEST_DELAY_S


def test_a_machine_that_cannot_start_one_does_not_end_the_stream() -> None:
    stage = Stage(has_memory=False)
    standby = stage.standby()

    stage.pass_s(standby, DELAY_S)
    assert "No spare process could be started (Cannot allocate memory)" in stage.said[0]
    stage.has_memory = True
    stage.pass_s(standby, DELAY_S)
    assert len(stage.started) == 1


def test_a_log_that_fails_does_not_end_the_stream() -> None:
    def fails(_: str) -> None:
        raise OSError("the database is away")

    stage = Stage()
    standby: Standby[None] = Standby(stage.start, fails, clock=lambda: stage.now_s)
    stage.pass_s(standby, DELAY_S)
    stage.started[0].is_ready = True
    stage.pass_s(standby, 1)

    assert standby.take() is stage.started[0]


def test_without_one_there_is_none_and_the_end_ends_it() -> None:
    stage = Stage()
    none: Standby[None] = Standby(None, stage.said.append, clock=lambda: stage.now_s)
    stage.pass_s(none, 100)
    assert none.take() is None

    standby = stage.standby()
    stage.pass_s(standby, 100)
    standby.end()
    assert stage.started[0].is_ended


def test_a_spare_that_could_not_take_over_is_refused_where_it_is_written() -> None:
    with pytest.raises(OptionError, match="standby=True and restart_in_run=False"):
        StreamSpec.of("orders", standby=True, restart_in_run=False)
