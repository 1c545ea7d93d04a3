"""The recovery line of streams that read each other, against every combination of their snapshots.

A schedule lets streams commit, read, take snapshots and go back at random, and knows the rows of every snapshot. Only
batch numbers and timelines, as a snapshot records them, are given to the code.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest

from dagster_ckpt.catalog.history import past_of
from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.stream_graph import EMPTY, Point, RecoveryLine, recovery_line, topological
from dagster_ckpt.stream.edges import Edge, EdgeKind, Read

GRAPHS = {
    "chain": {"a": [], "b": ["a"], "c": ["b"]},
    "diamond": {"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]},
}
Log = list[frozenset[int]]


@dataclass
class Snapshot:
    """The rows that a stream had read of each upstream, and those of its own batches."""

    name: str
    timeline: int
    log: Log
    read: dict[str, frozenset[int]]
    reads: tuple[Read, ...]

    @property
    def rows(self) -> frozenset[int]:
        return frozenset().union(*self.log)


@dataclass
class Stage:
    timeline: int = 0
    begins: dict[int, tuple[int, int]] = field(default_factory=dict)
    log: Log = field(default_factory=list)
    read: dict[str, frozenset[int]] = field(default_factory=dict)
    taken: list[Snapshot] = field(default_factory=list)

    def restorable(self) -> list[Snapshot]:
        past = past_of(self.timeline, self.begins)
        there = [
            each
            for each in self.taken
            if each.timeline == self.timeline or len(each.log) - 1 <= past.get(each.timeline, -1)
        ]
        return there[::-1]

    def points(self) -> list[Point]:
        return [self.point(each) for each in self.restorable()]

    def point(self, snapshot: Snapshot) -> Point:
        return Point(snapshot.name, len(snapshot.log) - 1, snapshot.timeline, self.begins, snapshot.reads)


class Schedule:
    def __init__(self, graph: dict[str, list[str]], seed: int, *, to_any: bool = False) -> None:
        """`to_any`: a rewind may also go to a snapshot that an earlier rewind left behind."""
        self.graph, self.random, self.to_any = graph, random.Random(seed), to_any
        self.rows = itertools.count()
        self.stages = {name: Stage() for name in graph}
        for _ in range(60):
            name = self.random.choice(list(graph))
            self.random.choices([self.commit, self.snapshot, self.rewind], [10, 5, 1])[0](name)

    def commit(self, name: str) -> None:
        stage = self.stages[name]
        for upstream in self.graph[name]:
            log = self.stages[upstream].log
            upto = self.random.randint(0, len(log))
            stage.read[upstream] = stage.read.get(upstream, frozenset()).union(*log[:upto])
        stage.log.append(frozenset(next(self.rows) for _ in range(self.random.randint(0, 2))))

    def snapshot(self, name: str) -> None:
        stage = self.stages[name]
        if stage.log:
            reads = tuple(self.read(upstream, stage.read.get(upstream, frozenset())) for upstream in self.graph[name])
            stage.taken.append(Snapshot(str(next(self.rows)), stage.timeline, list(stage.log), dict(stage.read), reads))

    def read(self, upstream: str, rows: frozenset[int]) -> Read:
        """As `stream.edges` finds it in the log of the sink."""
        stage = self.stages[upstream]
        batch = max((number for number, batch in enumerate(stage.log) if batch & rows), default=None)
        undone = len(rows - frozenset().union(*stage.log))
        return Read("0", upstream, "sink", EdgeKind.FILES, timeline=stage.timeline, batch=batch, undone=undone)

    def rewind(self, name: str) -> None:
        stage = self.stages[name]
        choices = stage.taken if self.to_any else stage.restorable()
        if choices:
            to = self.random.choice(choices)
            newest = max([stage.timeline, *stage.begins])
            stage.begins = {**stage.begins, newest + 1: (to.timeline, len(to.log) - 1)}
            stage.timeline, stage.log, stage.read = newest + 1, list(to.log), dict(to.read)

    def line(self) -> RecoveryLine:
        return recovery_line(list(self.graph), {name: stage.points() for name, stage in self.stages.items()})

    def greatest(self) -> dict[str, str]:
        """By trying every combination."""
        names = list(self.graph)
        choices = [[*self.stages[name].restorable(), None] for name in names]
        good = [
            indexes
            for indexes in itertools.product(*(range(len(each)) for each in choices))
            if self.is_consistent({name: choices[at][indexes[at]] for at, name in enumerate(names)})
        ]
        best = min(good, key=sum)
        assert all(all(mine <= other for mine, other in zip(best, each, strict=True)) for each in good), (
            "it is not the greatest"
        )
        chosen = {name: choices[at][best[at]] for at, name in enumerate(names)}
        return {name: each.name if each else EMPTY.name for name, each in chosen.items()}

    def is_consistent(self, chosen: dict[str, Snapshot | None]) -> bool:
        for name, upstreams in self.graph.items():
            mine = chosen[name]
            for upstream in upstreams if mine is not None else ():
                theirs = chosen[upstream]
                if mine is not None and not mine.read.get(upstream, frozenset()) <= (theirs.rows if theirs else set()):
                    return False
        return True


@pytest.mark.parametrize("graph", GRAPHS)
def test_line_is_the_greatest_consistent_combination(graph: str) -> None:
    for seed in range(200):
        schedule = Schedule(GRAPHS[graph], seed)

        line = schedule.line()

        assert {member.stream_id: member.point.name for member in line.members} == schedule.greatest(), seed
        assert line.is_proven


def test_line_is_consistent_after_a_rewind_was_itself_undone() -> None:
    for seed in range(200):
        schedule = Schedule(GRAPHS["diamond"], seed, to_any=True)

        chosen = {
            member.stream_id: next((each for each in stage.taken if each.name == member.point.name), None)
            for member, stage in zip(schedule.line().members, schedule.stages.values(), strict=True)
        }

        assert schedule.is_consistent(chosen), seed


def test_schedules_step_back_rewind_and_reach_empty_state() -> None:
    lines = []
    for seed in range(200):
        lines.append(Schedule(GRAPHS["chain"], seed, to_any=True).line())

    assert sum(1 for line in lines if any(member.skipped for member in line.members)) > 50
    assert any("rewind undid" in why for line in lines for member in line.members for why in member.skipped)
    assert any(" on timeline " in why for line in lines for member in line.members for why in member.skipped)


def read_of(upstream: str, batch: int | None, **values: object) -> Read:
    return Read("0", upstream, "FileSink[/a]", **{"kind": EdgeKind.FILES, "batch": batch, **values})  # type: ignore[arg-type]


def test_each_step_back_has_its_reason() -> None:
    points = {
        "a": [Point("chk-3", 11)],
        "b": [Point("chk-9", 6, reads=(read_of("a", 14),)), Point("chk-8", 5, reads=(read_of("a", 11),))],
    }

    assert recovery_line("ab", points).messages() == [
        "a: chk-3 at batch 11",
        "b: chk-8 at batch 5",
        "  not chk-9: it has read batch 14 of a, and chk-3 ends at batch 11",
    ]


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        (None, "chk-1 of b does not record what it has read"),
        (
            (read_of("a", None, kind=EdgeKind.UNKNOWN, why="the position in a source of kind delta is"),),
            "how far b has read FileSink[/a] of a: the position in a source of kind delta is not recorded by batch",
        ),
    ],
)
def test_edge_of_unknown_kind_is_named(reads: tuple[Read, ...] | None, message: str) -> None:
    line = recovery_line("ab", {"a": [Point("chk-1", 1)], "b": [Point("chk-1", 1, reads=reads)]})

    assert not line.is_proven
    assert line.unproven == (message,)


def test_stream_outside_the_selection_does_not_go_back() -> None:
    line = recovery_line("b", {"b": [Point("chk-1", 1, reads=(read_of("a", 99),))]})

    assert line.messages() == ["b: chk-1 at batch 1"]


def test_circle_is_refused() -> None:
    edges = [Edge(reader, "0", upstream, "s", EdgeKind.FILES) for reader, upstream in ("ab", "ba")]

    with pytest.raises(OptionError, match=r"a, b read each other's output in a circle"):
        topological("ab", edges)
