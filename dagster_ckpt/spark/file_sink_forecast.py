"""What a file sink will do when batches it has written come again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.spark.file_sink import LOG, SinkEntry
from dagster_ckpt.spark.file_source import entry_id
from dagster_ckpt.spark.opening import open_folder
from dagster_ckpt.spark.output import same_folder
from dagster_ckpt.spark.rewind import own_past
from dagster_ckpt.spark.sink_effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.sinks import file_sink_path


def forecast_file_sink(sink: str, replay: Replay) -> SinkForecast:
    """Say what a file sink will do that the guard lets a start bring back: whose it is was judged there.

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
        elif (entries := _noted(path, replay.log_entries)) is None:
            return _not_in_the_image(sink, max(names, default=-1), replay)
        elif not folder.exists() and entries:
            return SinkForecast(
                sink,
                SinkEffect.LOSE,
                f"The folder is gone, and with it the rows of all batches up to {replay.to_batch}.",
                "Put the folder back.",
            )
    except StorageAccessError as error:
        return SinkForecast(sink, SinkEffect.UNREACHABLE, f"It has to be rolled back and cannot be reached: {error}")
    except CkptError as error:
        return SinkForecast(sink, SinkEffect.UNREACHABLE, f"It cannot be rolled back: {error}")
    undone = sum(1 for number in names if number > replay.to_batch)
    reason = f"Its log is rolled back to batch {replay.to_batch}: {undone} entries go"
    return SinkForecast(sink, SinkEffect.EXACT, f"{reason}, and readers see each row once.")


def _noted(path: str, log_entries: Mapping[str, Sequence[SinkEntry]]) -> Sequence[SinkEntry] | None:
    # The catalog may have the folder as Spark spells it, and the image as a person does.
    return next((entries for noted, entries in log_entries.items() if same_folder(noted, path)), None)


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
