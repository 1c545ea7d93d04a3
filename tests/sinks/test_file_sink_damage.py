"""A damaged log of a file sink is told from a whole one that another query wrote."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_repair import damaged_log, missing_part_files
from dagster_ckpt.sinks.sink import Replay, SinkEffect, SinkForecast
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry
from tests.sinks.test_file_sink_repair import Output
from tests.support.file_damage import checksum_of, cut, drop, flip, zero

BATCHES = 9
_CHUNK = 512


@pytest.fixture
def output(tmp_path: Path) -> Output:
    made = Output(tmp_path / "out")
    for number in range(BATCHES):
        made.batch(number)
    return made


def sum_up(path: Path) -> None:
    """Write Hadoop's checksum beside a file."""
    data = path.read_bytes()
    sums = [struct.pack(">I", zlib.crc32(data[at : at + _CHUNK])) for at in range(0, len(data), _CHUNK)]
    checksum_of(path).write_bytes(b"crc\0" + struct.pack(">i", _CHUNK) + b"".join(sums))


def lose(log: Path) -> None:
    for path in log.iterdir():
        path.unlink()
    log.rmdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a compact entry is gone": (lambda log: drop(log / "7.compact"), "7"),
    "an entry is cut": (lambda log: cut(log / "8"), "8"),
    "an entry is zeroed": (lambda log: zero(log / "8"), "8"),
    "an entry is empty": (lambda log: (log / "8").write_bytes(b"") and None, "8"),
    "the newest entry is gone": (lambda log: drop(log / "8"), "batch 8"),
    "everything is gone": (lose, "no entry"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("batch_id", [2, 8], ids=["older", "newest"])
def test_damage_is_found_and_the_log_is_still_its_streams(output: Output, damage: str, batch_id: int) -> None:
    """Also where no entry is left that the snapshot has: the catalog then says whose it is."""
    captured = output.capture(batch_id)
    strike, told = DAMAGES[damage]
    assert damaged_log(str(output.root), captured, BATCHES - 1) is None
    strike(output.log)

    found = damaged_log(str(output.root), captured, BATCHES - 1)

    assert found is not None
    assert told in found.found


@pytest.mark.parametrize("name", ["7.compact", "8"])
def test_an_entry_that_does_not_match_its_checksum_is_damaged(output: Output, name: str) -> None:
    captured, path = output.capture(2), output.log / name
    sum_up(path)
    assert damaged_log(str(output.root), captured) is None
    flip(path)

    found = damaged_log(str(output.root), captured)

    assert found is not None
    assert "checksum" in found.found


def relist(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    version, *lines = path.read_text().split("\n")
    path.write_text("\n".join([version, *change(lines)]))


def test_without_checksums_an_entry_is_compared_with_the_one_that_was_captured(output: Output) -> None:
    captured = output.capture(8)
    relist(output.log / "8", lambda lines: [lines[0].replace("part-00000-00000008", "part-00000-10000008")])

    found = damaged_log(str(output.root), captured)
    assert found is not None
    assert "entry 8" in found.found
    relist(output.log / "8", lambda _: [])
    assert damaged_log(str(output.root), captured) is not None


def test_a_whole_log_of_another_query_is_not_damaged(output: Output, tmp_path: Path) -> None:
    captured, other = output.capture(8), Output(tmp_path / "other")
    for number in range(BATCHES + 3):
        other.batch(number)
        part = next(other.root.glob(f"*/part-00000-{number:08x}-*"))
        part.rename(part.with_name(part.name.replace("-0000-", "-ffff-", 1)))
        for entry in other.log.iterdir():
            entry.write_text(entry.read_text().replace(part.name, part.name.replace("-0000-", "-ffff-", 1)))
    assert damaged_log(str(other.root), captured) is None
    # Even if it is damaged: what is left of it is another's.
    drop(other.log / "9")
    assert damaged_log(str(other.root), captured) is None


def test_a_log_that_went_another_way_is_not_damaged(output: Output) -> None:
    """Such as after a rewind of which a catalog that was put back from a backup knows nothing."""
    captured = output.capture(8)
    part = next(output.root.glob("*/part-00000-00000008-*"))
    other = part.rename(part.with_name("part-other"))
    relist(output.log / "8", lambda lines: [lines[0].replace(part.name, other.name)])

    assert damaged_log(str(output.root), captured) is None


def test_a_relocated_log_is_whole(output: Output, tmp_path: Path) -> None:
    captured = output.capture(8)
    moved = output.root.rename(tmp_path / "moved")
    for entry in (moved / "_spark_metadata").iterdir():
        entry.write_text(entry.read_text().replace(f"{tmp_path}/out", f"{tmp_path}/moved"))

    assert damaged_log(str(moved), captured) is None
    assert missing_part_files(str(moved), captured) == []


def test_part_files_that_are_gone_or_have_another_length_are_missing(output: Output) -> None:
    captured = output.capture(2)
    parts = sorted(output.root.glob("*/part-*"))
    parts[1].unlink()
    parts[2].write_text("other")
    parts[5].unlink()

    assert missing_part_files(str(output.root), captured) == [parts[1].name, parts[2].name]
    assert all(json.loads(line)["size"] for line in output.lines)


def go_another_way(output: Output, after: int) -> list[Path]:
    """Write the later batches into other files, as after a rewind; returns those that are no longer listed."""
    left = sorted(output.root.glob("*/part-00000-*"))[after + 1 :]
    for part in left:
        other = part.with_name(part.name.replace("part-00000", "part-00001"))
        other.write_bytes(part.read_bytes())
        for entry in output.log.iterdir():
            entry.write_text(entry.read_text().replace(part.name, other.name))
    return left


def back_to(output: Output, captured: list[SinkEntry]) -> SinkForecast:
    return FileSink.at(str(output.root)).forecast(Replay(8, "query", log_entries={str(output.root): captured}))


def test_files_of_a_timeline_that_was_left_have_to_be_there(output: Output) -> None:
    captured = output.capture(8)
    left = go_another_way(output, 4)
    assert damaged_log(str(output.root), captured) is None
    assert back_to(output, captured).effect is SinkEffect.EXACT

    left[1].unlink()
    left[2].write_text("other")

    told = back_to(output, captured)
    assert told.effect is SinkEffect.LOSE
    assert told.reason.startswith("2 files that the snapshot lists up to batch 8 are not there")
    assert f"{left[1].name}, {left[2].name}" in told.reason


def test_files_that_exceeded_the_retention_time_of_the_sink_are_not_missing(output: Output) -> None:
    captured = output.capture(8)
    for number in range(9, 12):
        output.batch(number)
    relist(output.log / "11.compact", lambda lines: lines[3:])
    for part in sorted(output.root.glob("*/part-00000-*"))[:3]:
        part.unlink()

    assert back_to(output, captured).effect is SinkEffect.EXACT
