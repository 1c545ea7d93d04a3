"""What a start reads of the log of a file sink before it decides whose it is."""

from __future__ import annotations

from pathlib import Path

from dagster_ckpt.sinks.file_sink_log import LOG, Past, entry_of, past_of, read_log_at_hand


def write(folder: Path, name: str, *files: str) -> None:
    (folder / LOG).mkdir(exist_ok=True)
    lines = [{"path": f"file://{folder}/{each}", "size": 1, "action": "add"} for each in files]
    (folder / LOG / name).write_bytes(entry_of(name, lines).data)


def files_in(folder: Path, names: str) -> frozenset[str]:
    return frozenset(f"file://{folder}/{each}" for each in names)


def test_entries_of_a_timeline_between_are_not_of_the_log(tmp_path: Path) -> None:
    """Rewound to batch 1, then to batch 7 of what that left, which writes the newest compact entry only."""
    write(tmp_path, "0", "a")
    write(tmp_path, "1", "b")
    write(tmp_path, "3.compact", "a", "b", "between", "another")
    before = read_log_at_hand(str(tmp_path), 3)
    noted = files_in(tmp_path, "abcd")
    assert past_of(before, noted) is Past.SHARED

    write(tmp_path, "7.compact", *"abcdefgh")

    assert past_of(read_log_at_hand(str(tmp_path), 3), noted) is Past.SAME
