"""The lines that streams log about their transitions."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("dagster_ckpt.transitions")


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def collecting(lines: list[str], *, level: int = logging.INFO) -> Iterator[list[str]]:
    """Add the lines that are logged while the context is open."""
    handler = _Lines(lines)
    before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level)
    try:
        yield lines
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)
