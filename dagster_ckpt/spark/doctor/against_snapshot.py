"""Compare the files of a live directory with a snapshot of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from dagster_ckpt.foreign import number_in
from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, METADATA, OFFSETS, SOURCES, NeededFile
from dagster_ckpt.spark.doctor.finding import Code, Finding, error
from dagster_ckpt.spark.doctor.subject import Subject

_CHANGES = (".delta", ".changelog")


@dataclass(frozen=True)
class KnownSnapshot:
    """A snapshot of the examined directory.

    Attributes:
        location: Its location.
        batch_id: The batch after which it was taken.
        entries: Its files.
    """

    location: str
    batch_id: int
    entries: Iterable[FileEntry]


def examine_against_snapshot(
    subject: Subject, snapshot: KnownSnapshot, needed: Sequence[NeededFile]
) -> Iterator[Finding]:
    """Compare logs, and the state files that a resume needs, with the digests in a snapshot."""
    tokens = {file.source: file.token for file in needed}
    for entry in snapshot.entries:
        is_log = entry.path.partition("/")[0] in (METADATA, OFFSETS, COMMITS, SOURCES)
        if not is_log and entry.path not in tokens:
            continue
        token = tokens.get(entry.path)
        is_same_file = token is not None and token == entry.token
        if not (is_same_file or _is_never_changed(entry, snapshot.batch_id)):
            continue
        try:
            data = subject.folder.read(entry.path)
        except FileNotFoundError:
            # Purged; other examinations report files that are needed and missing.
            continue
        if len(data) == entry.size and blake3(data).hexdigest() != entry.digest:
            yield error(
                Code.CONTENT_DIFFERS,
                entry.path,
                f"It has the name and the length, but not the content that it has in {snapshot.location}, and Spark "
                "never changes such a file: it was altered since.",
            )


def _is_never_changed(entry: FileEntry, batch_id: int) -> bool:
    """Whether Spark writes a file of this name once with one content. It may upload a state snapshot again."""
    folder, _, rest = entry.path.partition("/")
    if folder == METADATA or entry.identity is not None:
        return True
    name = rest.rpartition("/")[2]
    if folder in (OFFSETS, COMMITS, SOURCES):
        number = number_in(rest if folder != SOURCES else name)
        return number is not None and (number <= batch_id or folder == SOURCES)
    version = number_in(name.partition(".")[0].partition("_")[0])
    return name.endswith(_CHANGES) and version is not None and version <= batch_id + 1
