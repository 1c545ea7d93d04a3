"""Unfinished files that a killed task or driver left."""

from __future__ import annotations

from collections.abc import Iterator

from dagster_ckpt.spark.doctor.finding import Code, Finding, note
from dagster_ckpt.spark.doctor.subject import Subject


def examine_leftovers(subject: Subject) -> Iterator[Finding]:
    """Look for files that were never finished."""
    left = sorted(path for path in subject.hidden_files() if path.endswith((".tmp", ".tmp.crc")))
    if left:
        yield note(
            Code.LEFTOVER_TEMPORARY_FILES,
            left[0],
            f"{len(left)} unfinished files are there: of tasks that run at this moment, or that were killed. Harmless.",
        )
