"""The examined directory: information that several examinations need, read once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkToCapture
from dagster_ckpt.spark.checkpoint_dir.known_query import NOTHING_KNOWN, KnownQuery
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, LiveDirectory, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import CommitEntry, OffsetEntry, parse_commit_entry, parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.operators import Operator, read_operators
from dagster_ckpt.spark.doctor.finding import Finding

_PATH_IN_MESSAGE = re.compile(r"(\S+?)(?: is | has | cannot | vanished |: |$)")


class SinkToExamine(SinkToCapture, Protocol):
    """A sink, as the doctor sees it."""

    def examine(self, subject: Subject) -> Iterator[Finding]:
        """Compare the sink with a live directory."""


@dataclass(frozen=True)
class Subject:
    """A live directory at one moment.

    Attributes:
        live: The directory.
        commits: Batches in the commit log.
        offsets: Batches in the offset log.
        sinks: The query's sinks.
        expected_query_id: The query id that `metadata` must contain, or None if unknown.
        deep: Whether to read the content of state files too.
        looks_back: Whether to read log entries too that no start reads: those of older batches.
        known: What is known of the query from elsewhere.
    """

    live: LiveDirectory
    commits: Sequence[int]
    offsets: Sequence[int]
    sinks: Sequence[SinkToExamine] = ()
    expected_query_id: str | None = None
    deep: bool = True
    known: KnownQuery = NOTHING_KNOWN
    looks_back: bool = True
    _parsed: dict[str, OffsetEntry] = field(default_factory=dict, repr=False)
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
        """Read a directory. Commits first, as in `LiveDirectory.positions`."""
        commits, offsets = batch_ids(live.folder, COMMITS), batch_ids(live.folder, OFFSETS)
        return Subject(live, commits, offsets, sinks, expected_query_id, deep, known, looks_back)

    def concerns(self, log: str, batch_id: int) -> bool:
        """Whether a start reads an entry: the newest commit, the offsets before it and of what is planned."""
        return batch_id >= (self.commit or 0) - (1 if log == OFFSETS else 0)

    def up_to(self, batch_id: int, *, planned: bool) -> Subject:
        """The same directory as of the commit of a batch, with or without the next batch planned."""
        last = batch_id + 1 if planned else batch_id
        commits = [batch for batch in self.commits if batch <= batch_id]
        return replace(self, commits=commits, offsets=[batch for batch in self.offsets if batch <= last])

    @property
    def folder(self) -> FileIO:
        """Its files."""
        return self.live.folder

    @property
    def commit(self) -> int | None:
        """The newest committed batch."""
        return max(self.commits, default=None)

    @property
    def offset(self) -> int | None:
        """The newest planned batch."""
        return max(self.offsets, default=None)

    def listed(self, directory: str) -> Sequence[str]:
        """The names in a directory, as first listed."""
        if directory not in self._listed:
            self._listed[directory] = list(self.folder.list(directory))
        return self._listed[directory]

    def offset_entry(self, batch_id: int) -> OffsetEntry | None:
        """An entry of the offset log; None if it is missing or cannot be parsed."""
        if batch_id not in self.offsets:
            return None
        path = f"{OFFSETS}/{batch_id}"
        if path not in self._parsed:
            try:
                self._parsed[path] = parse_offset_entry(self.folder.read(path), f"{self.live.url}/{path}")
            except (FileNotFoundError, LiveDirectoryError):
                return None
        return self._parsed[path]

    @cached_property
    def commit_entry(self) -> CommitEntry | None:
        """The newest entry of the commit log; None if it cannot be parsed."""
        path = f"{COMMITS}/{self.commit}"
        try:
            return parse_commit_entry(self.folder.read(path), f"{self.live.url}/{path}")
        except (FileNotFoundError, LiveDirectoryError):
            return None

    @cached_property
    def operators(self) -> list[Operator] | None:
        """The stateful operators; None if Spark's metadata of them cannot be parsed."""
        try:
            return read_operators(self.folder, self.commit or 0)
        except (FileNotFoundError, LiveDirectoryError):
            return None

    @property
    def stateful(self) -> bool:
        """Whether the query keeps state."""
        return self.operators is None or bool(self.operators) or self.known.operators > 0

    def path_in(self, error: Exception) -> str:
        """The path in one of this package's errors, relative to the directory; empty if it names none."""
        text = str(error)
        for prefix in (f"{self.folder.url}/", f"{self.live.url.rstrip('/')}/"):
            if text.startswith(prefix) and (match := _PATH_IN_MESSAGE.match(text.removeprefix(prefix))):
                return match[1]
        return ""

    def hidden_files(self) -> Iterator[str]:
        """Paths of all hidden files: Hadoop's checksum files, and unfinished files."""
        return (path for path, entry in self.folder.find(hidden=True) if entry.name.startswith("."))
