"""What the catalog is owed: one that is away for a moment ends no query, and leaves nobody without an answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dagster_ckpt.errors import CatalogError, LeaseLostError

Change = Callable[[], object]


class OwedChanges:
    """Changes of the catalog that are made at once, or else again until it takes them, in their order.

    Each may be made twice: an answer may be lost on its way. A process that is not the writer any more owes nothing:
    what it wanted to say is for its successor to say.
    """

    def __init__(self) -> None:
        self._owed: deque[Change] = deque()

    def make(self, change: Change) -> None:
        """Make a change, after those that are still owed."""
        self._owed.append(change)
        self.make_up()

    def make_up(self) -> None:
        """Make what is owed, as far as the catalog takes it now."""
        try:
            while self._owed:
                self._owed[0]()
                self._owed.popleft()
        except LeaseLostError:
            self._owed.clear()
        except CatalogError:
            return
