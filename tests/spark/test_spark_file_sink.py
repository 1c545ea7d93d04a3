from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from dagster_ckpt.errors import IncompleteCutError, SinkRollbackError
from dagster_ckpt.io.local import LocalFileIO
from dagster_ckpt.sinks.batch_in_flight import can_replay_a_batch
from dagster_ckpt.sinks.file_sink_log import roll_back
from dagster_ckpt.sinks.registry import sink_of, sinks_of
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SinkEntry, capture

INTERVAL = 10


def line(batch: int, timeline: str) -> str:
    return f'{{"path":"file:///out/{timeline}-{batch}","action":"add"}}'


def write_log(sink: Path, last: int, *, timeline: str = "a", interval: int = INTERVAL, first: int = 0) -> None:
    """The log of a sink as Spark leaves it, compact entries and checksums with it."""
    log = sink / "_spark_metadata"
    log.mkdir(parents=True, exist_ok=True)
    for batch in range(first, last + 1):
        compact = (batch + 1) % interval == 0
        lines = [line(b, timeline) for b in (range(batch + 1) if compact else [batch])]
        name = f"{batch}.compact" if compact else str(batch)
        (log / name).write_text("\n".join(["v1", *lines]))
        (log / f".{name}.crc").write_bytes(b"crc of " + timeline.encode())


def visible(sink: Path) -> list[str]:
    """The lines a reader sees: the newest compact entry and all after it (`CompactibleFileStreamLog`)."""
    log = sink / "_spark_metadata"
    names = {int(path.name.removesuffix(".compact")): path for path in log.iterdir() if not path.name.startswith(".")}
    if not names:
        return []
    start = max((number for number, path in names.items() if path.suffix == ".compact"), default=0)
    assert set(range(start, max(names) + 1)) <= set(names), "the log has a hole"
    return [text for number in range(start, max(names) + 1) for text in names[number].read_text().split("\n")[1:]]


def entries(sink: Path, batch: int) -> tuple[SinkEntry, ...]:
    (captured,) = capture(sinks_of([f"FileSink[file:{sink}]"]), batch)
    return tuple(SinkEntry(file.path.rsplit("/", 1)[-1], file.open().read()) for file in captured.files)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (6, ["0", "1", "2", "3", "4", "5", "6"]),
        (9, ["9.compact"]),
        (11, ["9.compact", "10", "11"]),
        (18, ["9.compact", *map(str, range(10, 19))]),
        (19, ["19.compact"]),
    ],
)
def test_the_newest_compact_entry_and_those_after_it_represent_a_sink(
    tmp_path: Path, batch: int, names: list[str]
) -> None:
    write_log(tmp_path, 23)

    (captured,) = capture(sinks_of(["ForeachBatchSink", f"FileSink[file:{tmp_path}]"]), batch)

    assert [file.path for file in captured.files] == [f"sinks/0/{name}" for name in names]
    assert captured.properties() == {"kind": "file", "path": f"file:{tmp_path}", "last_batch": batch}


def test_a_sink_without_a_log_yet_is_captured_as_empty(tmp_path: Path) -> None:
    (captured,) = capture(sinks_of([f"FileSink[file:{tmp_path}/none]"]), 3)

    assert (captured.last_batch, captured.files) == (None, ())


def test_a_hole_in_the_log_is_refused(tmp_path: Path) -> None:
    write_log(tmp_path, 12)
    (tmp_path / "_spark_metadata/10").unlink()

    with pytest.raises(IncompleteCutError, match="_spark_metadata/10 is missing"):
        capture(sinks_of([f"FileSink[file:{tmp_path}]"]), 12)


@pytest.mark.parametrize("batch", [0, 6, 8, 9, 10, 11, 18, 19, 23])
def test_after_a_roll_back_readers_see_the_rows_up_to_the_batch(tmp_path: Path, batch: int) -> None:
    write_log(tmp_path, batch)
    snapshot = entries(tmp_path, batch)
    write_log(tmp_path, 23)

    roll_back(f"file:{tmp_path}", batch, snapshot, still_mine=nullcontext)

    assert visible(tmp_path) == [line(b, "a") for b in range(batch + 1)]
    left = {path.name for path in (tmp_path / "_spark_metadata").iterdir()}
    assert all(f".{name}.crc" in left for name in left if not name.startswith("."))
    assert all(name[1:].removesuffix(".crc") in left for name in left if name.startswith("."))


