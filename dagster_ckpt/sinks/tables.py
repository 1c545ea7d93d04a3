"""Forecasts for tables that remember batches: Delta, Iceberg, Hudi, Paimon."""

from __future__ import annotations

import re

from dagster_ckpt.errors import CkptError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.delta import read_delta_memory
from dagster_ckpt.sinks.effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.sinks.iceberg import read_iceberg_memory

# A folder, as a path or a URL.
LOCATION = re.compile(r"(?:[a-z][a-z0-9+.-]*:)?/\S.*")
_BATCH_MEMORY = "remembers batches by number"
_NOT_SHOWN = (
    "By its log each row will be there once, but no test with a real table shows that: no release of Delta or Iceberg "
    "runs a stream on Spark 4.3."
)


def forecast_delta(sink: str, match: re.Match[str], replay: Replay) -> SinkForecast:
    """Forecast a replay for a Delta table; `path` in the match is its folder."""
    if replay.to_batch < 0 or not replay.keeps_query_id or replay.query_id is None:
        return _delta_as_another_query(sink, match["path"], replay)
    try:
        memory = read_delta_memory(open_file_io(match["path"]), replay.query_id, replay.to_batch)
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
    if _would_miss_state(memory.last_batch, replay):
        return SinkForecast(
            sink,
            SinkEffect.UNREACHABLE,
            f"The table has this query's batches up to {memory.last_batch} and passes over them without running them: "
            "their state would never be computed, and the query would fail at the batch after.",
            f"RESTORE it to before batch {replay.to_batch + 1} and start with new_query_id.",
        )
    where = f"RESTORE it to version {memory.version}" if memory.version is not None else "RESTORE it to before them"
    return _remembered(
        sink,
        "The table",
        memory.last_batch,
        replay,
        advice=f"{where} and start with new_query_id: RESTORE does not make it forget this query's batches.",
    )


def _would_miss_state(last_batch: int | None, replay: Replay) -> bool:
    if not replay.stateful or last_batch is None or last_batch <= replay.to_batch:
        return False
    return not (replay.carries_state and last_batch == replay.in_flight)


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
        memory = read_delta_memory(open_file_io(path), replay.query_id, replay.to_batch)
    except (CkptError, FileNotFoundError):
        return repeats
    if memory.last_batch is not None and memory.last_batch <= replay.to_batch:
        return _unproven(sink, f"The table holds no batch after {replay.to_batch}.")
    if memory.version is not None and memory.restored_to == memory.version:
        return _unproven(sink, f"The table was restored to version {memory.version}, before the rewound batches.")
    if memory.version is None:
        return repeats
    return SinkForecast(sink, repeats.effect, repeats.reason, f"RESTORE it to version {memory.version} first.")


def forecast_iceberg(sink: str, match: re.Match[str], replay: Replay) -> SinkForecast:
    """Forecast a replay for an Iceberg table known by its folder; without a folder, it is a table known by name."""
    place = match.groupdict().get("path") or match[0]
    if not LOCATION.fullmatch(place):
        return forecast_catalog_table(sink, match, replay)
    try:
        memory = read_iceberg_memory(open_file_io(place), replay.query_id or "", replay.to_batch)
    except FileNotFoundError:
        return forecast_catalog_table(sink, match, replay)
    except CkptError as error:
        return _cannot_look(sink, "Iceberg", error)
    back = f"Roll it back to snapshot {memory.snapshot_id} first."
    advice = back if memory.snapshot_id is not None else ""
    if memory.last_batch is not None and memory.last_batch > replay.to_batch and not replay.keeps_query_id:
        return SinkForecast(
            sink, SinkEffect.DUPLICATE, "The table does not know the new query id: it takes the batches again.", advice
        )
    return _remembered(sink, "The table", memory.last_batch, replay, advice=advice)


def _remembered(sink: str, who: str, last_batch: int | None, replay: Replay, *, advice: str) -> SinkForecast:
    if last_batch is None or last_batch <= replay.to_batch:
        return _unproven(sink, f"{who} holds no batch of this query after {replay.to_batch}.")
    if last_batch == replay.in_flight:
        return _unproven(sink, f"{who} has batch {last_batch} already, and exactly that is replayed: passed over.")
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        f"{who} {_BATCH_MEMORY} and query id, up to {last_batch}: it passes over batches {replay.to_batch + 1} to "
        f"{last_batch}, and where they are cut differently than the first time, rows are lost.",
        advice,
    )


def _unproven(sink: str, found: str) -> SinkForecast:
    return SinkForecast(
        sink,
        SinkEffect.UNPROVEN,
        f"{found} {_NOT_SHOWN}",
        "Start with accept_loss where you take that risk, and compare the table's rows afterwards.",
    )


def _cannot_look(sink: str, kind: str, error: Exception) -> SinkForecast:
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        f"A {kind} table {_BATCH_MEMORY} and query id, and its own log cannot be read from here ({error}): it may pass "
        "over the rewound batches.",
        "Roll the table back, or start with new_query_id and accept repeated rows.",
    )


def forecast_catalog_table(sink: str, _match: re.Match[str], replay: Replay) -> SinkForecast:
    """Forecast a replay for a table known by its catalog name: the worst effect of the possible table formats."""
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


def forecast_numbered(sink: str, _match: re.Match[str], _replay: Replay) -> SinkForecast:
    """Forecast a replay for Hudi and Paimon tables, which are not inspected."""
    return SinkForecast(
        sink,
        SinkEffect.LOSE,
        "Hudi and Paimon note batch numbers in their commits and pass over those they have, under a name of their own "
        "that a new query id does not change.",
        "Roll the table back to the batch (Hudi: a savepoint, or another checkpoint identifier), then start.",
    )
