"""Spark's file sink (Parquet, JSON, CSV, ...): its log numbers the batches, and is rolled back with the query."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

from dagster_ckpt.errors import CkptError, RestoreError, SinkRollbackError, StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.file_sink_log import (
    LOG,
    bare,
    capture_log,
    entry_of,
    files_of,
    files_of_batch,
    listed,
    log_entries,
    logged_batch,
    name_below,
    own_past,
    roll_back,
    url_of,
)
from dagster_ckpt.sinks.file_sink_repair import damaged_log, examine_log, missing_of_left_timeline, missing_part_files
from dagster_ckpt.sinks.sink import AskedBatch, BatchRows, OnRepeat, Replay, RollBack, Sink, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import CapturedSink, SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_ids, existing_files
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.doctor.finding import Finding, Subject
from dagster_ckpt.spark.query.description import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# A uuid makes the bare name unique (`ManifestFileCommitProtocol`).
_PART = re.compile(r"part-\d{5,}-(?P<uuid>[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}).*")
# Left by a batch job (`FileOutputCommitter`).
_SUCCESS = "_SUCCESS"
# Paths that only another file sink or a table of Delta, Hudi or Iceberg has.
_ANOTHERS = re.compile(r"(?P<folder>.+?)/(?:(?:_spark_metadata|_delta_log|\.hoodie)/|metadata/[^/]+\.metadata\.json$)")
_NAMED = 5
# Other formats with a path (Delta, Iceberg) keep their own record of batches, or are `NamedOutput.of_files`.
_FORMATS = {"parquet", "json", "csv", "orc", "text", "avro", "xml"}
_AS_TEXT = ("csv", "json", "text", "xml")
_NOT_OF_FILES = ("path", "checkpointlocation")


@dataclass(frozen=True)
class PartFile:
    path: str
    size: int
    modified_at_ms: int | None

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    @property
    def uuid(self) -> str | None:
        """A file sink gives each file its own, a batch job one to all its files."""
        match = _PART.fullmatch(self.name)
        return match["uuid"] if match else None


@dataclass(frozen=True)
class SinkLog:
    names: frozenset[str]
    newest_at_ms: int | None


@dataclass(frozen=True)
class Leftovers:
    """Part files, and the log that decides which of them are needed; the others are leftovers.

    Attributes:
        files: Listed before the log: a file committed in between is then in the log.
        now_ms: By the clock that dates the files, if any.
        batch_folders: Folders to which a batch job has written, relative to the sink, which is ".".
    """

    files: tuple[PartFile, ...]
    log: SinkLog
    now_ms: int | None
    batch_folders: frozenset[str] = frozenset()


class FileSink(Sink):
    names = re.compile(r"FileSink\[(?P<place>.+)\]")
    on_repeat = OnRepeat.SKIPS
    rolls_back = True

    def __init__(self, name: str, place: str) -> None:
        super().__init__(name, place)
        self.folder = place

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        return f"FileSink[{place}]" if output_format in _FORMATS else None

    @classmethod
    def at(cls, folder: str) -> Self:
        return cls(f"FileSink[{folder}]", folder)

    def last_batch(self, query_id: str | None) -> int | None:
        return logged_batch(self.folder)

    def capture(self, folder: str, batch_id: int) -> CapturedSink | None:
        return capture_log(self.folder, folder, batch_id)

    def rows_of_batch(self, asked: AskedBatch) -> BatchRows:
        return _rows_in_files(self.folder, asked)

    def check_roll_back(self, to: RollBack) -> None:
        if to.entries is None and to.batch_id >= 0:
            own_past(self.folder, to.batch_id)

    def roll_back(self, to: RollBack, still_mine: StillMine) -> None:
        entries: Sequence[SinkEntry] = ()
        if to.batch_id >= 0:
            entries = own_past(self.folder, to.batch_id) if to.entries is None else to.entries
        roll_back(self.folder, to.batch_id, entries, still_mine=still_mine)

    def forecast(self, replay: Replay) -> SinkForecast:
        try:
            folder = open_file_io(self.folder)
            names = log_entries(folder)
            if replay.to_batch < 0:
                return self.forecast_as(
                    SinkEffect.EXACT, "Its log is emptied: readers see only what the new run writes."
                )
            if replay.log_entries is None:
                own_past(self.folder, replay.to_batch)
            elif (entries := self._noted(replay.log_entries)) is None:
                return self._not_in_the_snapshot(max(names, default=-1), replay)
            elif not folder.exists() and entries:
                return self.forecast_as(
                    SinkEffect.LOSE,
                    f"The folder is missing, and with it the rows of all batches up to {replay.to_batch}.",
                    "Put the folder back.",
                )
            else:
                damage = "Its log is damaged, and " if damaged_log(self.folder, entries) is not None else ""
                gone = (missing_part_files if damage else missing_of_left_timeline)(self.folder, entries)
                if gone:
                    return self.forecast_as(
                        SinkEffect.LOSE,
                        f"{damage}{len(gone)} files that the snapshot lists up to batch {replay.to_batch} are not "
                        f"there with their lengths: {', '.join(gone[:_NAMED])}.",
                        "Put these files back, or start from a snapshot before their batches.",
                    )
        except StorageAccessError as error:
            return self.forecast_as(SinkEffect.UNREACHABLE, f"It must be rolled back but cannot be reached: {error}")
        except CkptError as error:
            return self.forecast_as(SinkEffect.IRREVERSIBLE, f"It cannot be rolled back: {error}")
        undone = sum(1 for number in names if number > replay.to_batch)
        reason = f"Its log is rolled back to batch {replay.to_batch} (entries removed: {undone})"
        return self.forecast_as(SinkEffect.EXACT, f"{reason}. Readers see each row once.")

    def leftovers(self) -> Leftovers:
        files = list(_all_files(self.folder))
        batch_folders = frozenset(str(PurePosixPath(file.path).parent) for file in files if file.name == _SUCCESS)
        parts = tuple(_own_part_files(files))
        return Leftovers(parts, read_sink_log(self.folder), storage_time_ms(self.folder), batch_folders)

    def delete_leftovers(self, files: Sequence[PartFile]) -> None:
        delete_part_files(self.folder, files)

    def examine(self, subject: Subject) -> Iterator[Finding]:
        return examine_log(subject, open_file_io(self.folder))

    def _noted(self, log_entries: Mapping[str, Sequence[SinkEntry]]) -> Sequence[SinkEntry] | None:
        return next((entries for noted, entries in log_entries.items() if same_folder(noted, self.folder)), None)

    def _not_in_the_snapshot(self, last_batch: int, replay: Replay) -> SinkForecast:
        if last_batch <= replay.to_batch:
            return self.forecast_as(SinkEffect.EXACT, f"It has no batch after {replay.to_batch}.")
        return self.forecast_as(
            SinkEffect.LOSE,
            "The snapshot was taken before the query wrote there, so the sink is not rolled back: it skips batches "
            f"up to {last_batch}, even if they contain other rows.",
            "Write to a new folder.",
        )


def _rows_in_files(folder: str, asked: AskedBatch) -> BatchRows:
    files = files_of_batch(folder, asked.batch_id)
    if files is None:
        return BatchRows(None, _without_entry(folder, asked.batch_id))
    missing = sorted(set(files) - set(existing_files(files, asked.session) or ()))
    if missing:
        return BatchRows(None, f"{len(missing)} of the batch's {len(files)} files are gone, such as {missing[0]}")
    options = {name: value for name, value in asked.options.items() if name not in _NOT_OF_FILES}

    def read(places: list[str], **more: str) -> DataFrame:
        reader = asked.session.read.format(asked.output_format).options(**options, **more).schema(asked.like.schema)
        return reader.load(places).select(*map(quoted, asked.like.columns))

    replayed = None
    if asked.output_format in _AS_TEXT:
        # Text formats store no nulls, and times as milliseconds.
        asked.like.write.format(asked.output_format).options(**options).save(asked.scratch)
        replayed = read([asked.scratch])
    rows = read([unquote(file) for file in files], basePath=folder) if files else asked.like.limit(0)
    return BatchRows(rows, f"{len(files)} files in {folder}", replayed)


def _without_entry(folder: str, batch_id: int) -> str:
    newest = max(log_entries(open_file_io(folder)), default=None)
    if newest is None or newest < batch_id:
        return f"{folder} does not have the batch: its log ends at {'nothing' if newest is None else newest}"
    return f"{folder}/{LOG} no longer lists the files of the batch apart: its entry was merged into a later one"


def _own_part_files(files: Sequence[PartFile]) -> list[PartFile]:
    """Leave out folders of another output, whose files have such names, too."""
    others = {match["folder"] for file in files if (match := _ANOTHERS.match(file.path)) is not None}
    own = [file for file in files if others.isdisjoint(map(str, PurePosixPath(file.path).parents))]
    return sorted((file for file in own if _PART.fullmatch(file.name)), key=lambda file: file.path)


def storage_time_ms(path: str) -> int | None:
    return open_file_io(path).clock_ms(f".dagster_ckpt-probe-{uuid.uuid4().hex}")


def read_sink_log(path: str) -> SinkLog:
    folder = open_file_io(path)
    entries = entry_ids(folder.list(LOG))
    if not entries:
        raise SinkRollbackError(
            f"{path} has no log ({LOG} is missing or empty), so orphaned files there cannot be identified. Readers "
            "read every file in such a folder; delete unneeded ones by hand."
        )
    own_past(path, max(entries.values()))
    newest = max(entries, key=entries.__getitem__)
    written = {file.name: file.modified_at_ms for file in _all_files(f"{path.rstrip('/')}/{LOG}")}
    files = (listed(folder.read(f"{LOG}/{entry}"), f"{path}/{LOG}/{entry}") for entry in entries)
    return SinkLog(frozenset(bare(file) for each in files for file in each), written.get(newest))


def delete_part_files(path: str, files: Iterable[PartFile]) -> None:
    folder = open_file_io(path)
    for file in files:
        folder.delete(file.path)
        parent, _, name = file.path.rpartition("/")
        folder.delete(f"{parent}/.{name}.crc".lstrip("/"))


def _all_files(path: str) -> Iterator[PartFile]:
    for name, entry in open_file_io(path, follow_links=False).find(hidden=True):
        with suppress(FileNotFoundError):
            status = entry.status()
            yield PartFile(name, status.version.size, status.modified_at_ms)


def fork_output(
    old: str,
    new: str,
    batch_id: int,
    entries: Sequence[SinkEntry],
    *,
    still_mine: StillMine,
    may_link: bool = True,
) -> None:
    """Copy the rows of `old` up to a batch, whose log is `entries`; repeatable if interrupted.

    With `may_link`, files on one disk are hard-linked.
    """
    target = open_file_io(new)
    target.make()
    moved = []
    for entry in entries:
        with still_mine():
            # Before each entry, so that copies overwrite nothing of a successor.
            pass
        lines = parse_log_lines(entry.data, f"{old}/{entry.name}")
        moved.append(entry_of(entry.name, [_moved(old, new, dict(line), may_link=may_link) for line in lines]))
    target.flush_all()
    roll_back(new, batch_id, moved, still_mine=still_mine)


def copied_files(old: str, new: str, entries: Sequence[SinkEntry]) -> frozenset[str]:
    return frozenset(url_of(new, name_below(old, where)) for where in files_of(entries, old))


def unexpected_file(new: str, old: str, entries: Sequence[SinkEntry] = ()) -> str | None:
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
    # An interrupted fork leaves whole files only.
    if may_link and (target.size(name) is not None or target.adopt(name, source, name)):
        return
    with source.open(name) as stream:
        target.write(name, iter(lambda: stream.read(1 << 20), b""))
