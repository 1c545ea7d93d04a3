"""A process that is killed before its n-th change of the world."""

from __future__ import annotations

import os
import signal as signals
from collections.abc import Callable
from typing import Any

import pytest

from dagster_ckpt.catalog.streams import StreamRecords
from dagster_ckpt.io.local import LocalFileIO


class Killed(BaseException):
    """The process ends here."""


# What a start changes in storage and in the catalog.
CHANGES: tuple[tuple[Any, str], ...] = (
    (LocalFileIO, "write"),
    (LocalFileIO, "place"),
    (LocalFileIO, "delete"),
    (LocalFileIO, "delete_all"),
    (LocalFileIO, "rename"),
    (os, "link"),
    (StreamRecords, "switch_live_directory"),
    (StreamRecords, "restore_finished"),
)


class Executioner:
    """Kills the process before the n-th call of functions that change something.

    Args:
        patch: Undoes the patching.
        passing: How many calls succeed before.
        changes: The functions, each with its owner; default: `CHANGES`.
        signal: What a signal raises instead, after which the process may tidy up: one call fails, the next ones work.
        of: Whether a call is the victim's, where other processes are threads too.
        is_real: Kill this very process, with SIGKILL.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        passing: int,
        *changes: tuple[Any, str],
        signal: type[BaseException] | None = None,
        of: Callable[[], bool] = lambda: True,
        is_real: bool = False,
    ) -> None:
        self.left = passing
        self.is_real = is_real
        self.of = of
        self.signal = signal
        for owner, name in changes or CHANGES:
            patch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not self.of():
                return change(*arguments, **named)
            # A killed process does not tidy up either.
            if self.left <= 0 and self.signal is None:
                if self.is_real:
                    os.kill(os.getpid(), signals.SIGKILL)
                raise Killed
            if self.left == 0 and self.signal is not None:
                self.left -= 1
                raise self.signal
            self.left -= 1
            return change(*arguments, **named)

        return call
