"""The lease lost before each file call and transaction of an operation; `lost_lease` does it before larger steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.io.local import LocalFileIO
from tests.support.lease_losers import CASES
from tests.support.lost_lease import CATALOG_STEPS, Scene, Steps, lost_at
from tests.support.power_loss import CATALOG, Calls, Disk, Ran, Trouble
from tests.support.rewind_history import History
from tests.torture.faults import LeaseFault, in_child

_NEVER = 10**9


class _FileCalls(Calls):
    """The calls of the operating system that change files, each a step. Nothing waits for another thread's."""

    def __init__(self, root: Path, take: Callable[[str], None]) -> None:
        super().__init__(root, Trouble(_NEVER), lambda _calls: None)
        self._take = take
        self._lock = contextlib.nullcontext()  # type: ignore[assignment]

    def _hit(self, what: str, *, changes: bool = True) -> None:
        self._take(what)


class SystemSteps(Steps):
    """Steps as the operating system and the catalog see them. Only for a process that ends soon."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch, at: int, come: Callable[[], bool]) -> None:
        super().__init__(patch, at, come)
        _FileCalls(root, self.take).install()

    @staticmethod
    def counted() -> list[tuple[Any, str]]:
        """What is a step beside file calls."""
        return CATALOG_STEPS


def make(name: str, root: Path) -> None:
    """What the old process finds."""
    scene = _scene(root, History(root))
    CASES[name].before(scene)
    scene.history.close()


def lose(name: str, disk: Disk, fault: LeaseFault, call: int) -> Ran:
    """Do an operation from the frozen disk, in a process that loses its lease before a step; what came of it."""
    disk.thaw()
    case = CASES[name]

    def work(_die: Callable[[Sequence[str]], None]) -> Ran:
        LocalFileIO.can_rename = fault is LeaseFault.LOST
        scene = _scene(disk.root, History.reopened(disk.root))
        try:
            lost, seen = lost_at(scene, case.old, call - 1, steps_of=partial(SystemSteps, disk.root), **case.options)
        except Exception as error:  # noqa: BLE001 - told to the parent
            return Ran((), reached=True, error=error)
        return Ran(tuple(seen), reached=lost)

    return in_child(work)


def _scene(root: Path, history: History) -> Scene:
    return Scene(root, history, f"sqlite:///{root / CATALOG}")
