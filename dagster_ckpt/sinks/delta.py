"""Delta tables: what one remembers of a query, read from its plain JSON commits, and what that means for a replay.

The sink writes a `txn` action with each batch (the Delta protocol's "Transaction Identifiers":
appId is the query's id, version is the batch) and skips a batch that is not greater than the newest
one (`DeltaSink.addBatch`). `RESTORE` restores files but not transactions. Checkpoints of the log
are Parquet and are not read here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from dagster_ckpt.errors import CkptError, LiveDirectoryError
from dagster_ckpt.foreign import from_json, number_in, reading
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.sinks.sink import OnRepeat, Replay, Sink, SinkEffect, SinkForecast
from dagster_ckpt.sinks.tables import BATCH_MEMORY, cannot_look, forecast_remembered, unproven

LOG = "_delta_log"
_NAME = re.compile(r"DeltaSink\[(?P<path>.+)\]")
_COMMIT = re.compile(r"(\d{20})\.json")


@dataclass(frozen=True)
class DeltaMemory:
    """What a table remembers of one query.

    Attributes:
        last_batch: Newest batch of the query in the table; None if no readable commit contains one.
        version: Table version right before the first batch after the requested one; None if there
            is no such batch or it is unknown.
        restored_to: Version to which the table was restored since the query's last batch, or None.
        reaches_back: Whether the readable commits are sufficient: they go back to a batch at or
            before the requested one, or to the table's first version.
    """

    last_batch: int | None
    version: int | None
    restored_to: int | None
    reaches_back: bool


def read_delta_memory(table: FileIO, query_id: str, batch_id: int) -> DeltaMemory:
    """Read what a table remembers of a query, newest commit first, back to a batch.

    Args:
        table: The table's folder.
        query_id: Id of the query.
        batch_id: The batch to go back to.

    Raises:
        FileNotFoundError: The folder contains no Delta log with JSON commits.
        LiveDirectoryError: A commit cannot be parsed.
        StorageAccessError: The folder cannot be reached.
    """
    matches = [match for match in map(_COMMIT.fullmatch, table.list(LOG)) if match]
    if not matches:
        raise FileNotFoundError(f"{table.url}/{LOG}")
    last: int | None = None
    restored_to: int | None = None
    first_after: int | None = None
    for name, version in sorted(((match[0], int(match[1])) for match in matches), reverse=True):
        actions = _actions(table, name)
        batch = next((_batch(action) for action in actions if _is_of(action, query_id)), None)
        if last is None and batch is None and restored_to is None:
            restored_to = next((to for to in map(_restored_to, actions) if to is not None), None)
        if batch is None:
            continue
        last = batch if last is None else last
        if batch <= batch_id:
            return DeltaMemory(last, _before(first_after), restored_to, reaches_back=True)
        first_after = version
    from_the_start = min(int(match[1]) for match in matches) == 0
    return DeltaMemory(
        last,
        _before(first_after) if from_the_start else None,
        restored_to if last is not None else None,
        from_the_start,
    )


def _before(version: int | None) -> int | None:
    return version - 1 if version else None


def _actions(table: FileIO, name: str) -> list[Mapping[str, Any]]:
    text = table.read(f"{LOG}/{name}").decode("utf-8", "replace")
    with reading(lambda why: LiveDirectoryError(f"{table.url}/{LOG}/{name} is not a Delta commit: {why}.")):
        actions = [from_json(line) for line in text.splitlines() if line.strip()]
    return [action for action in actions if isinstance(action, dict)]


def _is_of(action: Mapping[str, Any], query_id: str) -> bool:
    txn = action.get("txn")
    return isinstance(txn, dict) and txn.get("appId") == query_id and isinstance(txn.get("version"), int)


def _batch(action: Mapping[str, Any]) -> int:
    return int(action["txn"]["version"])


def _restored_to(action: Mapping[str, Any]) -> int | None:
    info = action.get("commitInfo")
    if not isinstance(info, dict) or info.get("operation") != "RESTORE":
        return None
    version = str((info.get("operationParameters") or {}).get("version"))
    return number_in(version)


class DeltaTable(Sink):
    """A Delta table known by its folder."""

    on_repeat = OnRepeat.SKIPS
    is_proven = False
    knows_queries = True

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
        return f"DeltaSink[{place}]" if output_format == "delta" else None

    def last_batch(self, query_id: str | None) -> int | None:
        """See `Sink.last_batch`."""
        if query_id is None:
            return None
        try:
            return self._memory(query_id, sys.maxsize).last_batch
        except FileNotFoundError:
            return None

    def forecast(self, replay: Replay) -> SinkForecast:
        """See `Sink.forecast`."""
        if replay.to_batch < 0 or not replay.keeps_query_id or replay.query_id is None:
            return self._as_another_query(replay)
        try:
            memory = self._memory(replay.query_id, replay.to_batch)
        except (CkptError, FileNotFoundError) as error:
            return cannot_look(self, "Delta", error)
        if memory.last_batch is None and not memory.reaches_back:
            return SinkForecast(
                self.name,
                SinkEffect.LOSE,
                f"The table {BATCH_MEMORY} and query id, but older commits are only in Parquet checkpoints of its log: "
                "it cannot be ruled out that it passes over the rewound batches.",
                "Start with new_query_id after restoring the table.",
            )
        if _would_miss_state(memory.last_batch, replay):
            return SinkForecast(
                self.name,
                SinkEffect.IRREVERSIBLE,
                f"The table has this query's batches up to {memory.last_batch} and passes over them without running "
                "them: their state would never be computed, and the query would fail at the batch after.",
                f"RESTORE it to before batch {replay.to_batch + 1} and start with new_query_id.",
            )
        where = f"RESTORE it to version {memory.version}" if memory.version is not None else "RESTORE it to before them"
        return forecast_remembered(
            self,
            memory.last_batch,
            replay,
            advice=f"{where} and start with new_query_id: RESTORE does not make it forget this query's batches.",
        )

    def _as_another_query(self, replay: Replay) -> SinkForecast:
        repeats = SinkForecast(
            self.name,
            SinkEffect.DUPLICATE,
            "The table does not know the new query id, so it takes the rewound batches once more.",
            "RESTORE it to the version before them first.",
        )
        if replay.query_id is None:
            return repeats
        try:
            memory = self._memory(replay.query_id, replay.to_batch)
        except (CkptError, FileNotFoundError):
            return repeats
        if memory.last_batch is not None and memory.last_batch <= replay.to_batch:
            return unproven(self, f"The table holds no batch after {replay.to_batch}.")
        if memory.version is not None and memory.restored_to == memory.version:
            return unproven(self, f"The table was restored to version {memory.version}, before the rewound batches.")
        if memory.version is None:
            return repeats
        advice = f"RESTORE it to version {memory.version} first."
        return SinkForecast(self.name, repeats.effect, repeats.reason, advice)

    def _memory(self, query_id: str, batch_id: int) -> DeltaMemory:
        return read_delta_memory(open_file_io(self.folder), query_id, batch_id)


def _would_miss_state(last_batch: int | None, replay: Replay) -> bool:
    if not replay.stateful or last_batch is None or last_batch <= replay.to_batch:
        return False
    return not (replay.carries_state and last_batch == replay.in_flight)
