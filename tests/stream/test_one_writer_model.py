"""One writer, as a model: every interleaving of some processes that start, take over, take snapshots and clean up.

Breadth-first over all states. A process that was overtaken may be frozen before any of its steps for as long as it
likes, as no step of it is ever forced. What the model takes for granted is that a query commits no batch after its
process was overtaken; that is the fencing's affair.

The old design is here as well: it looks whether the lease is held and writes then, and names a directory by its
generation. The model finds what is wrong with it, so it can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

import pytest

KEPT_BATCH = 1


class Step(Enum):
    """What a process does, in this order; CHECK is a step of its own in the old design only."""

    ACQUIRE = "acquire the lease"
    BUILD = "build a live directory"
    SWITCH = "switch the stream to it"
    LOOK = "list the sink's log"
    UNDO = "delete an entry of the sink's log"
    FINISH = "record that the restore is done"
    COMMIT = "commit a batch"
    PUBLISH = "publish a snapshot's bytes"
    COMPLETE = "record the snapshot as complete"
    MARK = "mark the snapshot before as being deleted"
    DELETE = "delete its bytes"
    LIST = "list live directories"
    SWEEP = "delete an older one"
    END = "end"


STEPS = list(Step)
SNAPSHOTS = {Step.PUBLISH, Step.COMPLETE, Step.MARK, Step.DELETE}
# Refused by the catalog in the write itself, or done while the catalog holds the lease.
GUARDED = {Step.SWITCH, Step.UNDO, Step.FINISH, Step.COMPLETE, Step.MARK}
# Asked before, by a call of its own, in both designs.
ASKED_BEFORE = {Step.SWEEP}


@dataclass(frozen=True)
class Process:
    """One that wants to be the writer."""

    step: int = 0
    token: int = 0
    has_checked: bool = False
    directory: str = ""
    seen: int = 0
    marked: int = 0
    doomed: str = ""


@dataclass(frozen=True)
class World:
    """What all share; `processes` is what each has in mind."""

    processes: tuple[Process, ...]
    holder: int | None = None
    token: int = 0
    expired: bool = False
    live: str = "live-1-0"
    generation: int = 1
    pending: bool = False
    directories: frozenset[tuple[str, int]] = frozenset({("live-1-0", 0)})
    sink: frozenset[tuple[int, int]] = frozenset({(1, 0), (2, 0)})
    completed: frozenset[int] = frozenset({100})
    stored: frozenset[int] = frozenset({100})

    def shared_with(self, stale: int) -> object:
        """All of it that is not a stale process's own, or older and in nobody's use."""
        return (
            *(self.live, self.generation, self.pending, self.sink, self.completed, self.holder, self.token),
            frozenset(each for each in self.directories if each[1] > stale or each[0] == self.live),
            self.stored & self.completed,
        )


class TwoWritersError(AssertionError):
    """Two writers."""


def next_worlds(world: World, *, fenced: bool) -> Iterator[tuple[str, World]]:
    if world.holder is not None and not world.expired:
        yield "the lease runs out", replace(world, expired=True)
    if world.holder is not None and world.expired:
        yield "the lease is renewed", replace(world, expired=False)
    for number, process in enumerate(world.processes):
        step = STEPS[process.step]
        if step is Step.END:
            continue
        for what, after in _steps_of(world, number, process, step, fenced=fenced):
            name = f"process {number}: {what}"
            if (
                process.token
                and process.token < world.token
                and after.shared_with(process.token) != world.shared_with(process.token)
            ):
                raise TwoWritersError(f"{name}, after its lease was taken over: {world} -> {after}")
            yield name, after


def _steps_of(world: World, number: int, process: Process, step: Step, *, fenced: bool) -> Iterator[tuple[str, World]]:
    def now(changed: World, mine: Process | None = None, *, on: bool = True) -> World:
        mine = mine or process
        mine = replace(mine, step=mine.step + int(on), has_checked=False)
        others = changed.processes
        return replace(changed, processes=(*others[:number], mine, *others[number + 1 :]))

    is_writer = world.token == process.token
    gives_up = now(world, replace(process, step=len(STEPS) - 1), on=False)
    if step is Step.ACQUIRE:
        if world.holder is None or world.expired:
            token = world.token + 1
            taken = replace(world, holder=number, token=token, expired=False)
            yield step.value, now(taken, replace(process, token=token))
        return
    if step in ASKED_BEFORE or (step in GUARDED and not fenced):
        if not process.has_checked:
            if not is_writer:
                yield "finds its lease lost", gives_up
            else:
                checked = replace(process, has_checked=True)
                others = world.processes
                yield "asks", replace(world, processes=(*others[:number], checked, *others[number + 1 :]))
            return
    elif step in GUARDED and not is_writer:
        yield "is refused", gives_up
        return
    if step is Step.COMMIT and not is_writer:
        yield "was fenced", gives_up
        return
    yield step.value, now(*_done(world, process, step, fenced=fenced))


def _done(world: World, process: Process, step: Step, *, fenced: bool) -> tuple[World, Process]:  # noqa: PLR0911 - a table
    token = process.token
    if step is Step.BUILD:
        name = f"live-{world.generation + 1}" + (f"-{token}" if fenced else "")
        others = {each for each in world.directories if each[0] != name}
        return replace(world, directories=frozenset(others | {(name, token)})), replace(process, directory=name)
    if step is Step.SWITCH:
        return replace(world, live=process.directory, generation=world.generation + 1, pending=True), process
    if step is Step.LOOK:
        return world, replace(process, seen=max((batch for batch, _ in world.sink if batch > KEPT_BATCH), default=0))
    if step is Step.UNDO:
        return replace(world, sink=frozenset(each for each in world.sink if each[0] != process.seen)), process
    if step is Step.FINISH:
        return replace(world, pending=False), process
    if step is Step.COMMIT:
        batch = max(batch for batch, _ in world.sink) + 1
        return replace(world, sink=world.sink | {(batch, token)}), process
    if step is Step.PUBLISH:
        return replace(world, stored=world.stored | {token}), process
    if step is Step.COMPLETE:
        return replace(world, completed=world.completed | {token}), process
    if step is Step.MARK:
        before = min(world.completed)
        return replace(world, completed=world.completed - {before}), replace(process, marked=before)
    if step is Step.DELETE:
        return replace(world, stored=world.stored - {process.marked}), process
    if step is Step.LIST:
        older = (name for name, maker in world.directories if name != process.directory and maker < token)
        return world, replace(process, doomed=min(older, default=""))
    gone = frozenset(each for each in world.directories if each[0] != process.doomed)
    return replace(world, directories=gone), process


def explore(processes: int, *, fenced: bool) -> int:
    """Every reachable world; raises at the first step of an overtaken process that changes what is not its own."""
    first = World((Process(),) * processes)
    seen, frontier = {first}, [first]
    while frontier:
        reached = []
        for world in frontier:
            for name, after in next_worlds(world, fenced=fenced):
                if after not in seen:
                    _is_sound(name, after)
                    seen.add(after)
                    reached.append(after)
        frontier = reached
    return len(seen)


def _is_sound(name: str, world: World) -> None:
    if not any(directory == world.live for directory, _ in world.directories):
        raise TwoWritersError(f"{name}: the stream's live directory is gone: {world}")
    if not world.completed <= world.stored:
        raise TwoWritersError(f"{name}: a complete snapshot has no bytes: {world}")


def test_of_all_interleavings_none_has_two_writers() -> None:
    assert explore(2, fenced=True) > 1_000


@pytest.mark.thorough(but="sinks")
@pytest.mark.parametrize(
    "left_out", [{Step.LOOK, Step.UNDO, Step.FINISH, Step.COMMIT}, SNAPSHOTS], ids=["snapshots", "sinks"]
)
def test_nor_has_any_with_three_processes(monkeypatch: pytest.MonkeyPatch, left_out: set[Step]) -> None:
    monkeypatch.setattr(f"{__name__}.STEPS", [step for step in STEPS if step not in left_out])

    assert explore(3, fenced=True) > 10_000


@pytest.mark.parametrize("broken", [step for step in STEPS if step in GUARDED], ids=lambda step: step.name)
def test_a_write_that_only_looks_before_has_two(monkeypatch: pytest.MonkeyPatch, broken: Step) -> None:
    monkeypatch.setattr(f"{__name__}.GUARDED", GUARDED - {broken})
    monkeypatch.setattr(f"{__name__}.ASKED_BEFORE", ASKED_BEFORE | {broken})

    with pytest.raises(TwoWritersError, match=f"{broken.value}, after its lease was taken over"):
        explore(2, fenced=True)


def test_the_old_design_has_two_writers() -> None:
    with pytest.raises(TwoWritersError):
        explore(2, fenced=False)
