"""What a file sink will do when batches it has written come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.spark.file_sink import LOG, SinkEntry
from dagster_ckpt.spark.file_source import entry_id
from dagster_ckpt.spark.logs import parse_log_lines
from dagster_ckpt.spark.opening import open_folder
from dagster_ckpt.spark.rewind import own_past
from dagster_ckpt.spark.sink_effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.sinks import file_sink_path


def forecast_file_sink(sink: str, replay: Replay) -> SinkForecast:
    """Say what a file sink will do; its log is rolled back, so it is exact unless that log tells otherwise.

    Args:
        sink: What Spark calls it.
        replay: What it will see.
    """
    path = file_sink_path(sink) or ""
    try:
        folder = open_folder(path)
        names = {number: name for name in folder.list(LOG) if (number := entry_id(name)) is not None}
        if replay.to_batch < 0:
            return SinkForecast(sink, SinkEffect.EXACT, "Its log is emptied: readers see what the new run writes.")
        if replay.log_entries is None:
            own_past([sink], replay.to_batch)
        elif path not in replay.log_entries:
            return _not_in_the_image(sink, max(names, default=-1), replay)
        elif not folder.exists() and replay.log_entries.get(path):
            return SinkForecast(
                sink,
                SinkEffect.LOSE,
                f"The folder is gone, and with it the rows of all batches up to {replay.to_batch}.",
                "Put the folder back.",
            )
        elif _is_of_another_query(path, names, replay.log_entries.get(path, ())):
            return SinkForecast(
                sink,
                SinkEffect.LOSE,
                f"{LOG} shares no file with the image's: another query, or another beginning, wrote it, and what it "
                "wrote would go out of sight.",
                "Write to another folder, or move that log away first if its rows are not needed.",
            )
    except StorageAccessError as error:
        return SinkForecast(sink, SinkEffect.UNREACHABLE, f"It has to be rolled back and cannot be reached: {error}")
    except CkptError as error:
        return SinkForecast(sink, SinkEffect.UNREACHABLE, f"It cannot be rolled back: {error}")
    undone = sum(1 for number in names if number > replay.to_batch)
    reason = f"Its log is rolled back to batch {replay.to_batch}: {undone} entries go"
    return SinkForecast(sink, SinkEffect.EXACT, f"{reason}, and readers see each row once.")


def _not_in_the_image(sink: str, last_batch: int, replay: Replay) -> SinkForecast:
    if last_batch <= replay.to_batch:
        return SinkForecast(sink, SinkEffect.EXACT, f"It holds no batch after {replay.to_batch}.")
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        f"The image was taken before the query wrote there, so the sink is not rolled back: it passes over batches up "
        f"to {last_batch} whatever is in them.",
        "Write to a new folder.",
    )


def _is_of_another_query(path: str, names: Mapping[int, str], entries: Sequence[SinkEntry]) -> bool:
    """Whether the log at hand and that of the image have not one file in common, though both name some."""
    folder = open_folder(path)
    noted = {file for entry in entries for file in _files(entry.data, entry.name)}
    if not noted or not names:
        return False
    found: set[object] = set()
    for name in names.values():
        files = _files(folder.read(f"{LOG}/{name}"), name)
        if files & noted:
            return False
        found |= files
    return bool(found)


def _files(data: bytes, name: str) -> set[object]:
    return {line.get("path") for line in parse_log_lines(data, name)}
