"""Spark's file sink (Parquet, JSON, CSV, ...): its log numbers the batches, and is rolled back with the query."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.location import open_file_io, same_folder
from dagster_ckpt.sinks.file_sink_examination import examine_file_sink
from dagster_ckpt.sinks.file_sink_log import LOG, capture_log, logged_batch, own_past, roll_back
from dagster_ckpt.sinks.part_files import Leftovers, PartFile, delete_part_files, read_leftovers
from dagster_ckpt.sinks.sink import OnRepeat, Replay, RollBack, Sink, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import CapturedSink, SinkEntry, StillMine
from dagster_ckpt.spark.checkpoint_dir.file_source import entry_id
from dagster_ckpt.spark.doctor.finding import Finding
from dagster_ckpt.spark.doctor.subject import Subject

_NAME = re.compile(r"FileSink\[(?P<path>.+)\]")
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
                return self._told(SinkEffect.EXACT, "Its log is emptied: readers see what the new run writes.")
            if replay.log_entries is None:
                own_past(self.folder, replay.to_batch)
            elif (entries := self._noted(replay.log_entries)) is None:
                return self._not_in_the_snapshot(max(names, default=-1), replay)
            elif not folder.exists() and entries:
                return self._told(
                    SinkEffect.LOSE,
                    f"The folder is gone, and with it the rows of all batches up to {replay.to_batch}.",
                    "Put the folder back.",
                )
        except StorageAccessError as error:
            return self._told(SinkEffect.UNREACHABLE, f"It has to be rolled back and cannot be reached: {error}")
        except CkptError as error:
            return self._told(SinkEffect.IRREVERSIBLE, f"It cannot be rolled back: {error}")
        undone = sum(1 for number in names if number > replay.to_batch)
        reason = f"Its log is rolled back to batch {replay.to_batch}: {undone} entries go"
        return self._told(SinkEffect.EXACT, f"{reason}, and readers see each row once.")

    def leftovers(self) -> Leftovers | None:
        """See `Sink.leftovers`."""
        return read_leftovers(self.folder)

    def delete_leftovers(self, files: Sequence[PartFile]) -> None:
        """See `Sink.delete_leftovers`."""
        delete_part_files(self.folder, files)

    def examine(self, subject: Subject) -> Iterator[Finding]:
        """See `Sink.examine`."""
        return examine_file_sink(subject, open_file_io(self.folder))

    def _told(self, effect: SinkEffect, reason: str, advice: str = "") -> SinkForecast:
        return SinkForecast(self.name, effect, reason, advice)

    def _noted(self, log_entries: Mapping[str, Sequence[SinkEntry]]) -> Sequence[SinkEntry] | None:
        # The catalog may contain the folder in Spark's spelling, and the snapshot in the user's.
        return next((entries for noted, entries in log_entries.items() if same_folder(noted, self.folder)), None)

    def _not_in_the_snapshot(self, last_batch: int, replay: Replay) -> SinkForecast:
        if last_batch <= replay.to_batch:
            return self._told(SinkEffect.EXACT, f"It holds no batch after {replay.to_batch}.")
        return self._told(
            SinkEffect.LOSE,
            "The snapshot was taken before the query wrote there, so the sink is not rolled back: it passes over "
            f"batches up to {last_batch} whatever is in them.",
            "Write to a new folder.",
        )
