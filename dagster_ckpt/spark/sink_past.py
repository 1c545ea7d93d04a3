"""Whether the log of a file sink has the entries of a snapshot as its past: who wrote it, as far as the files tell.

Names of part files hold a uuid, so two logs that name one file have one past. Spark compacts a log and may drop what is
older than the sink's `retention`, so a past may be there in other entries, and its oldest files may be named no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dagster_ckpt.spark.file_sink import LOG, SinkEntry
from dagster_ckpt.spark.file_source import COMPACT, entry_id
from dagster_ckpt.spark.logs import parse_log_lines
from dagster_ckpt.spark.opening import open_folder


class Past(StrEnum):
    """How the log at hand stands to that of a snapshot.

    NONE: There is no log at hand.
    SAME: Up to the snapshot's batch it names what the snapshot names, and nothing else.
    PART: It ends where the snapshot does or before, and names nothing that the snapshot does not, but not all of it.
    SHARED: They have files in common, and one names files up to that batch that the other does not: the log at hand
        went another way in between, as after a rewind.
    STRANGER: They have no file in common: another query, or another beginning, wrote it.
    """

    NONE = "NONE"
    SAME = "SAME"
    PART = "PART"
    SHARED = "SHARED"
    STRANGER = "STRANGER"


@dataclass(frozen=True)
class SinkLogAtHand:
    """What the log of a file sink names.

    Attributes:
        last_batch: Its newest batch; None where there is no log.
        up_to: Files that its entries up to the batch asked for name.
        later: Files that its later entries name, which after a compaction are all from before as well.
        compacted: Whether one of the later entries is a compact one.
        is_later: Whether there are later entries at all.
    """

    last_batch: int | None
    up_to: frozenset[str] = frozenset()
    later: frozenset[str] = frozenset()
    compacted: bool = False
    is_later: bool = False

    @property
    def is_blank(self) -> bool:
        """Whether it is there, and names no file."""
        return self.last_batch is not None and not self.up_to | self.later


def past_of(at_hand: SinkLogAtHand, noted: frozenset[str]) -> Past:
    """Compare the log at hand with the files that a snapshot notes. Pure."""
    if at_hand.last_batch is None:
        return Past.NONE
    known = at_hand.up_to | at_hand.later
    if not at_hand.up_to <= noted:
        # It names, up to the batch, what the snapshot does not know.
        return Past.SHARED if noted & known else Past.STRANGER
    if not noted or noted <= known:
        return Past.SAME
    if not at_hand.is_later:
        return Past.PART
    # Files of the snapshot are named no more. Of a compacted log they may have passed the sink's retention.
    return (Past.SAME if at_hand.compacted else Past.SHARED) if noted & known else Past.STRANGER


def read_log_at_hand(path: str, batch_id: int) -> SinkLogAtHand:
    """Read the log of a file sink.

    Args:
        path: Its folder.
        batch_id: The batch up to which it is compared.

    Raises:
        LiveDirectoryError: An entry cannot be read.
        StorageAccessError: The folder cannot be reached.
    """
    folder = open_folder(path)
    names: dict[int, str] = {}
    for name in folder.list(LOG):
        number = entry_id(name)
        if number is not None:
            names[number] = name if name.endswith(COMPACT) else names.get(number, name)
    if not names:
        return SinkLogAtHand(None)
    up_to: set[str] = set()
    later: set[str] = set()
    for number, name in _needed(names, batch_id).items():
        entry = SinkEntry(name, folder.read(f"{LOG}/{name}"))
        (up_to if number <= batch_id else later).update(files_of([entry], path))
    compacted = any(name.endswith(COMPACT) for number, name in names.items() if number > batch_id)
    return SinkLogAtHand(
        max(names), frozenset(up_to), frozenset(later), compacted=compacted, is_later=max(names) > batch_id
    )


def files_of(entries: Sequence[SinkEntry], path: str) -> frozenset[str]:
    """Files that entries of a log name.

    Raises:
        LiveDirectoryError: An entry cannot be read.
    """
    lines = [line for entry in entries for line in parse_log_lines(entry.data, f"{path}/{LOG}/{entry.name}")]
    return frozenset(str(line.get("path")) for line in lines)


def _needed(names: Mapping[int, str], batch_id: int) -> dict[int, str]:
    """Entries that name all there is: those from the newest compact one up to the batch, and from the newest of all."""
    compacts = [number for number, name in names.items() if name.endswith(COMPACT)]
    below = max((number for number in compacts if number <= batch_id), default=-1)
    newest = max(compacts, default=-1)
    return {n: name for n, name in names.items() if below <= n <= batch_id or n >= max(newest, batch_id + 1)}
