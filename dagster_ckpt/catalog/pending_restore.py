"""What remains to be done before a stream's query may start, as `streams.pending_restore` stores it.

A start records it in the transaction that switches the live directory, and clears it when the sinks have followed. The
next start reads it after a crash.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec


class SinkRollBack(msgspec.Struct, frozen=True, kw_only=True):
    """Sinks must go back to the state in the live directory; `query_ids` are all that the stream's query has had."""

    query_id: str | None = None
    query_ids: tuple[str, ...] = ()
    # The query continues under another id: sinks that know batches by id get the undone ones again.
    may_repeat: bool = False
    # The start accepted loss: a table of which it is unknown what to undo stays as it is.
    accepts_loss: bool = False


class ToSnapshot(SinkRollBack, frozen=True, kw_only=True):
    """A restore from a snapshot, which names the sinks and has their logs."""

    location: str
    batch_id: int | None = None


class ToBatch(SinkRollBack, frozen=True, kw_only=True):
    """A rewind or a replay in the stream's own files."""

    batch_id: int
    sinks: tuple[str, ...] = ()


class Emptied(SinkRollBack, frozen=True, kw_only=True):
    sinks: tuple[str, ...] = ()


class Forked(msgspec.Struct, frozen=True, kw_only=True):
    """A fork or an import, until its first query has started and where it writes was checked.

    Attributes:
        parent_outputs: Folders of the original, where the query must not write.
        outputs: Folders that received the rows of some of them.
        mapped: The only places where the query of an import may write.
    """

    of_stream_id: str = msgspec.field(name="fork_of")
    batch_id: int
    parent_outputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    snapshot_id: str | None = None
    imported_from: str | None = None
    mapped: tuple[str, ...] | None = None


class ToTakeOver(msgspec.Struct, frozen=True, kw_only=True):
    """An adopted checkpoint directory that no start has taken over."""

    directory: str = msgspec.field(name="adopts")
    in_place: bool = True


@dataclass(frozen=True, kw_only=True)
class Adopting:
    """An unfinished adoption, the number of its first snapshot, and what was pending `before` it."""

    directory: str
    first_number: int
    before: PendingRestore | None = None


PendingRestore = ToSnapshot | ToBatch | Emptied | Forked | ToTakeOver | Adopting


def stored_pending(pending: PendingRestore) -> dict[str, Any]:
    if isinstance(pending, Adopting):
        before = stored_pending(pending.before) if pending.before is not None else {}
        return {**before, "adopting": pending.directory, "first_number": pending.first_number}
    return {name: value for name, value in msgspec.to_builtins(pending).items() if value is not None}


def read_pending(row: Mapping[str, Any]) -> PendingRestore:
    match row:
        case {"adopting": str(directory), "first_number": int(number), **others}:
            return Adopting(directory=directory, first_number=number, before=read_pending(others) if others else None)
        case {"adopting": _}:
            raise ValueError(f"an adoption needs a directory and first_number: {row}")
        case {"adopts": _}:
            return msgspec.convert(row, ToTakeOver)
        case {"fork_of": _}:
            return msgspec.convert(row, Forked)
        case {"location": _}:
            return msgspec.convert(row, ToSnapshot)
        case {"batch_id": _}:
            return msgspec.convert(row, ToBatch)
        case _:
            return msgspec.convert(row, Emptied)


def refers_to(row: Mapping[str, Any], *, snapshot_id: str, location: str | None) -> bool:
    """Whether a row names a snapshot, even if this version cannot read it as a whole."""
    return row.get("snapshot_id") == snapshot_id or (location is not None and row.get("location") == location)
