"""Where the state in a stream's live directory came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class OriginKind(StrEnum):
    """What the state in a live directory was made from.

    EMPTY: The query started with empty state.
    SNAPSHOT: A checkpoint or savepoint.
    DIRECTORY: Another live directory, at one of its batches.
    FORK: Another stream.
    ADOPTED: A checkpoint directory of plain Spark, which the stream continues from.
    """

    EMPTY = "EMPTY"
    SNAPSHOT = "SNAPSHOT"
    DIRECTORY = "DIRECTORY"
    FORK = "FORK"
    ADOPTED = "ADOPTED"


@dataclass(frozen=True)
class StateOrigin:
    """Where the state in a stream's live directory came from.

    If a directory is lost before its first checkpoint, it is re-created from here.

    Attributes:
        kind: What it was made from.
        batch_id: The batch that the state was at; None if the query started with empty state.
        snapshot_id: The snapshot, for SNAPSHOT; for ADOPTED the first one of the directory.
        location: Location of that snapshot.
        snapshot_kind: "CHECKPOINT" or "SAVEPOINT".
        snapshot_number: Number of that snapshot.
        query_id: The query id in that snapshot.
        directory: The stream's previous live directory; for DIRECTORY the one that it was made
            from, for ADOPTED the directory itself.
        sinks: The sinks that the snapshot's query wrote to, as Spark names them, for SNAPSHOT and ADOPTED.
        earlier: The origin of `directory` itself, for DIRECTORY; never of kind DIRECTORY.
    """

    kind: OriginKind
    batch_id: int | None = None
    snapshot_id: str | None = None
    location: str | None = None
    snapshot_kind: str | None = None
    snapshot_number: int | None = None
    query_id: str | None = None
    directory: str | None = None
    sinks: tuple[str, ...] = ()
    earlier: StateOrigin | None = None

    @staticmethod
    def empty(directory: str | None) -> StateOrigin:
        """A query that started with empty state; `directory` is the stream's previous live directory."""
        return StateOrigin(OriginKind.EMPTY, directory=directory)

    @staticmethod
    def of_directory(directory: str, batch_id: int | None, before: StateOrigin | None) -> StateOrigin:
        """State made from a live directory at a batch, whose own origin is `before`."""
        root = before.earlier if before is not None and before.kind is OriginKind.DIRECTORY else before
        return StateOrigin(OriginKind.DIRECTORY, batch_id=batch_id, directory=directory, earlier=root)

    def as_record(self) -> dict[str, Any]:
        """As plain data, for the catalog."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        values["kind"] = self.kind.value
        values["sinks"] = list(self.sinks)
        if self.earlier is not None:
            values["earlier"] = self.earlier.as_record()
        return values

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> StateOrigin:
        """Parse the result of `as_record`.

        Raises:
            ValueError: It is not such a record.
        """
        values = dict(record)
        earlier = values.pop("earlier", None)
        sinks = values.pop("sinks", [])
        if not isinstance(sinks, list) or not all(isinstance(sink, str) for sink in sinks):
            raise ValueError(f"sinks is {sinks!r}")
        kind = OriginKind(values.pop("kind", None))
        for name in ("batch_id", "snapshot_number"):
            if not isinstance(values.get(name), int | None):
                raise ValueError(f"{name} is {values[name]!r}")  # noqa: TRY004 - like every other unreadable record
        try:
            before = None if earlier is None else StateOrigin.of_record(earlier)
            return StateOrigin(kind, sinks=tuple(sinks), earlier=before, **values)
        except TypeError as error:
            raise ValueError(str(error)) from error
