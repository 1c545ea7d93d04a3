"""Whether logs and notes hold what was written: by Hadoop's checksums, as they have none of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dagster_ckpt.foreign import number_in
from dagster_ckpt.spark.doctor.contents import examine_content
from dagster_ckpt.spark.doctor.finding import Finding, Severity
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.spark.layout import COMMITS, METADATA, OFFSETS, SOURCES, STATE

_NOTES = ("/_metadata/", "/_stateSchema/")
_SUM = ".crc"


def examine_log_contents(subject: Subject) -> Iterator[Finding]:
    """Compare each log entry and note with its checksum, where one lies beside it."""
    for hidden in sorted(path for path in subject.hidden_files() if path.endswith(_SUM)):
        directory, slash, name = hidden.rpartition("/")
        path = f"{directory}{slash}{name[1 : -len(_SUM)]}"
        if not _is_log(path):
            continue
        try:
            findings = list(examine_content(subject.folder, path))
        except FileNotFoundError:
            # Purged, or never finished.
            continue
        for finding in findings:
            yield finding if _is_read_by_a_start(subject, path) else replace(finding, severity=Severity.WARNING)


def _is_log(path: str) -> bool:
    folder = path.partition("/")[0]
    return folder in (METADATA, OFFSETS, COMMITS, SOURCES) or (
        folder == STATE and any(note in path for note in _NOTES) and "/SSTs/" not in path
    )


def _is_read_by_a_start(subject: Subject, path: str) -> bool:
    """Of a batch log only its end is; of everything else, who can say."""
    folder, _, name = path.partition("/")
    number = number_in(name)
    if folder not in (OFFSETS, COMMITS) or number is None:
        return True
    return number >= (subject.commit or 0) - (1 if folder == OFFSETS else 0)
