"""Keeps a spare process for a stream: starts one, replaces one that has ended, and hands it over."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from dagster_ckpt.orchestration.child_process import Spare

T = TypeVar("T")

# A spare would slow down the driver that starts at the same time.
DELAY_S = 15.0
# Between spares that end one after another, such as on a machine without memory for them.
LONGEST_DELAY_S = 900.0


class Standby(Generic[T]):
    """At most one spare; `tend` does what is due. `start` is None if there is to be none. `clock` in s."""

    def __init__(
        self,
        start: Callable[[], Spare[T]] | None,
        report: Callable[[str], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._report = report
        self._clock = clock
        self._spare: Spare[T] | None = None
        self._is_reported = False
        self._lost = 0
        self._due_s = clock() + DELAY_S

    def tend(self) -> None:
        """Start a spare if it is time, and see how the present one is."""
        if self._spare is None:
            if self._start is not None and self._clock() >= self._due_s:
                self._spare, self._is_reported = self._started(self._start), False
            return
        ended = self._spare.how_it_ended()
        if ended is not None:
            self._lose(f"The spare process {self._spare.pid} {ended}")
        elif not self._is_reported and self._spare.is_ready:
            self._is_reported = True
            self._say(f"The spare process {self._spare.pid} is ready")

    def take(self) -> Spare[T] | None:
        """The spare, if there is one, for the caller to use; another one follows."""
        if self._spare is not None:
            self.tend()
        taken, self._spare = self._spare, None
        if taken is not None:
            self._lost, self._due_s = 0, self._clock() + DELAY_S
        return taken

    def end(self) -> None:
        """End the spare."""
        if self._spare is not None:
            self._spare.end()
            self._spare = None

    def _started(self, start: Callable[[], Spare[T]]) -> Spare[T] | None:
        try:
            return start()
        except OSError as error:
            self._lose(f"No spare process could be started ({error})")
            return None

    def _lose(self, what: str) -> None:
        self._spare = None
        delay_s = min(DELAY_S * 2**self._lost, LONGEST_DELAY_S)
        self._lost += 1
        self._due_s = self._clock() + delay_s
        self._say(f"{what}; the stream continues, and the next one is started in {delay_s:.0f} s")

    def _say(self, what: str) -> None:
        # A log that cannot be written must not end the driver.
        with suppress(Exception):
            self._report(what)
