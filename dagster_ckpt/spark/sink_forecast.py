"""What each sink of a query will do when batches it has written come again. Nothing is changed.

Sinks know a batch by its number: some for whatever query writes there (the file sink), some together with the
query's id (Delta, Iceberg), some not at all. A rewound query cuts its batches anew, so the same number is other rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.spark.delta_log import read_delta_memory
from dagster_ckpt.spark.file_sink import LOG, SinkEntry
from dagster_ckpt.spark.file_source import entry_id
from dagster_ckpt.spark.folder import open_folder
from dagster_ckpt.spark.iceberg_metadata import read_iceberg_memory
from dagster_ckpt.spark.logs import parse_log_lines
from dagster_ckpt.spark.rewind import own_past
from dagster_ckpt.spark.sinks import file_sink_path


class SinkEffect(StrEnum):
    """What becomes of the rows of a sink.

    EXACT: Each row is there once.
    SKIP: The sink passes over batches it has, and these are the very same rows: each row is there once.
    DUPLICATE: Rows of the rewound batches are there twice.
    LOSE: Rows may be missing afterwards.
    UNKNOWN: It depends on what cannot be seen from here.
    UNREACHABLE: The sink has to be brought back and cannot be: the start is refused.
    """

    EXACT = "EXACT"
    SKIP = "SKIP"
    DUPLICATE = "DUPLICATE"
    LOSE = "LOSE"
    UNKNOWN = "UNKNOWN"
    UNREACHABLE = "UNREACHABLE"


@dataclass(frozen=True)
class SinkForecast:
    """What is to be expected of one sink.

    Attributes:
        sink: What Spark calls it.
        effect: What becomes of its rows.
        reason: Why, in a sentence or two.
        advice: What makes it exact, or the empty text.
    """

    sink: str
    effect: SinkEffect
    reason: str
    advice: str = ""


@dataclass(frozen=True)
class Replay:
    """What the sinks will see.

    Attributes:
        to_batch: The batch the query goes back to; -1 is before the first.
        query_id: Id of the query as it was.
        keeps_query_id: Whether the query that goes on has this id too.
        in_flight: The batch after `to_batch` where exactly its rows are replayed, else None.
        log_entries: From an image: log entries of each file sink, by its folder. None reads the sink's own log.
    """

    to_batch: int
    query_id: str | None
    keeps_query_id: bool = True
    in_flight: int | None = None
    log_entries: Mapping[str, Sequence[SinkEntry]] | None = field(default=None)


_DELTA = re.compile(r"DeltaSink\[(?P<path>.+)\]")
_ICEBERG_WRITE = re.compile(r"IcebergWrite\(table=(?P<path>[^,)]+).*\)")
_LOCATION = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?/\S.*")
_CATALOG_TABLE = re.compile(r"[\w`-]+(?:\.[\w`-]+)+")
_BATCH_MEMORY = "remembers batches by number"


def forecast(sink: str, replay: Replay) -> SinkForecast:
    """Say what one sink will do with the batches after `replay.to_batch`.

    Args:
        sink: `sink.description` of the query's progress.
        replay: What it will see.
    """
    for pattern, judge in _KINDS:
        match = pattern.fullmatch(sink)
        if match is not None:
            return judge(sink, match, replay)
    return SinkForecast(
        sink, SinkEffect.UNKNOWN, "Nothing is known of this sink: rewound batches may be written twice or passed over."
    )


def _file_sink(sink: str, _match: re.Match[str], replay: Replay) -> SinkForecast:
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


def _delta(sink: str, match: re.Match[str], replay: Replay) -> SinkForecast:
    if replay.to_batch < 0 or not replay.keeps_query_id or replay.query_id is None:
        return _delta_as_another_query(sink, match["path"], replay)
    try:
        memory = read_delta_memory(open_folder(match["path"]), replay.query_id, replay.to_batch)
    except (CkptError, FileNotFoundError) as error:
        return _cannot_look(sink, "Delta", error)
    if memory.last_batch is None and not memory.reaches_back:
        return SinkForecast(
            sink,
            SinkEffect.LOSE,
            f"The table {_BATCH_MEMORY} and query id, but older commits are only in Parquet checkpoints of its log: it "
            "cannot be ruled out that it passes over the rewound batches.",
            "Start with new_query_id after restoring the table.",
        )
    where = f"RESTORE it to version {memory.version}" if memory.version is not None else "RESTORE it to before them"
    return _remembered(
        sink,
        "The table",
        memory.last_batch,
        replay,
        advice=f"{where} and start with new_query_id: RESTORE does not make it forget this query's batches.",
    )


def _delta_as_another_query(sink: str, path: str, replay: Replay) -> SinkForecast:
    repeats = SinkForecast(
        sink,
        SinkEffect.DUPLICATE,
        "The table does not know the new query id, so it takes the rewound batches once more.",
        "RESTORE it to the version before them first.",
    )
    if replay.query_id is None:
        return repeats
    try:
        memory = read_delta_memory(open_folder(path), replay.query_id, replay.to_batch)
    except (CkptError, FileNotFoundError):
        return repeats
    if memory.last_batch is not None and memory.last_batch <= replay.to_batch:
        return SinkForecast(sink, SinkEffect.EXACT, f"The table holds no batch after {replay.to_batch}.")
    if memory.version is not None and memory.restored_to == memory.version:
        return SinkForecast(
            sink, SinkEffect.EXACT, f"The table was restored to version {memory.version}, before the rewound batches."
        )
    if memory.version is None:
        return repeats
    return SinkForecast(
        sink, repeats.effect, repeats.reason, f"RESTORE it to version {memory.version} first: then it is exact."
    )


def _iceberg(sink: str, match: re.Match[str], replay: Replay) -> SinkForecast:
    place = match.groupdict().get("path") or match[0]
    if not _LOCATION.fullmatch(place):
        return _catalog_table(sink, match, replay)
    try:
        memory = read_iceberg_memory(open_folder(place), replay.query_id or "", replay.to_batch)
    except FileNotFoundError:
        return _catalog_table(sink, match, replay)
    except CkptError as error:
        return _cannot_look(sink, "Iceberg", error)
    back = f"Roll it back to snapshot {memory.snapshot_id} first: then it is exact."
    advice = back if memory.snapshot_id is not None else ""
    if memory.last_batch is not None and memory.last_batch > replay.to_batch and not replay.keeps_query_id:
        return SinkForecast(
            sink, SinkEffect.DUPLICATE, "The table does not know the new query id: it takes the batches again.", advice
        )
    return _remembered(sink, "The table", memory.last_batch, replay, advice=advice)


def _remembered(sink: str, who: str, last_batch: int | None, replay: Replay, *, advice: str) -> SinkForecast:
    if last_batch is None or last_batch <= replay.to_batch:
        return SinkForecast(sink, SinkEffect.EXACT, f"{who} holds no batch of this query after {replay.to_batch}.")
    if last_batch == replay.in_flight:
        return SinkForecast(
            sink, SinkEffect.SKIP, f"{who} has batch {last_batch} already, and exactly that is replayed: passed over."
        )
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        f"{who} {_BATCH_MEMORY} and query id, up to {last_batch}: it passes over batches {replay.to_batch + 1} to "
        f"{last_batch}, and where they are cut differently than the first time, rows are lost.",
        advice,
    )


def _cannot_look(sink: str, kind: str, error: Exception) -> SinkForecast:
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        f"A {kind} table {_BATCH_MEMORY} and query id, and its own log cannot be read from here ({error}): it may pass "
        "over the rewound batches.",
        "Roll the table back, or start with new_query_id and accept repeated rows.",
    )


def _catalog_table(sink: str, _match: re.Match[str], replay: Replay) -> SinkForecast:
    if not replay.keeps_query_id:
        return SinkForecast(
            sink,
            SinkEffect.DUPLICATE,
            "A table known by name only. As another query, Iceberg takes the rewound batches once more.",
            "Roll the table back first.",
        )
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        "A table known by name only. Iceberg and Paimon pass over a batch number they have of a query, and a batch "
        "that is cut differently then loses rows.",
        "Roll the table back to the time of the batch; Iceberg then forgets the batches after it.",
    )


def _numbered(sink: str, _match: re.Match[str], _replay: Replay) -> SinkForecast:
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        "Hudi and Paimon note batch numbers in their commits and pass over those they have, under a name of their own "
        "that a new query id does not change.",
        "Roll the table back to the batch (Hudi: a savepoint, or another checkpoint identifier), then start.",
    )


def _always(effect: SinkEffect, reason: str, advice: str = "") -> Callable[[str, re.Match[str], Replay], SinkForecast]:
    return lambda sink, _match, _replay: SinkForecast(sink, effect, reason, advice)


_REPEATED = SinkEffect.DUPLICATE
# In this order: names of classes come before the general shape of a table's name.
_KINDS: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str], Replay], SinkForecast]], ...] = (
    (re.compile(r"FileSink\[.+\]"), _file_sink),
    (_DELTA, _delta),
    (_ICEBERG_WRITE, _iceberg),
    (re.compile(r"(?i).*(hoodie|hudi|paimon).*"), _numbered),
    (
        re.compile(r".*Kafka(Table|Sink|SourceProvider).*"),
        _always(
            _REPEATED,
            "Kafka keeps no memory of batches: the records of the rewound ones are sent once more.",
            "Let consumers drop repeated keys; Spark does not write in transactions.",
        ),
    ),
    (re.compile(r".*Console(Table|Sink).*"), _always(_REPEATED, "The rewound batches are printed once more.")),
    (re.compile(r".*Noop.*"), _always(SinkEffect.EXACT, "It keeps nothing.")),
    (
        re.compile(r"MemorySink.*|.*MemoryTable.*"),
        _always(SinkEffect.UNKNOWN, "Its table lives in the session: after any restart it holds only what came since."),
    ),
    (
        re.compile(r"ForeachBatchSink"),
        _always(
            SinkEffect.UNKNOWN,
            "The function is called again for batch numbers it has seen, with other rows: it depends on what it does.",
            "A function that keeps its own record of batch numbers, such as Delta's txnVersion, has to forget these.",
        ),
    ),
    (
        re.compile(r"Foreach.*"),
        _always(SinkEffect.UNKNOWN, "The writer gets the rewound rows once more: it depends on what it does."),
    ),
    (_LOCATION, _iceberg),
    (_CATALOG_TABLE, _catalog_table),
)


def losing(forecasts: Sequence[SinkForecast]) -> list[SinkForecast]:
    """Those that may lose rows."""
    return [each for each in forecasts if each.effect is SinkEffect.LOSE]