def test_entries_that_spark_deleted_after_compacting_them_come_back(tmp_path: Path) -> None:
    write_log(tmp_path, 7)
    snapshot = entries(tmp_path, 7)
    write_log(tmp_path, 21)
    for batch in range(9):
        (tmp_path / f"_spark_metadata/{batch}").unlink()

    roll_back(str(tmp_path), 7, snapshot, still_mine=nullcontext)

    assert visible(tmp_path) == [line(b, "a") for b in range(8)]


def test_a_roll_forward_to_another_timeline_gives_exactly_its_rows(tmp_path: Path) -> None:
    write_log(tmp_path, 14)
    snapshot = entries(tmp_path, 14)
    write_log(tmp_path, 17, timeline="b", first=5, interval=4)

    roll_back(str(tmp_path), 14, snapshot, still_mine=nullcontext)

    assert visible(tmp_path) == [line(b, "a") for b in range(15)]
    assert not (tmp_path / "_spark_metadata/.10.crc").exists(), "a stale checksum would hide good bytes"


def test_the_batch_before_the_first_empties_the_log(tmp_path: Path) -> None:
    write_log(tmp_path, 12)

    roll_back(str(tmp_path), -1, (), still_mine=nullcontext)

    assert list((tmp_path / "_spark_metadata").iterdir()) == []


def test_a_sink_that_was_lost_is_written_anew(tmp_path: Path) -> None:
    write_log(tmp_path / "old", 11)

    roll_back(str(tmp_path / "new"), 11, entries(tmp_path / "old", 11), still_mine=nullcontext)

    assert visible(tmp_path / "new") == [line(b, "a") for b in range(12)]


class Crash(BaseException):
    """The process ends here."""


class CrashingCalls:
    """Lets so many changing calls pass, then crashes before the next one."""

    def __init__(self, passing: int) -> None:
        self.left = passing

    def around(self, change: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            if self.left == 0:
                raise Crash
            self.left -= 1
            change(*arguments)

        return call


@pytest.mark.parametrize(("batch", "timeline"), [(6, "a"), (9, "a"), (11, "b"), (14, "b")])
def test_a_roll_back_cut_off_anywhere_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, timeline: str
) -> None:
    write_log(tmp_path / "snapshot", batch)
    snapshot = entries(tmp_path / "snapshot", batch)
    step = 0
    crashed = True
    while crashed:
        sink = tmp_path / f"sink-{step}"
        write_log(sink, 23)
        write_log(sink, 21, timeline=timeline, first=5)
        calls = CrashingCalls(step)
        with monkeypatch.context() as patched:
            patched.setattr(LocalFileIO, "write", calls.around(LocalFileIO.write))
            patched.setattr(LocalFileIO, "delete", calls.around(LocalFileIO.delete))
            try:
                roll_back(str(sink), batch, snapshot, still_mine=nullcontext)
                crashed = False
            except Crash:
                step += 1
        visible(sink)  # no hole, whenever it was cut off
        roll_back(str(sink), batch, snapshot, still_mine=nullcontext)
        assert visible(sink) == [line(b, "a") for b in range(batch + 1)], f"after a crash at step {step}"
    assert step > 10


def test_a_sink_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    write_log(tmp_path, 3)
    (tmp_path / "_spark_metadata/9").mkdir()

    with pytest.raises(SinkRollbackError, match="could not be rolled back to batch 1"):
        roll_back(str(tmp_path), 1, entries(tmp_path, 1), still_mine=nullcontext)


@pytest.mark.parametrize(
    ("description", "replays"),
    [
        ("FileSink[file:/out]", True),
        ("DeltaSink[file:/out]", True),
        ("IcebergTable[lake.db.shops at file:/out]", True),
        ("lake.db.shops", False),
        ("ForeachBatchSink", False),
        ("org.apache.spark.sql.kafka010.KafkaSourceProvider$KafkaTable@1", False),
    ],
)
def test_a_sink_that_is_shown_to_remember_batches_takes_one_twice(description: str, replays: bool) -> None:
    assert can_replay_a_batch([description]) is replays


def test_only_a_file_sink_has_a_path() -> None:
    assert sink_of("FileSink[s3a://bucket/a b[1]]").place == "s3a://bucket/a b[1]"
    assert sink_of("ForeachBatchSink").place is None
