"""A clock that a test moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ManualClock:
    now_ms: int = 1_000_000

    def __call__(self) -> int:
        return self.now_ms
