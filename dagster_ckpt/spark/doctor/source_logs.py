"""The private logs of the sources: what Spark asks them for again when it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.spark.doctor.finding import Code, Finding, error
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.spark.file_source import COMPACT, entry_id, log_offset, source_files
from dagster_ckpt.spark.layout import SOURCES
from dagster_ckpt.spark.logs import OffsetEntry, parse_log_lines


def examine_source_logs(subject: Subject) -> Iterator[Finding]:
    """Look at every source that the newest committed batch, or the planned one, reads."""
    if subject.commit is None or (committed := subject.offset_entry(subject.commit)) is None:
        return
    before = subject.offset_entry(subject.commit - 1)
    planned = subject.offset_entry(subject.commit + 1)
    entries = [entry for entry in (committed, planned) if entry is not None]
    logged = {name for entry in entries for name, offset in entry.sources.items() if log_offset(offset) is not None}
    for source in sorted({*subject.folder.list(SOURCES), *logged}):
        yield from _source(subject, source, _Batches(committed, before, planned), logged=source in logged)


@dataclass(frozen=True)
class _Batches:
    """The batches that a start asks the sources for."""

    committed: OffsetEntry
    before: OffsetEntry | None
    planned: OffsetEntry | None


def _source(subject: Subject, source: str, batches: _Batches, *, logged: bool) -> Iterator[Finding]:
    try:
        files = source_files(subject.folder, source, batches.committed, batches.before, batches.planned)
    except (FileNotFoundError, IncompleteCutError) as trouble:
        path = subject.path_in(trouble) or f"{SOURCES}/{source}"
        yield error(
            Code.SOURCE_LOG_MISSING,
            path,
            f"The log of source {source} misses this entry: Spark asks the source for the batch again when it "
            "starts, and "
            'fails with "batch doesn\'t exist".',
        )
        return
    except UnknownLayoutError as trouble:
        yield error(Code.UNKNOWN_VERSION, subject.path_in(trouble), str(trouble))
        return
    except LiveDirectoryError as trouble:
        yield error(Code.SOURCE_LOG_UNREADABLE, subject.path_in(trouble) or f"{SOURCES}/{source}", str(trouble))
        return
    for file in files if logged else ():
        if entry_id(file.source.rpartition("/")[2]) is None:
            continue
        data = file.data if file.data is not None else subject.folder.read(file.source)
        try:
            parse_log_lines(data, f"{subject.live.url}/{file.source}")
        except UnknownLayoutError as trouble:
            yield error(Code.UNKNOWN_VERSION, file.source, str(trouble))
        except LiveDirectoryError as trouble:
            whole = " with the whole history before it" if file.source.endswith(COMPACT) else ""
            what = "is empty" if not data else f"is cut off or damaged ({trouble})"
            yield error(
                Code.SOURCE_LOG_UNREADABLE,
                file.source,
                f"This entry of the source's log{whole} {what}: Spark fails on it.",
            )
