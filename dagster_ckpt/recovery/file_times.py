"""What the modification times of input files tell. Pure.

Spark knows a file that it has read by its path, and forgets those that are older by `maxFileAge` than the newest one.
A forgotten file that is put back or written again is a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dagster_ckpt.spark.checkpoint_dir.file_source import SourceFile

DEFAULT_MAX_AGE = "7d"
_UNITS = {"us": 0.001, "ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
# Some file systems keep whole seconds.
_SAME_MS = 1_000


def age_ms(text: str) -> int | None:
    """Spark's option `maxFileAge` in ms; None if it cannot be read."""
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    unit = _UNITS.get(found.group(2) or "ms") if found is not None else None
    return int(int(found.group(1)) * unit) if found is not None and unit is not None else None


def changed(files: Iterable[SourceFile], existing: Mapping[str, int | None]) -> list[str]:
    """The files that now have another modification time than when they were read.

    Args:
        files: The files, as the log of their source has them.
        existing: The current modification times of those that exist, in ms since the epoch; None if unknown.
    """
    return sorted({each.path for each in files if _has_changed(each, existing.get(each.path))})


def forgotten(kept: Sequence[SourceFile], newest_ms: int, max_age_ms: int) -> list[SourceFile]:
    """The files that Spark no longer remembers to have read, after it has read a file of some modification time."""
    return [each for each in kept if each.modified_at_ms is not None and each.modified_at_ms < newest_ms - max_age_ms]


def read_once_more(
    forgotten_files: Iterable[SourceFile], existing: Mapping[str, int | None], newest_ms: int, max_age_ms: int
) -> list[str]:
    """Of the files that Spark no longer remembers, those that it takes for new ones."""
    since = newest_ms - max_age_ms
    return sorted(
        {
            each.path
            for each in forgotten_files
            if (now := existing.get(each.path)) is not None and now >= since and _has_changed(each, now)
        }
    )


def _has_changed(file: SourceFile, now: int | None) -> bool:
    return None not in (file.modified_at_ms, now) and abs((file.modified_at_ms or 0) - (now or 0)) >= _SAME_MS
