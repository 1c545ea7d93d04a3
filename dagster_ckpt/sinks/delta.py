"""Read what a Delta table remembers of a query, from its plain JSON commits.

The sink writes a `txn` action with each batch (the Delta protocol's "Transaction Identifiers":
appId is the query's id, version is the batch) and skips a batch that is not greater than the newest
one (`DeltaSink.addBatch`). `RESTORE` restores files but not transactions. Checkpoints of the log
are Parquet and are not read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.foreign import from_json, number_in, reading
from dagster_ckpt.io.file_io import FileIO

LOG = "_delta_log"
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
