"""Spark's file sink (Parquet, JSON, CSV, ...): its log numbers the batches, and is rolled back with the query.

`FileSink` implements the protocol. `examine_file_sink` compares a sink with the checkpoint for the doctor, and
`fork_output` copies the rows to a fork. How the log itself is rolled back: `file_sink_log.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Self

from dagster_ckpt.errors import CkptError, LiveDirectoryError, RestoreError, StorageAccessError, UnknownLayoutError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.file_sink_damage import damaged_log, missing_part_files
from dagster_ckpt.sinks.file_sink_log import (
    LOG,
    capture_log,
    files_of,
    has_beginning,
    log_entries,
    logged_batch,
    needed_entries,
    own_past,
    roll_back,
)
from dagster_ckpt.sinks.file_sink_paths import below, name_below, url_of
from dagster_ckpt.sinks.part_files import Leftovers, PartFile, delete_part_files, read_leftovers
from dagster_ckpt.sinks.sink import OnRepeat, Replay, RollBack, Sink, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import CapturedSink, SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.checksums import checksum_file, fits_hadoop
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.doctor.finding import Code, Finding, Subject, error, note, warning

_NAME = re.compile(r"FileSink\[(?P<path>.+)\]")
# Files that a message names.
_NAMED = 5
# Spark's built-in file formats; others with a path (Delta, Iceberg) keep their own record of
# batches.
_FORMATS = {"parquet", "json", "csv", "orc", "text", "avro", "xml"}


class FileSink(Sink):
    """A folder of files with the log `_spark_metadata`, which skips known batches of any query."""

    on_repeat = OnRepeat.SKIPS
    rolls_back = True

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name, place)
        self.folder = place

    @classmethod
    def of(cls, name: str) -> Self | None:
        """See `Sink.of`."""
        match = _NAME.fullmatch(name)
        return cls(name, match["path"]) if match else None

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        """See `Sink.name_of`."""
        return f"FileSink[{place}]" if output_format in _FORMATS else None

    @classmethod
    def at(cls, folder: str) -> Self:
        """The file sink of a folder."""
        return cls(f"FileSink[{folder}]", folder)

    def last_batch(self, query_id: str | None) -> int | None:
        """See `Sink.last_batch`."""
        return logged_batch(self.folder)

    def capture(self, folder: str, batch_id: int) -> CapturedSink | None:
        """See `SinkToCapture`."""
        return capture_log(self.folder, folder, batch_id)

    def check_roll_back(self, to: RollBack) -> None:
        """See `Sink.check_roll_back`."""
        if to.entries is None and to.batch_id >= 0:
            own_past(self.folder, to.batch_id)

    def roll_back(self, to: RollBack, still_mine: StillMine) -> None:
        """See `Sink.roll_back`."""
        entries: Sequence[SinkEntry] = ()
        if to.batch_id >= 0:
            entries = own_past(self.folder, to.batch_id) if to.entries is None else to.entries
        roll_back(self.folder, to.batch_id, entries, still_mine=still_mine)

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        try:
            folder = open_file_io(self.folder)
            names = {number: name for name in folder.list(LOG) if (number := entry_id(name)) is not None}
            if replay.to_batch < 0:
                return self._forecast_of(
                    SinkEffect.EXACT, "Its log is emptied: readers see only what the new run writes."
                )
            if replay.log_entries is None:
                own_past(self.folder, replay.to_batch)
            elif (entries := self._noted(replay.log_entries)) is None:
                return self._not_in_the_snapshot(max(names, default=-1), replay)
            elif not folder.exists() and entries:
                return self._forecast_of(
                    SinkEffect.LOSE,
                    f"The folder is missing, and with it the rows of all batches up to {replay.to_batch}.",
                    "Put the folder back.",
                )
            elif damaged_log(self.folder, entries) is not None and (gone := missing_part_files(self.folder, entries)):
                return self._forecast_of(
                    SinkEffect.LOSE,
                    f"Its log is damaged, and {len(gone)} files that it listed up to batch {replay.to_batch} are not "
                    f"there with their lengths: {', '.join(gone[:_NAMED])}.",
                    "Put these files back, or start from a snapshot before their batches.",
                )
        except StorageAccessError as error:
            return self._forecast_of(SinkEffect.UNREACHABLE, f"It must be rolled back but cannot be reached: {error}")
        except CkptError as error:
            return self._forecast_of(SinkEffect.IRREVERSIBLE, f"It cannot be rolled back: {error}")
        undone = sum(1 for number in names if number > replay.to_batch)
        reason = f"Its log is rolled back to batch {replay.to_batch} (entries removed: {undone})"
        return self._forecast_of(SinkEffect.EXACT, f"{reason}. Readers see each row once.")

    def leftovers(self) -> Leftovers | None:
        """See `Sink.leftovers`."""
        return read_leftovers(self.folder)

    def delete_leftovers(self, files: Sequence[PartFile]) -> None:
        """See `Sink.delete_leftovers`."""
        delete_part_files(self.folder, files)

    def examine(self, subject: Subject) -> Iterator[Finding]:
        """See `Sink.examine`."""
        return examine_file_sink(subject, open_file_io(self.folder))

    def _forecast_of(self, effect: SinkEffect, reason: str, advice: str = "") -> SinkForecast:
        return SinkForecast(self.name, effect, reason, advice)

    def _noted(self, log_entries: Mapping[str, Sequence[SinkEntry]]) -> Sequence[SinkEntry] | None:
        # The catalog may contain the folder in Spark's spelling, and the snapshot in the user's.
        return next((entries for noted, entries in log_entries.items() if same_folder(noted, self.folder)), None)

    def _not_in_the_snapshot(self, last_batch: int, replay: Replay) -> SinkForecast:
        if last_batch <= replay.to_batch:
            return self._forecast_of(SinkEffect.EXACT, f"It has no batch after {replay.to_batch}.")
        return self._forecast_of(
            SinkEffect.LOSE,
            "The snapshot was taken before the query wrote there, so the sink is not rolled back: it skips batches "
            f"up to {last_batch}, even if they contain other rows.",
            "Write to a new folder.",
        )


# A file whose name happens to be a number could make a very large gap.
_MAX_REPORTED_GAPS = 1_000


def examine_file_sink(subject: Subject, folder: FileIO) -> Iterator[Finding]:
    """Compare the log of a file sink with the checkpoint."""
    # Commits, sink, offsets: the reverse of the order in which a running query writes them, so
    # later reads may be newer.
    committed = max(batch_ids(subject.folder, COMMITS), default=-1)
    names = log_entries(folder)
    planned = max(batch_ids(subject.folder, OFFSETS), default=-1)
    last = max(names, default=-1)
    where = f"{folder.url}/{LOG}"
    if last > planned:
        yield error(
            Code.SINK_LOG_AHEAD,
            where,
            f"The sink has batches up to {last}, but the checkpoint has planned only {planned}: Spark silently skips "
            f"every batch up to {last}, and rows are lost if a batch has other boundaries the second time.",
        )
    has_ids = subject.commit_entry is not None and bool(subject.commit_entry.state_ids)
    # Read the commits again at the end: a running query may have committed this batch, or is about
    # to.
    if has_ids and last == planned == committed + 1 > max(batch_ids(subject.folder, COMMITS), default=-1):
        yield note(
            Code.SINK_HAS_BATCH_IN_FLIGHT,
            f"{where}/{names[last]}",
            f"The sink has batch {last}, which is not committed, and state is in checkpoint format v2. Unless a "
            "query runs there, Spark would skip the batch without running it and fail, at every start: assertion "
            "failed: CheckpointInfo length: 0.",
        )
    if last < committed:
        yield warning(
            Code.SINK_LOG_BEHIND,
            where,
            f"Batch {committed} is committed, but the sink has batches only up to {last}: rows were lost, or the "
            "output folder was replaced or rolled back on its own.",
        )
    yield from _entries(folder, names)


def _entries(folder: FileIO, names: Mapping[int, str]) -> Iterator[Finding]:
    """Examine each entry that readers of the folder and the next compaction need."""
    where, is_below = f"{folder.url}/{LOG}", below(folder.url)
    needed, elsewhere = needed_entries(names), 0
    if names and not has_beginning(names):
        yield error(
            Code.SINK_LOG_GAP,
            f"{where}/{needed.start - 1}{COMPACT}",
            f"The sink's log begins with entry {needed.start}, and no compact entry has what came before: readers and "
            "the next compaction fail, and no snapshot can be taken.",
        )
    missing = (number for number in needed if number not in names)
    for number in sorted({*islice(missing, _MAX_REPORTED_GAPS), *(number for number in names if number in needed)}):
        if number not in names:
            yield error(
                Code.SINK_LOG_GAP,
                f"{where}/{number}",
                f"The sink's log has entries up to {needed.stop - 1}, but not this one: readers and the next "
                "compaction fail, and no snapshot can be taken.",
            )
            continue
        entry = f"{LOG}/{names[number]}"
        try:
            data = folder.read(entry)
            if fits_hadoop(folder, entry, data) is False:
                yield error(
                    Code.CHECKSUM_DIFFERS,
                    f"{folder.url}/{entry}",
                    f"It does not match Hadoop's checksum {checksum_file(entry)}: it was altered after it was written, "
                    "and readers fail on it.",
                )
            lines = parse_log_lines(data, f"{folder.url}/{entry}")
        except UnknownLayoutError as trouble:
            yield error(Code.UNKNOWN_VERSION, f"{folder.url}/{entry}", str(trouble))
        except LiveDirectoryError as trouble:
            yield error(Code.SINK_LOG_UNREADABLE, f"{folder.url}/{entry}", str(trouble))
        except FileNotFoundError:
            # Compacted since it was listed.
            continue
        else:
            foreign = [str(line.get("path")) for line in lines if not is_below(str(line.get("path")))]
            if foreign and not elsewhere:
                yield error(
                    Code.SINK_LOG_ELSEWHERE,
                    where,
                    f"The sink's log lists files that do not lie in its folder, such as {foreign[0]}: the output was "
                    "moved or copied. Readers miss these rows, or read another folder's files.",
                )
            elsewhere += len(foreign)


def fork_output(
    old: str,
    new: str,
    batch_id: int,
    entries: Sequence[SinkEntry],
    *,
    still_mine: StillMine,
    may_link: bool = True,
) -> None:
    """Copy the rows of a folder up to a batch to another folder; can be interrupted and repeated.

    Args:
        old: FileIO of the file sink.
        new: FileIO of the fork; created if it does not exist.
        batch_id: The batch.
        entries: The log of `old` up to the batch.
        still_mine: Entered around each change of a file; raises if this process is no longer the
            writer.
        may_link: Hard-link files on one disk, so that they share their bytes; otherwise copy them.

    Raises:
        RestoreError: The log lists a file that is missing or outside of the folder.
        LiveDirectoryError: An entry of the log cannot be parsed.
        SinkRollbackError: The log of the new folder cannot be written.
        StorageAccessError: A file cannot be read or written.
    """
    target = open_file_io(new)
    target.make()
    moved = []
    for entry in entries:
        with still_mine():
            # The copied files are new or exist already, so nothing of a successor is overwritten.
            pass
        lines = parse_log_lines(entry.data, f"{old}/{entry.name}")
        texts = [
            "v1",
            *(json.dumps(_moved(old, new, dict(line), may_link=may_link), separators=(",", ":")) for line in lines),
        ]
        moved.append(SinkEntry(entry.name, "\n".join(texts).encode()))
    # Make the files durable first: a log that lists them may be read at once.
    target.flush_all()
    roll_back(new, batch_id, moved, still_mine=still_mine)


def copied_files(old: str, new: str, entries: Sequence[SinkEntry]) -> frozenset[str]:
    """The files that the log of a folder lists after it got the rows of another one.

    Raises:
        RestoreError: The log lists a file outside of the folder.
        LiveDirectoryError: An entry of the log cannot be parsed.
    """
    return frozenset(url_of(new, name_below(old, where)) for where in files_of(entries, old))


def unexpected_file(new: str, old: str, entries: Sequence[SinkEntry] = ()) -> str | None:
    """A file in a folder that `fork_output` would not have created, or None if there is none.

    Args:
        new: The folder.
        old: FileIO of the file sink whose rows it gets.
        entries: The log of `old` up to the copied rows; if empty, the folder must be empty.

    Raises:
        RestoreError: The log lists a file outside of the folder.
        LiveDirectoryError: An entry of the log cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    known = {name_below(old, where) for where in files_of(entries, old)} | {f"{LOG}/{entry.name}" for entry in entries}
    return next((path for path, _ in open_file_io(new).find() if path not in known), None)


def _moved(old: str, new: str, line: dict[str, Any], *, may_link: bool) -> dict[str, Any]:
    where = str(line.get("path", ""))
    name = name_below(old, where)
    try:
        _bring(old, new, name, may_link=may_link)
    except FileNotFoundError as error:
        raise RestoreError(
            f"{where} is missing, although the log of {old} lists it, so the output cannot be forked. Fork without it."
        ) from error
    return {**line, "path": url_of(new, name)}


def _bring(old: str, new: str, name: str, *, may_link: bool) -> None:
    source, target = open_file_io(old), open_file_io(new)
    # A file that an interrupted fork brought is whole, and its name is unique.
    if may_link and (target.size(name) is not None or target.adopt(name, source, name)):
        return
    with source.open(name) as stream:
        target.write(name, iter(lambda: stream.read(1 << 20), b""))
