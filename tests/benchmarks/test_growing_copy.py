"""A copy of a live directory grows to a later stage as Spark would let it grow."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.growing import committed_at_ns, copy_of, grow


def write(root: Path, path: str, content: str, at_s: int) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(content)
    os.utime(target, (at_s, at_s))


def content(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def stages(tmp_path: Path) -> tuple[Path, Path]:
    earlier, later = tmp_path / "D1", tmp_path / "D2"
    for root in (earlier, later):
        write(root, "commits/0", "zero", 100)
        write(root, "commits/.0.crc", "sum", 101)
    write(earlier, "state/purged", "old", 90)
    write(earlier, "state/schema", "one", 90)
    write(later, "state/schema", "two", 103)
    write(later, "state/2.changelog", "added", 105)
    write(later, "commits/1", "one", 106)
    write(later, "commits/.1.crc", "sum", 107)
    write(later, "state/3.changelog", "more", 110)
    return earlier, later


def test_it_becomes_the_later_stage_file_by_file(tmp_path: Path) -> None:
    earlier, later = stages(tmp_path)
    live = copy_of(earlier, tmp_path / "live")
    grow(live, later)
    assert content(live) == content(later)


def test_what_did_not_change_stays_the_same_file(tmp_path: Path) -> None:
    earlier, later = stages(tmp_path)
    live = copy_of(earlier, tmp_path / "live")
    kept, replaced = (live / "commits/0").stat().st_ino, (live / "state/schema").stat().st_ino
    grow(live, later)
    assert (live / "commits/0").stat().st_ino == kept
    assert (live / "state/schema").stat().st_ino != replaced


def test_it_can_stop_at_the_commit_of_a_batch(tmp_path: Path) -> None:
    earlier, later = stages(tmp_path)
    live = copy_of(earlier, tmp_path / "live")
    added = grow(live, later, until_ns=committed_at_ns(later, 1))
    assert {path.name for path in added} == {"schema", "2.changelog", "1", ".1.crc"}
    assert (live / "state/purged").exists()
    assert not (live / "state/3.changelog").exists()
