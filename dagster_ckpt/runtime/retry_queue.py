"""Retries catalog writes that failed because the database was temporarily unavailable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dagster_ckpt.errors import CatalogError, LeaseLostError

Change = Callable[[], object]


class OwedChanges:
    """Catalog writes, applied in order and retried until the catalog accepts them.

    A write may be applied twice, because the response to it may be lost: each has to be idempotent. A process that has
    lost the lease drops its pending writes; they are its successor's to make.
    """

    def __init__(self) -> None:
        self._owed: deque[Change] = deque()

    def make(self, change: Change) -> None:
        """Apply a write after all pending ones, now if the catalog is available."""
        self._owed.append(change)
        self.make_up()

    def make_up(self) -> None:
        """Apply the pending writes until one fails."""
        try:
            while self._owed:
                self._owed[0]()
                self._owed.popleft()
        except LeaseLostError:
            self._owed.clear()
        except CatalogError:
            return
