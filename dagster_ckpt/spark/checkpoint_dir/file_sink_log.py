"""A file sink's log of its batches: capture it for a snapshot, and roll it back to an earlier batch.

`FileStreamSink` skips every batch up to the newest id in `<path>/_spark_metadata`, regardless of
which query wrote it. A rewound query would silently lose rows there, so a snapshot includes this
log and a restore rolls it back. Entries are files: `<batch>`, and every tenth batch
`<batch>.compact` with all previous entries (`CompactibleFileStreamLog`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.errors import IncompleteCutError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.checkpoint_dir.layout import NeededFile
from dagster_ckpt.spark.checkpoint_dir.logs import check_log_version
from dagster_ckpt.spark.query.sinks import file_sink_path

LOG = "_spark_metadata"
# Entered around each change of a file that a successor would use; raises if this process is no
# longer the writer.
StillMine = Callable[[], AbstractContextManager[object]]
SINKS_FOLDER = "sinks"
# Longer than any version line, so that a file without line breaks is not read completely.
_VERSION_LINE_BYTES = 100


@dataclass(frozen=True)
class CapturedSink:
    """The log of one file sink up to a batch.

    Attributes:
        path: FileIO to which the sink writes.
        last_batch: Newest batch in it, up to the snapshot's; None if it has none yet.
        files: The entries that make up the log.
        newest: Newest batch in it, even if it is later than the snapshot's; None if it has none
            yet.
    """

    path: str
    last_batch: int | None
    files: tuple[NeededFile, ...]
    newest: int | None = None

    def properties(self) -> dict[str, Any]:
        """The sink's properties in a snapshot."""
        return {"kind": "file", "path": self.path, "last_batch": self.last_batch}


@dataclass(frozen=True)
class SinkEntry:
    """One log entry of a file sink, from a snapshot.

    Attributes:
        name: Its file name.
        data: Its content.
    """

    name: str
    data: bytes


def capture(descriptions: Sequence[str], batch_id: int) -> list[CapturedSink]:
    """Capture the logs of all file sinks among a query's sinks. Other sinks have no log that could be restored.

    Args:
        descriptions: Sinks as the query's progress names them.
        batch_id: The batch of the snapshot.

    Raises:
        IncompleteCutError: An entry of a log is missing.
        StorageAccessError: A log cannot be read.
    """
    paths = [path for path in (file_sink_path(text) for text in descriptions) if path is not None]
    return [_capture(index, path, batch_id) for index, path in enumerate(paths)]


def roll_back(path: str, batch_id: int, entries: Sequence[SinkEntry], *, still_mine: StillMine) -> None:
    """Roll a file sink back to the batch of a snapshot.

    Readers then see exactly the rows up to that batch; files of later batches stay on disk but are
    not listed. The roll-back can be interrupted at any point, even by a power failure, and
    repeated: the needed entries are durable before anything is deleted, and the newest entries are
    deleted first, so the log never has a hole that Spark would reject. On return the deletions are
    durable.

    Args:
        path: FileIO to which the sink writes.
        batch_id: The batch; -1 empties the log.
        entries: The snapshot's log entries of this sink.
        still_mine: Entered around each change of a file; raises if this process is no longer the
            writer.

    Raises:
        SinkRollbackError: The sink cannot be read or written; the roll-back is incomplete.
    """
    folder = open_file_io(path)
    wanted = {entry.name: entry.data for entry in entries}
    try:
        present = {name: number for name in folder.list(LOG) if (number := entry_id(name)) is not None}
        for name in sorted(wanted, key=lambda name: entry_id(name) or 0):
            if name not in present or folder.read(f"{LOG}/{name}") != wanted[name]:
                # The checksum file is deleted first: next to new content it would make Hadoop
                # reject the entry.
                with still_mine():
                    folder.delete(f"{LOG}/.{name}.crc")
                with still_mine():
                    folder.write(f"{LOG}/{name}", [wanted[name]])
            else:
                # Spark wrote this entry and does not flush.
                folder.flush(f"{LOG}/{name}")
        if present:
            folder.flush(LOG)
        for name in sorted(_surplus(present, wanted, batch_id), key=present.__getitem__, reverse=True):
            with still_mine():
                folder.delete(f"{LOG}/{name}")
            with still_mine():
                folder.delete(f"{LOG}/.{name}.crc")
        if present:
            # Without this flush, deleted entries could reappear after a power failure, and Spark
            # would skip their batches.
            folder.flush(LOG)
    except (StorageAccessError, FileNotFoundError) as error:
        raise SinkRollbackError(
            f"The sink {path} could not be brought back to batch {batch_id}: {error}. Make it reachable and "
            "start again: "
            "the roll-back goes on where it stopped. Do not start the query before, it would skip batches."
        ) from error


