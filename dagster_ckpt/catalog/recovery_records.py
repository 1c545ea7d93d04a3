"""Where the state of a stream came from, and the points that a recovery has failed at: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class OriginKind(StrEnum):
    """What the state in a live directory was made from.

    NOTHING: The query began without state.
    SNAPSHOT: A checkpoint or savepoint.
    DIRECTORY: Another live directory, at one of its batches.
    FORK: Another stream.
    """

    NOTHING = "NOTHING"
    SNAPSHOT = "SNAPSHOT"
    DIRECTORY = "DIRECTORY"
    FORK = "FORK"


@dataclass(frozen=True)
class StateOrigin:
    """Where the state in a stream's live directory came from.

    A directory that is lost before its first checkpoint is made again from here.

    Attributes:
        kind: What it was made from.
        batch_id: The batch it stood at; None where it began without state.
        snapshot_id: The snapshot, for SNAPSHOT.
        location: Where that snapshot is.
        snapshot_kind: "CHECKPOINT" or "SAVEPOINT".
        snapshot_number: The number of that snapshot.
        query_id: The query id in that snapshot.
        directory: The stream's live directory before; for DIRECTORY the one it was made from.
        sinks: The sinks that were written to where it comes from, as Spark names them, for SNAPSHOT.
        earlier: What `directory` itself came from, for DIRECTORY: an origin of another kind.
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
    def nothing(directory: str | None) -> StateOrigin:
        """A query that began without state, where the stream had this live directory before."""
        return StateOrigin(OriginKind.NOTHING, directory=directory)

    @staticmethod
    def of_directory(directory: str, batch_id: int | None, before: StateOrigin | None) -> StateOrigin:
        """Made from a live directory at a batch, which itself came from `before`."""
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
        """Read what `as_record` wrote.

        Raises:
            ValueError: It is not that.
        """
        values = dict(record)
        earlier = values.pop("earlier", None)
        sinks = values.pop("sinks", [])
        if not isinstance(sinks, list) or not all(isinstance(sink, str) for sink in sinks):
            raise ValueError(f"sinks is {sinks!r}")
        kind = OriginKind(values.pop("kind", None))
        for name in ("batch_id", "snapshot_number"):
            if not isinstance(values.get(name), int | None):
                raise ValueError(f"{name} is {values[name]!r}")  # noqa: TRY004 - as what cannot be read otherwise
        try:
            before = None if earlier is None else StateOrigin.of_record(earlier)
            return StateOrigin(kind, sinks=tuple(sinks), earlier=before, **values)
        except TypeError as error:
            raise ValueError(str(error)) from error


@dataclass(frozen=True)
class PointFailure:
    """A recovery that failed at one of the points that a stream could go on from.

    Attributes:
        ordinal: Rises with each failure of the stream.
        execution_id: The execution that failed there.
        point: Name of the point, as `RecoveryPoint` makes it.
        error: Class of the error.
        detail: What was found, for a person.
        is_certain: Whether another try cannot do better.
        batch_id: The batch of that point, or None.
        rewound_batches: How many batches going back there costs, or None where that is not known.
        rewound_ms: How much time, or None.
        at_ms: When.
    """

    ordinal: int
    execution_id: str
    point: str
    error: str
    detail: str
    is_certain: bool
    batch_id: int | None
    at_ms: int
    rewound_batches: int | None = None
    rewound_ms: int | None = None
