"""`_notes` in the folder of a snapshot: what only the catalog knows of it, for a catalog that is rebuilt."""

from __future__ import annotations

import msgspec


class SnapshotNotes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    tagged_by: str | None = None
    label: str | None = None
    problem: str | None = None
    broken_since_ms: int | None = None
    proven_at_ms: int | None = None

    def of_a_copy(self) -> SnapshotNotes:
        """Leave out damage, which is of the original's bytes."""
        return msgspec.structs.replace(self, problem=None, broken_since_ms=None)

    def encoded(self) -> bytes | None:
        return msgspec.json.encode(self) if self != SnapshotNotes() else None


def read_notes(content: bytes | None) -> SnapshotNotes:
    """Parse notes; empty if missing or damaged, because a snapshot is judged without them."""
    try:
        return msgspec.json.decode(content or b"{}", type=SnapshotNotes)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SnapshotNotes()
