"""Retries catalog writes that failed because the database was temporarily unavailable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dagster_ckpt.errors import CatalogError, LeaseLostError

Change = Callable[[], object]


class RetryQueue:
    """Catalog writes, applied in order and retried until the catalog accepts them.

    A write may be applied twice, because the response to it may be lost: each has to be idempotent. A process that has
    lost the lease drops its pending writes; they are its successor's to make.
    """

    def __init__(self) -> None:
        self._pending: deque[Change] = deque()

    def run(self, change: Change) -> None:
        """Apply a write after all pending ones, now if the catalog is available."""
        self._pending.append(change)
        self.retry()

    def retry(self) -> None:
        """Apply the pending writes until one fails."""
        try:
            while self._pending:
                self._pending[0]()
                self._pending.popleft()
        except LeaseLostError:
            self._pending.clear()
        except CatalogError:
            return