def own_past(sinks: Sequence[str], batch_id: int) -> list[CapturedSink]:
    """Read the logs of file sinks up to a batch from the sinks themselves.

    Args:
        sinks: The query's sinks, as its progress names them.
        batch_id: The batch to go back to.

    Raises:
        SinkRollbackError: A log no longer reaches back that far.
        IncompleteCutError: An entry of a log is missing.
        StorageAccessError: A log cannot be read.
    """
    captured = capture(sinks, batch_id)
    for sink in captured:
        first = sink.files[0].source.rsplit("/", 1)[-1] if sink.files else "0"
        if first != "0" and not first.endswith(COMPACT):
            raise SinkRollbackError(
                f"{sink.path}/{LOG} begins with entry {first}, and what came before is only in later compact "
                f"entries: the sink cannot be brought back to batch {batch_id}. Go back to a snapshot, which carries "
                "this log."
            )
    return captured


def roll_back_to_own_past(sinks: Sequence[str], batch_id: int, *, still_mine: StillMine) -> list[str]:
    """Roll file sinks back to a batch by their own logs; can be interrupted at any point and repeated.

    Args:
        sinks: The query's sinks, as its progress names them.
        batch_id: The batch to go back to.
        still_mine: Entered around each change of a file; raises if this process is no longer the
            writer.

    Returns:
        The folders that were rolled back.

    Raises:
        SinkRollbackError: A sink cannot be rolled back.
        IncompleteCutError: An entry of a log is missing.
        StorageAccessError: A log cannot be read.
    """
    captured = own_past(sinks, batch_id)
    for sink in captured:
        entries = [SinkEntry(file.source.rsplit("/", 1)[-1], file.folder.read(file.source)) for file in sink.files]
        roll_back(sink.path, batch_id, entries, still_mine=still_mine)
    return [sink.path for sink in captured]


def _surplus(present: dict[str, int], wanted: dict[str, bytes], batch_id: int) -> list[str]:
    """Entries that do not belong to the snapshot's history: later ones, and those of another timeline."""
    compacts = [number for name in wanted if name.endswith(COMPACT) and (number := entry_id(name)) is not None]
    # Entries below the snapshot's compact entry are not read, and Spark derives its compaction
    # interval from the existing entries.
    unread_below = max(compacts, default=-1)
    return [
        name
        for name, number in present.items()
        if number > batch_id or (name not in wanted and number >= max(unread_below, 0))
    ]


def _capture(index: int, path: str, batch_id: int) -> CapturedSink:
    folder = open_file_io(path)
    names: dict[int, str] = {}
    newest: int | None = None
    for name in folder.list(LOG):
        number = entry_id(name)
        if number is None:
            continue
        newest = number if newest is None else max(newest, number)
        if number <= batch_id:
            names[number] = name if name.endswith(COMPACT) else names.get(number, name)
    if not names:
        return CapturedSink(path, None, (), newest)
    last = max(names)
    first = max((number for number, name in names.items() if name.endswith(COMPACT)), default=min(names))
    files = [_entry(folder, index, names.get(number), number, last) for number in range(first, last + 1)]
    return CapturedSink(path, last, tuple(files), newest)


def _entry(folder: FileIO, index: int, name: str | None, number: int, last: int) -> NeededFile:
    if name is None:
        raise IncompleteCutError(
            f"{folder.url}/{LOG}/{number} is missing: the sink's log is needed up to batch {last} to bring "
            "the sink back "
            "to it. Do not delete files there; if this one is gone for good, write to a new folder."
        )
    source = f"{LOG}/{name}"
    with folder.open(source) as stream:
        check_log_version(stream.read(_VERSION_LINE_BYTES).partition(b"\n")[0], f"{folder.url}/{source}")
    return NeededFile(folder, source, f"{SINKS_FOLDER}/{index}/{name}", *folder.version(source))
