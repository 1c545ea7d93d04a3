"""The beginning of a long message, for places where the rest is elsewhere or unfolded."""

from __future__ import annotations

import re

_LONGEST = 160


def headline(message: str) -> str:
    """The first line, cut after a sentence or a word if it is long."""
    whole = message.strip()
    first = whole.split("\n", 1)[0].rstrip()
    if len(first) > _LONGEST:
        start = first[:_LONGEST]
        ends = [found.end() for found in re.finditer(r"[.;:](?=\s)", start)]
        first = start[: ends[-1]] if ends and ends[-1] > _LONGEST // 3 else start.rsplit(" ", 1)[0]
    return first if first == whole else f"{first} …"
