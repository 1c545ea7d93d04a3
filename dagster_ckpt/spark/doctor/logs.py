"""Examine the offset log, the commit log, and the logs of the sources."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.spark.checkpoint_dir.file_source import (
    COMPACT,
    entry_id,
    log_offset,
    refuse_unassignable_offsets,
    source_files,
)
from dagster_ckpt.spark.checkpoint_dir.inspect import missing_batch_before
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, SOURCES, STATE
from dagster_ckpt.spark.checkpoint_dir.logs import OffsetEntry, parse_commit_entry, parse_log_lines, parse_offset_entry
from dagster_ckpt.spark.doctor.finding import MOST_REPORTED_GAPS, Code, Finding, Severity, Subject, error, note, warning
from dagster_ckpt.values.durations import utc_time


def examine_batch_logs(subject: Subject) -> Iterator[Finding]:
    fenced_at = subject.live.fenced_at()
    if fenced_at is not None:
        yield note(
            Code.FENCED,
            f"{OFFSETS}/{fenced_at}",
            f"Fenced, ended at batch {fenced_at - 1}: a successor keeps the query that may still run here from "
            f"planning batch {fenced_at}.",
        )
    yield from _ends(subject)
    yield from _event_time(subject)
    yield from _entries(subject, OFFSETS, subject.offsets, Code.OFFSET_UNREADABLE, parse_offset_entry)
    yield from _entries(subject, COMMITS, subject.commits, Code.COMMIT_UNREADABLE, parse_commit_entry)
    yield from _gaps(subject, OFFSETS, subject.offsets, Code.OFFSETS_GAP)
    yield from _gaps(subject, COMMITS, subject.commits, Code.COMMITS_GAP)


def _ends(subject: Subject) -> Iterator[Finding]:
    commit, offset = subject.commit, subject.offset
    if commit is None:
        yield from _before_the_first_commit(subject)
        return
    if commit not in subject.offsets:
        yield error(
            Code.COMMIT_WITHOUT_OFFSET,
            f"{OFFSETS}/{commit}",
            f"Batch {commit} is committed, but its offsets are missing: Spark would replay an earlier batch and then "
            "fail with CONCURRENT_STREAM_LOG_UPDATE.",
        )
    elif commit > 0 and commit - 1 not in subject.offsets and not _tracked_asynchronously(subject, commit - 1):
        yield error(
            Code.PREVIOUS_OFFSET_MISSING,
            f"{OFFSETS}/{commit - 1}",
            f'Spark needs the offsets before batch {commit} to resume: "batch {commit - 1} doesn\'t exist".',
        )
    if offset is None or offset <= commit:
        return
    before = missing_batch_before(offset, subject.offsets, subject.commits, subject.known)
    if before is not None and not _is_continuous(subject):
        yield error(
            Code.PREVIOUS_OFFSET_MISSING,
            f"{OFFSETS}/{before}",
            f"Batch {offset} is planned and batch {commit} is the newest commit, but the offsets of batch {before} are "
            f'missing. Spark needs them to resume: "batch {before} doesn\'t exist".',
        )
    if offset > commit + 1:
        severity = Severity.ERROR if subject.stateful else Severity.WARNING
        what = (
            "Spark would continue with the newest planned batch, and the state between is missing."
            if subject.stateful
            else "Spark continues with the newest planned batch; unless progress is tracked asynchronously, the rows "
            "of the batches between are lost."
        )
        yield Finding(
            Code.OFFSETS_AHEAD,
            severity,
            f"{OFFSETS}/{offset}",
            f"Batches up to {offset} are planned, but the newest commit is {commit}. {what}",
        )
        return
    planned, committed = subject.offset_entry(offset), subject.offset_entry(commit)
    if planned and committed and subject.stateful and planned.partitions != committed.partitions:
        yield error(
            Code.REPARTITION_UNFINISHED,
            f"{OFFSETS}/{offset}",
            f"It plans {planned.partitions} state partitions, but batch {commit} has {committed.partitions}: an "
            "offline repartition was interrupted, and Spark refuses to start until it is finished.",
        )


# Clocks of event sources differ by less, even across time zones.
_MOST_AHEAD_MS = 24 * 3_600_000


def _event_time(subject: Subject) -> Iterator[Finding]:
    commit = subject.commit
    if commit is None:
        return
    offsets, committed = subject.offset_entry(commit), subject.commit_entry
    watermark_ms = max(
        offsets.watermark_ms if offsets is not None else 0, committed.next_watermark_ms if committed is not None else 0
    )
    if watermark_ms > time.time() * 1000 + _MOST_AHEAD_MS:
        yield warning(
            Code.WATERMARK_AHEAD,
            f"{COMMITS}/{commit}",
            f"The watermark is {utc_time(watermark_ms)}, ahead of the clock: an event with a wrong time has moved it. "
            "Spark drops every event before it as late.",
        )


def _is_continuous(subject: Subject) -> bool:
    """Whether continuous processing wrote the newest commit: its offset log may be further ahead."""
    entry = subject.offset_entry(subject.commit) if subject.commit is not None else None
    return entry is not None and entry.continuous


def _before_the_first_commit(subject: Subject) -> Iterator[Finding]:
    if subject.offset is None:
        left = next((path for path, _ in subject.folder.find(STATE)), None)
        if left is not None:
            yield error(
                Code.STATE_WITHOUT_BATCHES, left, "There is state, but no batch in the offset log and the commit log."
            )
            return
    elif subject.offset > 0:
        yield error(
            Code.COMMIT_LOG_LOST,
            COMMITS,
            f"Batches up to {subject.offset} are planned, and none is committed: the commit log is lost.",
        )
        return
    yield note(
        Code.NOTHING_COMMITTED, COMMITS, "The query has not committed a batch yet: it starts from the beginning."
    )


def _entries(
    subject: Subject, log: str, batches: Sequence[int], code: Code, parse: Callable[[bytes, str], object]
) -> Iterator[Finding]:
    for batch in batches if subject.looks_back else filter(partial(subject.concerns, log), batches):
        path = f"{log}/{batch}"
        try:
            data = subject.folder.read(path)
        except FileNotFoundError:
            continue
        try:
            parse(data, f"{subject.live.url}/{path}")
        except UnknownLayoutError as trouble:
            yield error(Code.UNKNOWN_VERSION, path, str(trouble))
        except LiveDirectoryError as trouble:
            what = "It is empty" if not data else f"It is truncated or damaged ({trouble})"
            if not subject.concerns(log, batch):
                yield warning(code, path, f"{what}. A resume does not read it, but going back to it is impossible.")
            else:
                yield error(code, path, f'{what}: Spark fails with "Incomplete log file" or cannot parse it.')


def _gaps(subject: Subject, log: str, batches: Sequence[int], code: Code) -> Iterator[Finding]:
    present = set(batches)
    reported = {subject.commit, (subject.commit or 0) - 1} if log == OFFSETS else set()
    missing = (batch for batch in range(min(batches, default=0), max(batches, default=0)) if batch not in present)
    for batch in islice(missing, MOST_REPORTED_GAPS):
        if batch in reported:
            continue
        if log == OFFSETS and subject.commit is not None and batch > subject.commit:
            continue
        if _tracked_asynchronously(subject, batch):
            yield note(
                code,
                f"{log}/{batch}",
                "Neither log has this batch: usual where progress is tracked asynchronously (stateless queries only).",
            )
        else:
            yield warning(code, f"{log}/{batch}", "The log has batches before and after it, but not this one.")


def _tracked_asynchronously(subject: Subject, batch: int) -> bool:
    return not subject.stateful and batch not in subject.commits and batch not in subject.offsets


def examine_source_logs(subject: Subject) -> Iterator[Finding]:
    if subject.commit is None or (committed := subject.offset_entry(subject.commit)) is None:
        return
    sources = subject.folder.list(SOURCES)
    try:
        refuse_unassignable_offsets(subject.folder, committed, sources)
    except UnknownLayoutError as trouble:
        yield error(Code.UNKNOWN_VERSION, SOURCES, str(trouble))
        return
    before = subject.offset_entry(subject.commit - 1)
    planned = subject.offset_entry(subject.commit + 1)
    entries = [entry for entry in (committed, planned) if entry is not None]
    logged = {name for entry in entries for name, offset in entry.sources.items() if log_offset(offset) is not None}
    for source in sorted({*sources, *logged}):
        yield from _source(subject, source, committed, before, planned, logged=source in logged)


def _source(
    subject: Subject,
    source: str,
    committed: OffsetEntry,
    before: OffsetEntry | None,
    planned: OffsetEntry | None,
    *,
    logged: bool,
) -> Iterator[Finding]:
    try:
        files = source_files(subject.folder, source, committed, before, planned)
    except (FileNotFoundError, IncompleteCutError) as trouble:
        path = subject.path_in(trouble) or f"{SOURCES}/{source}"
        yield error(
            Code.SOURCE_LOG_MISSING,
            path,
            f"The log of source {source} lacks this entry: Spark asks the source for the batch again when it "
            'starts, and fails with "batch doesn\'t exist".',
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
            what = "is empty" if not data else f"is truncated or damaged ({trouble})"
            yield error(
                Code.SOURCE_LOG_UNREADABLE,
                file.source,
                f"This entry of the source's log{whole} {what}: Spark fails on it.",
            )
