"""What the doctor examines (`Subject`) and what it finds (`Finding`), with severity and advice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Protocol

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkToCapture
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, LiveDirectory, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import CommitEntry, OffsetEntry, read_commit_entry, read_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import NOTHING_KNOWN, KnownQuery, Operator, read_operators

# A file named by a large number makes a large gap.
MOST_REPORTED_GAPS = 1_000


class Severity(StrEnum):
    """NOTE: harmless. WARNING: Spark can start today, but something was lost or will do harm later.

    ERROR: Spark would refuse to start, fail in its first batch, or compute wrong results.
    """

    NOTE = "NOTE"
    WARNING = "WARNING"
    ERROR = "ERROR"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


_GO_BACK = "Start from the snapshot named below, or with start_from=batch-<n> from the batch it is good back to."
_LOG_BACK = (
    "A start writes the log back from the newest snapshot that captured it, and the query runs the batches since "
    "again. `dagster-ckpt rebuild-output` for the stream writes the log back without a start. If no snapshot has it, "
    "put the entry back from a backup, or write to a new folder."
)
_NOTHING = "No action is required."


class Code(StrEnum):
    """A kind of finding, with advice. Codes never change their meaning, so scripts can compare them."""

    _value_: str
    advice: str

    def __new__(cls, value: str, advice: str) -> Code:
        code = str.__new__(cls, value)
        code._value_, code.advice = value, advice
        return code

    DIRECTORY_MISSING = (
        "DIRECTORY_MISSING",
        "Put the directory back, or start the stream: it restores its newest snapshot by itself.",
    )
    NOTHING_COMMITTED = "NOTHING_COMMITTED", "Wait for the query's first batch."
    COMMIT_LOG_LOST = "COMMIT_LOG_LOST", _GO_BACK
    OLDER_COPY = (
        "OLDER_COPY",
        "Start the stream: it restores the newest snapshot by itself. Or put the newer directory back.",
    )
    STATE_WITHOUT_BATCHES = (
        "STATE_WITHOUT_BATCHES",
        "Spark refuses to start here (verifyCheckpointDirectoryEmptyOnStart). " + _GO_BACK,
    )
    METADATA_MISSING = (
        "METADATA_MISSING",
        "Write the file back with the query id that the snapshots name, or restore a snapshot: under a new id sinks "
        "that remember query ids would write rows twice.",
    )
    METADATA_UNREADABLE = (
        "METADATA_UNREADABLE",
        "Write the file back with the query id that the catalog's snapshots name, or restore a snapshot.",
    )
    QUERY_ID_DIFFERS = (
        "QUERY_ID_DIFFERS",
        "Find out which query wrote here. Do not start the stream on it; restore one of its own snapshots.",
    )
    UNKNOWN_VERSION = "UNKNOWN_VERSION", "Use the version of dagster_ckpt that knows this layout."
    OFFSETS_GAP = (
        "OFFSETS_GAP",
        _NOTHING + " A resume does not read it; only going back to these batches is impossible.",
    )
    COMMITS_GAP = (
        "COMMITS_GAP",
        _NOTHING + " A resume does not read it; only going back to these batches is impossible.",
    )
    OFFSET_UNREADABLE = (
        "OFFSET_UNREADABLE",
        "An entry above the newest commit may be deleted, if its batch was not committed: Spark "
        "plans it again. For any other: " + _GO_BACK,
    )
    COMMIT_UNREADABLE = "COMMIT_UNREADABLE", "With state in RocksDB, or for an older batch: " + _GO_BACK
    COMMIT_WITHOUT_OFFSET = "COMMIT_WITHOUT_OFFSET", _GO_BACK
    PREVIOUS_OFFSET_MISSING = "PREVIOUS_OFFSET_MISSING", _GO_BACK
    OFFSETS_AHEAD = "OFFSETS_AHEAD", _GO_BACK
    WATERMARK_AHEAD = (
        "WATERMARK_AHEAD",
        "Let the code filter events whose time cannot be right, and start from a snapshot from "
        "before the event with start_from=...: the watermark never goes back by itself.",
    )
    FENCED = (
        "FENCED",
        "Start the stream: it resumes from here in a new directory. Never start a query in this one by hand.",
    )
    REPARTITION_UNFINISHED = (
        "REPARTITION_UNFINISHED",
        "Finish the repartition, or " + _GO_BACK[0].lower() + _GO_BACK[1:],
    )
    SOURCE_LOG_MISSING = "SOURCE_LOG_MISSING", _GO_BACK
    SOURCE_LOG_UNREADABLE = "SOURCE_LOG_UNREADABLE", _GO_BACK
    OPERATOR_METADATA_MISSING = "OPERATOR_METADATA_MISSING", _GO_BACK
    OPERATOR_METADATA_UNREADABLE = "OPERATOR_METADATA_UNREADABLE", _GO_BACK
    SCHEMA_MISSING = "SCHEMA_MISSING", _GO_BACK
    SCHEMA_UNREADABLE = "SCHEMA_UNREADABLE", _GO_BACK
    SCHEMA_PATH_ELSEWHERE = (
        "SCHEMA_PATH_ELSEWHERE",
        "Do not start a query on a directory that was copied or moved by hand: restore a snapshot, or take a savepoint "
        "of this directory and start from that; both rewrite the path.",
    )
    STATE_MISSING = "STATE_MISSING", _GO_BACK
    STATE_FILE_MISSING = "STATE_FILE_MISSING", _GO_BACK
    STATE_FILE_DAMAGED = "STATE_FILE_DAMAGED", _GO_BACK
    SST_MISSING = "SST_MISSING", _GO_BACK
    SST_WRONG_SIZE = "SST_WRONG_SIZE", _GO_BACK
    SNAPSHOT_UNREADABLE = "SNAPSHOT_UNREADABLE", _GO_BACK
    SNAPSHOT_DANGLING = "SNAPSHOT_DANGLING", _NOTHING + " Spark deletes an old snapshot's SSTs before its zip."
    CHECKSUM_DIFFERS = "CHECKSUM_DIFFERS", _GO_BACK
    CONTENT_DIFFERS = "CONTENT_DIFFERS", _GO_BACK
    HADOOP_CHECKSUM_STALE = (
        "HADOOP_CHECKSUM_STALE",
        "The file itself is sound by its own checksums: delete the hidden .crc beside it; Spark does not need it.",
    )
    STATE_AHEAD = (
        "STATE_AHEAD",
        "Restore into a fresh directory rather than rewinding by hand. If you rewound it on purpose, "
        "delete the state files of these versions before the query starts.",
    )
    SINK_LOG_GAP = "SINK_LOG_GAP", _LOG_BACK
    SINK_LOG_ELSEWHERE = (
        "SINK_LOG_ELSEWHERE",
        "Run `dagster-ckpt relocate-output` for this folder: it lets the log list the files that are there.",
    )
    SINK_LOG_AHEAD = (
        "SINK_LOG_AHEAD",
        "Start from a snapshot with start_from=...: that rolls the sink back. Otherwise Spark skips "
        "these batches and their rows are lost.",
    )
    SINK_LOG_BEHIND = (
        "SINK_LOG_BEHIND",
        "Put the output folder back as it was, or restore a snapshot at or before its newest entry.",
    )
    SINK_HAS_BATCH_IN_FLIGHT = (
        "SINK_HAS_BATCH_IN_FLIGHT",
        "Start the stream: it first rolls the sink's log back by that batch, and Spark runs the batch again.",
    )
    SINK_LOG_UNREADABLE = "SINK_LOG_UNREADABLE", _LOG_BACK
    LEFTOVER_TEMPORARY_FILES = "LEFTOVER_TEMPORARY_FILES", _NOTHING + " Spark ignores unfinished files."
    NOT_WHOLE = "NOT_WHOLE", _GO_BACK


@dataclass(frozen=True)
class Finding:
    """One finding; `path` is relative to the live directory, or the URL of a sink."""

    code: Code
    severity: Severity
    path: str
    explanation: str

    @property
    def advice(self) -> str:
        return self.code.advice

    def as_record(self) -> dict[str, str]:
        return {
            "code": self.code.value,
            "severity": self.severity.value,
            "path": self.path,
            "explanation": self.explanation,
            "advice": self.advice,
        }


def error(code: Code, path: str, explanation: str) -> Finding:
    return Finding(code, Severity.ERROR, path, explanation)


def warning(code: Code, path: str, explanation: str) -> Finding:
    return Finding(code, Severity.WARNING, path, explanation)


def note(code: Code, path: str, explanation: str) -> Finding:
    return Finding(code, Severity.NOTE, path, explanation)


_PATH_IN_MESSAGE = re.compile(r"(\S+?)(?: is | has | cannot | vanished |: |$)")


class SinkToExamine(SinkToCapture, Protocol):
    def examine(self, subject: Subject) -> Iterator[Finding]: ...


@dataclass(frozen=True)
class Subject:
    """A live directory at one moment; for `deep` and `looks_back` see `diagnose`."""

    live: LiveDirectory
    commits: Sequence[int]
    offsets: Sequence[int]
    sinks: Sequence[SinkToExamine] = ()
    expected_query_id: str | None = None
    deep: bool = True
    known: KnownQuery = NOTHING_KNOWN
    looks_back: bool = True
    _parsed: dict[int, OffsetEntry] = field(default_factory=dict, repr=False)
    _listed: dict[str, Sequence[str]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(
        live: LiveDirectory,
        *,
        sinks: Sequence[SinkToExamine] = (),
        expected_query_id: str | None = None,
        deep: bool = True,
        known: KnownQuery = NOTHING_KNOWN,
        looks_back: bool = True,
    ) -> Subject:
        # Commits first, as in `LiveDirectory.positions`.
        commits, offsets = batch_ids(live.folder, COMMITS), batch_ids(live.folder, OFFSETS)
        return Subject(live, commits, offsets, sinks, expected_query_id, deep, known, looks_back)

    def concerns(self, log: str, batch_id: int) -> bool:
        """Whether a start reads this entry: the newest commit, and offsets from the batch before it on."""
        return batch_id >= (self.commit or 0) - (1 if log == OFFSETS else 0)

    def up_to(self, batch_id: int, *, planned: bool) -> Subject:
        last = batch_id + 1 if planned else batch_id
        commits = [batch for batch in self.commits if batch <= batch_id]
        return replace(self, commits=commits, offsets=[batch for batch in self.offsets if batch <= last])

    @property
    def folder(self) -> FileIO:
        return self.live.folder

    @property
    def commit(self) -> int | None:
        return max(self.commits, default=None)

    @property
    def offset(self) -> int | None:
        return max(self.offsets, default=None)

    def listed(self, directory: str) -> Sequence[str]:
        if directory not in self._listed:
            self._listed[directory] = list(self.folder.list(directory))
        return self._listed[directory]

    def offset_entry(self, batch_id: int) -> OffsetEntry | None:
        if batch_id not in self.offsets:
            return None
        if batch_id not in self._parsed:
            try:
                self._parsed[batch_id] = read_offset_entry(self.folder, batch_id)
            except (FileNotFoundError, LiveDirectoryError):
                return None
        return self._parsed[batch_id]

    @cached_property
    def commit_entry(self) -> CommitEntry | None:
        try:
            return read_commit_entry(self.folder, self.commit) if self.commit is not None else None
        except (FileNotFoundError, LiveDirectoryError):
            return None

    @cached_property
    def operators(self) -> list[Operator] | None:
        try:
            return read_operators(self.folder, self.commit or 0)
        except (FileNotFoundError, LiveDirectoryError):
            return None

    @property
    def stateful(self) -> bool:
        return self.operators is None or bool(self.operators) or self.known.operators > 0

    def path_in(self, error: Exception) -> str:
        text = str(error)
        for prefix in (f"{self.folder.url}/", f"{self.live.url.rstrip('/')}/"):
            if text.startswith(prefix) and (match := _PATH_IN_MESSAGE.match(text.removeprefix(prefix))):
                return match[1]
        return ""

    def hidden_files(self) -> Iterator[str]:
        return (path for path, entry in self.folder.find(hidden=True) if entry.name.startswith("."))
