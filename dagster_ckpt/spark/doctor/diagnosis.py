"""All examinations of one live directory, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.doctor.against_snapshot import KnownSnapshot, examine_against_snapshot
from dagster_ckpt.spark.doctor.batch_logs import examine_batch_logs
from dagster_ckpt.spark.doctor.contents import examine_contents
from dagster_ckpt.spark.doctor.file_sink_logs import examine_file_sinks
from dagster_ckpt.spark.doctor.finding import Code, Finding, Severity, error
from dagster_ckpt.spark.doctor.good_back_to import good_back_to
from dagster_ckpt.spark.doctor.identity import examine_identity
from dagster_ckpt.spark.doctor.leftovers import examine_leftovers
from dagster_ckpt.spark.doctor.log_contents import examine_log_contents
from dagster_ckpt.spark.doctor.operator_notes import examine_operator_notes
from dagster_ckpt.spark.doctor.source_logs import examine_source_logs
from dagster_ckpt.spark.doctor.state_files import examine_state_files
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.spark.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.layout import LiveDirectory


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor says of a live directory.

    Attributes:
        url: The directory.
        batch_id: The newest committed batch, or None.
        in_flight: The batch that is planned and not committed, or None.
        findings: What was found, the worst first.
        good_back_to: The newest committed batch after which a resume would be whole, or None.
    """

    url: str
    batch_id: int | None
    in_flight: int | None
    findings: tuple[Finding, ...]
    good_back_to: int | None

    @property
    def worst(self) -> Severity | None:
        """The worst severity, or None without findings."""
        return self.findings[0].severity if self.findings else None

    @property
    def can_resume(self) -> bool:
        """Whether Spark can go on in this directory as it is."""
        return self.worst is not Severity.ERROR

    def as_record(self) -> dict[str, Any]:
        """As plain data."""
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
    sinks: Sequence[str] = (),
    expected_query_id: str | None = None,
    deep: bool = True,
    snapshot: KnownSnapshot | None = None,
) -> Diagnosis:
    """Examine a live directory; nothing is changed, and a query may be running in it.

    What a running query replaces or purges in the middle of a look is no finding: whatever is above a note must be
    seen in a second look too.

    Args:
        live: The directory.
        sinks: The query's sinks, as its progress names them; their logs are compared with the checkpoint.
        expected_query_id: The id of the job's query; None where nobody knows it.
        deep: Read the content of every state file that a resume needs, and look at older snapshots. Otherwise names
            and sizes only.
        snapshot: A snapshot of this directory, with which its files are compared if `deep`.

    Raises:
        StorageAccessError: The directory cannot be reached, so nothing can be said of it.
    """
    if not live.exists():
        missing = error(Code.DIRECTORY_MISSING, "", f"{live.url} does not exist.")
        return Diagnosis(live.url, None, None, (missing,), None)

    def look() -> tuple[Subject, list[Finding]]:
        subject = Subject.of(live, sinks=sinks, expected_query_id=expected_query_id, deep=deep)
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
        good_back_to=good_back_to(live, sinks=sinks, deep=deep, damaged=_damaged(findings)),
    )


def _damaged(findings: Sequence[Finding]) -> frozenset[str]:
    """Paths of files whose content is not what a snapshot has."""
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
    if subject.deep:
        findings += examine_contents(state.needed)
        findings += examine_log_contents(subject)
        if snapshot is not None:
            findings += examine_against_snapshot(subject, snapshot, state.needed)
    findings += examine_file_sinks(subject)
    findings += examine_leftovers(subject)
    yield from _without_repetition(findings)
    if not any(finding.severity is Severity.ERROR for finding in findings):
        yield from _by_the_check_of_a_start(subject)


def _without_repetition(findings: list[Finding]) -> Iterator[Finding]:
    """One finding a file and code."""
    seen = set()
    for finding in findings:
        if (finding.code, finding.path) not in seen:
            seen.add((finding.code, finding.path))
            yield finding


def _by_the_check_of_a_start(subject: Subject) -> Iterator[Finding]:
    """What the check before every start refuses is never called good here."""
    state = inspect_live_directory(subject.live)
    if state.status is LiveStatus.BROKEN:
        yield error(Code.NOT_WHOLE, subject.path_in(LiveDirectoryError(state.reason)), state.reason)
