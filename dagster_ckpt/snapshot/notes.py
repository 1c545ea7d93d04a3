"""`_notes` in the folder of a snapshot: what only the catalog knows of it, for a catalog that is rebuilt."""

from __future__ import annotations

import msgspec


class SnapshotNotes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Empty if nothing is known.

    Attributes:
        tagged_by: Who keeps the snapshot.
        label: That of the tag.
        problem: What a verification found.
        proven_at_ms: When the state was loaded.
    """

    tagged_by: str | None = None
    label: str | None = None
    problem: str | None = None
    broken_since_ms: int | None = None
    proven_at_ms: int | None = None

    def of_a_copy(self) -> SnapshotNotes:
        """Damage is of the original's bytes."""
        return msgspec.structs.replace(self, problem=None, broken_since_ms=None)

    def encoded(self) -> bytes | None:
        """None if empty."""
        return msgspec.json.encode(self) if self != SnapshotNotes() else None


def read_notes(content: bytes | None) -> SnapshotNotes:
    """Empty if they are missing or damaged: the bytes of the snapshot are judged without them."""
    try:
        return msgspec.json.decode(content or b"{}", type=SnapshotNotes)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return SnapshotNotes()
