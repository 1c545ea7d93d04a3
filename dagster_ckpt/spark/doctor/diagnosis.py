"""Run all examinations of a live directory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER
from dagster_ckpt.spark.checkpoint_dir.cut import Cut, cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, check_pinned_provider, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, LiveDirectory, NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines, read_metadata
from dagster_ckpt.spark.checkpoint_dir.operators import NOTHING_KNOWN, KnownQuery
from dagster_ckpt.spark.doctor.contents import (
    KnownSnapshot,
    examine_against_snapshot,
    examine_content,
    examine_contents,
    examine_log_contents,
)
from dagster_ckpt.spark.doctor.finding import Code, Finding, Severity, SinkToExamine, Subject, error, note
from dagster_ckpt.spark.doctor.logs import examine_batch_logs, examine_source_logs
from dagster_ckpt.spark.doctor.state_files import examine_operator_notes, examine_state_files


def examine_identity(subject: Subject) -> Iterator[Finding]:
    try:
        query_id = read_metadata(subject.folder).id
    except FileNotFoundError:
        if subject.commits or subject.offsets:
            yield error(
                Code.METADATA_MISSING,
                METADATA,
                "It is missing: Spark refuses to start (STREAMING_CHECKPOINT_MISSING_METADATA_FILE), since a new "
                "query id would make sinks that remember the old one write rows twice.",
            )
        return
    except LiveDirectoryError as trouble:
        yield error(Code.METADATA_UNREADABLE, METADATA, str(trouble))
        return
    if subject.expected_query_id is not None and query_id != subject.expected_query_id:
        yield error(
            Code.QUERY_ID_DIFFERS,
            METADATA,
            f"The directory belongs to query {query_id}, but the stream's query is {subject.expected_query_id}: "
            "another query wrote here, or the directory was replaced.",
        )


def examine_leftovers(subject: Subject) -> Iterator[Finding]:
    left = sorted(path for path in subject.hidden_files() if path.endswith((".tmp", ".tmp.crc")))
    if left:
        yield note(
            Code.LEFTOVER_TEMPORARY_FILES,
            left[0],
            f"{len(left)} unfinished files exist, of tasks that are running or that were killed. Harmless.",
        )


# A copy of the files would not have these.
_ONLY_IN_PLACE = {Code.HADOOP_CHECKSUM_STALE}


def good_back_to(subject: Subject, damaged: Set[str]) -> int | None:
    """Return the newest committed batch after which a resume finds everything that it needs.

    A return to an earlier batch than the newest (`start_from=batch-<n>`) replays the one after it, whose plan has to be
    intact too.
    """
    bad = dict.fromkeys(damaged, True)
    for batch in sorted(subject.commits, reverse=True):
        carry = batch != subject.commit
        seen = subject.up_to(batch, planned=carry)
        try:
            taken = cut(
                subject.live,
                carry_in_flight=carry,
                sinks=subject.sinks,
                attempts=1,
                at_batch=batch,
                known=subject.known,
            )
            if any(examine_source_logs(seen)) or _sinks_are_damaged(taken):
                continue
        except (LiveDirectoryError, FileNotFoundError):
            continue
        if not subject.deep or not any(_is_damaged(file, bad) for file in taken.needed):
            return batch
    return None


def _sinks_are_damaged(taken: Cut) -> bool:
    reached = [sink.get("last_batch") for sink in taken.properties["sinks"]]
    if any(last is not None and last < taken.batch_id for last in reached):
        return True
    try:
        for file in taken.needed:
            if file.path.startswith(f"{SINKS_FOLDER}/"):
                parse_log_lines(file.folder.read(file.source), file.source)
    except LiveDirectoryError:
        return True
    return False


def _is_damaged(file: NeededFile, known: dict[str, bool]) -> bool:
    if file.path not in known:
        try:
            findings = list(examine_content(file.folder, file.source))
        except FileNotFoundError:
            return True
        known[file.path] = any(
            finding.severity is Severity.ERROR and finding.code not in _ONLY_IN_PLACE for finding in findings
        )
    return known[file.path]


@dataclass(frozen=True)
class Diagnosis:
    """The findings, the worst first; `good_back_to` is also None if not looked for."""

    url: str
    batch_id: int | None
    in_flight: int | None
    findings: tuple[Finding, ...]
    good_back_to: int | None

    @property
    def worst(self) -> Severity | None:
        return self.findings[0].severity if self.findings else None

    @property
    def can_resume(self) -> bool:
        return self.worst is not Severity.ERROR

    def as_record(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "batch_id": self.batch_id,
            "in_flight": self.in_flight,
            "can_resume": self.can_resume,
            "good_back_to": self.good_back_to,
            "findings": [finding.as_record() for finding in self.findings],
        }


def diagnose(
    live: LiveDirectory,
    *,
    sinks: Sequence[SinkToExamine] = (),
    expected_query_id: str | None = None,
    deep: bool = True,
    snapshot: KnownSnapshot | None = None,
    looks_back: bool = True,
    known: KnownQuery = NOTHING_KNOWN,
) -> Diagnosis:
    """Examine a live directory, in which a query may be running.

    A finding above NOTE must appear in a second examination too: a running query replaces and purges files.

    Args:
        deep: Read every state file that a resume needs, and examine older state snapshots.
        looks_back: Read log entries that no start reads, and find how far back it is intact.
    """
    if not live.exists():
        missing = error(Code.DIRECTORY_MISSING, "", f"{live.url} does not exist.")
        return Diagnosis(live.url, None, None, (missing,), None)

    def look() -> tuple[Subject, list[Finding]]:
        subject = Subject.of(
            live, sinks=sinks, expected_query_id=expected_query_id, deep=deep, known=known, looks_back=looks_back
        )
        return subject, list(_examine(subject, snapshot))

    subject, findings = look()
    if any(finding.severity is not Severity.NOTE for finding in findings):
        first = {(finding.code, finding.path) for finding in findings}
        subject, findings = look()
        findings = [item for item in findings if item.severity is Severity.NOTE or (item.code, item.path) in first]
    findings.sort(key=lambda item: -item.severity.rank)
    committed = -1 if subject.commit is None else subject.commit
    in_flight = subject.offset if subject.offset is not None and subject.offset > committed else None
    return Diagnosis(
        url=live.url,
        batch_id=subject.commit,
        in_flight=in_flight,
        findings=tuple(findings),
        good_back_to=good_back_to(subject, _damaged(findings)) if looks_back else None,
    )


def _damaged(findings: Sequence[Finding]) -> frozenset[str]:
    return frozenset(finding.path for finding in findings if finding.code is Code.CONTENT_DIFFERS)


def _examine(subject: Subject, snapshot: KnownSnapshot | None) -> Iterator[Finding]:
    findings = [
        *examine_identity(subject),
        *examine_batch_logs(subject),
        *examine_source_logs(subject),
        *examine_operator_notes(subject),
    ]
    state = examine_state_files(subject)
    findings += state.findings
    findings += examine_contents(state.needed) if subject.deep else ()
    findings += examine_log_contents(subject)
    if snapshot is not None:
        findings += examine_against_snapshot(subject, snapshot, state.needed if subject.deep else ())
    findings += [finding for sink in subject.sinks for finding in sink.examine(subject)]
    findings += examine_leftovers(subject)
    yield from _without_repetition(findings)
    if not any(finding.severity is Severity.ERROR for finding in findings):
        yield from _by_the_check_of_a_start(subject)


def _without_repetition(findings: list[Finding]) -> Iterator[Finding]:
    seen = set()
    bad = {finding.path for finding in findings if finding.severity is Severity.ERROR}
    for finding in findings:
        if finding.code is Code.SNAPSHOT_DANGLING and finding.path in bad:
            continue
        if (finding.code, finding.path) not in seen:
            seen.add((finding.code, finding.path))
            yield finding


def _by_the_check_of_a_start(subject: Subject) -> Iterator[Finding]:
    """Report what the check of a start would reject, so that it accepts each directory without findings."""
    state = inspect_live_directory(subject.live, subject.known)
    why = state.reason if state.status is LiveStatus.BROKEN else None
    try:
        check_pinned_provider(subject.live)
    except LiveDirectoryError as trouble:
        why = why or str(trouble)
    if why is not None:
        yield error(Code.NOT_WHOLE, subject.path_in(LiveDirectoryError(why)), why)
