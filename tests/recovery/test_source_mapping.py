"""`map_sources`: what can be asked for, what a live directory says afterwards, and a start that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagster_ckpt.catalog.records import StateOrigin
from dagster_ckpt.errors import LiveDirectoryError, OptionError
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.spark.checkpoint_dir.file_source import SourceFile
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.checkpoint_dir.restore import Position, after_files, give_positions
from dagster_ckpt.stream.start_from import Beginning, SourceMapping, StartFrom
from tests.support.executioner import Executioner, Killed
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either

SWAPPED = "0=new:earliest,1=0"


@pytest.mark.parametrize(
    ("text", "mapping"),
    [
        ("0=1, 1=new:earliest ,2=new", SourceMapping({"0": "1"}, {"1": Beginning.EARLIEST, "2": Beginning.AS_CODE})),
        ("orders=0,returns=new:latest", SourceMapping({"orders": "0"}, {"returns": Beginning.LATEST})),
        ("10=1,2=0", SourceMapping({"10": "1", "2": "0"})),
        ("0=former:new,1=new", SourceMapping({"0": "new"}, {"1": Beginning.AS_CODE})),
        ("0=former:1,former=former", SourceMapping({"0": "1", "former": "former"})),
    ],
)
def test_it_is_read_and_written_alike(text: str, mapping: SourceMapping) -> None:
    assert SourceMapping.parse(text) == mapping
    assert SourceMapping.parse(str(mapping)) == mapping
    assert StartFrom.from_record(StartFrom(map_sources=text).as_record()) == StartFrom(map_sources=text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "not of the form source=former source"),
        ("0=1,0=2", "names source 0 twice"),
        ("0=1,1=1", "two sources continue the former source 1"),
        ("0=new:yesterday", "cannot begin at 'yesterday'"),
        ("0=1:earliest", "neither a former source nor new"),
        ("a/b=1", "not of the form"),
        ("0=", "neither a former source nor new"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StartFrom(map_sources=text)


def test_an_empty_start_has_no_sources_to_continue() -> None:
    with pytest.raises(OptionError, match="keeps none"):
        StartFrom("empty", discard_state=True, map_sources="0=0")


METADATA = '{"batchWatermarkMs":5000,"batchTimestampMs":1,"conf":{}}'


@pytest.fixture
def live(tmp_path: Path) -> LiveDirectory:
    files = {
        "sources/0/0": "of the first",
        "sources/1/0": "of the second",
        "sources/1/1": "of the second, later",
        **{f"offsets/{n}": f'v1\n{METADATA}\n{{"logOffset":{n}}}\n{{"orders":{{"0":{n}}}}}' for n in (6, 7, 8)},
        "commits/6": "v1\n{}",
        "commits/7": "v1\n{}",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return LiveDirectory(str(tmp_path))


def _sources(live: LiveDirectory, batch: int) -> dict[str, str | None]:
    return dict(parse_offset_entry(live.folder.read(f"offsets/{batch}"), f"offsets/{batch}").sources)


def _logs(live: LiveDirectory) -> dict[str, str]:
    return {path.removeprefix("sources/"): live.folder.read(path).decode() for path, _ in live.folder.find("sources")}


def test_two_sources_change_places_and_a_third_is_new(live: LiveDirectory) -> None:
    give_positions(live, {"0": "1", "1": "0"}, {"2": after_files([SourceFile("file:///in/1", 0, 5)])})

    assert _sources(live, 7) == {"0": '{"orders":{"0":7}}', "1": '{"logOffset":7}', "2": '{"logOffset":0}'}
    # Spark asks a file source for the files between these two batches.
    assert _sources(live, 6) == {"0": '{"orders":{"0":6}}', "1": '{"logOffset":6}', "2": None}
    assert live.positions().offset == 7
    assert _logs(live) == {
        "0/0": "of the second",
        "0/1": "of the second, later",
        "1/0": "of the first",
        "2/0": 'v1\n{"path":"file:///in/1","timestamp":5,"batchId":0}',
    }
    assert parse_offset_entry(live.folder.read("offsets/7"), "offsets/7").watermark_ms == 5_000


def test_sources_get_names(live: LiveDirectory) -> None:
    give_positions(live, {"files": "0", "orders": "1"}, {"late": Position('{"x":{"0":1}}')})

    assert live.folder.read("offsets/7").decode() == (
        f'v2\n{METADATA}\nfiles:{{"logOffset":7}}\norders:{{"orders":{{"0":7}}}}\nlate:{{"x":{{"0":1}}}}'
    )
    assert set(_logs(live)) == {"files/0", "orders/0", "orders/1"}


def test_a_dropped_source_leaves_nothing(live: LiveDirectory) -> None:
    give_positions(live, {"0": "1"}, {})

    assert _sources(live, 7) == {"0": '{"orders":{"0":7}}'}
    assert set(_logs(live)) == {"0/0", "0/1"}


def test_an_origin_with_other_sources_is_read_as_it_was_written() -> None:
    origin = StateOrigin.of_directory("/live/1", 7, None)
    assert "source_identities" not in origin.as_record()
    changed = StateOrigin(origin.kind, 7, map_sources="0=1", source_identities=({"kind": "file"},))
    assert StateOrigin.of_record(json.loads(json.dumps(changed.as_record()))) == changed


def test_the_sources_change_after_the_newest_batch_and_the_one_in_flight_is_undone(tmp_path: Path) -> None:
    history = History(tmp_path)
    history.commit(LAST + 1)
    (history.shelf.live / f"commits/{LAST + 1}").unlink()

    kind, prepared = history.start(map_sources=SWAPPED)

    assert kind is RecoveryKind.REWIND
    assert (history.batch, history.sink_batch) == (LAST, LAST)
    assert prepared.live.positions().offset == LAST
    assert _sources(prepared.live, LAST) == {"0": None, "1": f'{{"logOffset": {LAST}}}'}
    record = history.shelf.stream.catalog.streams.get(history.shelf.stream.stream_id)
    assert record.origin is not None
    assert record.origin.map_sources == SWAPPED
    assert record.timeline == 1


def test_before_the_first_batch_there_is_no_position_to_keep(tmp_path: Path) -> None:
    history = History(tmp_path)
    for log in ("commits", "offsets"):
        for entry in (history.shelf.live / log).iterdir():
            entry.unlink()

    with pytest.raises(LiveDirectoryError):
        history.start(map_sources=SWAPPED)


def test_killed_at_any_step_a_plain_start_has_the_former_sources_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = set()
    step, killed = 0, True
    while killed:
        (tmp_path / str(step)).mkdir()
        history = History(tmp_path / str(step))
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                history.start(map_sources=SWAPPED)
                killed = False
            except Killed:
                step += either(quick=4, thorough=1)
        kind, prepared = history.start()
        found = _sources(prepared.live, LAST)
        is_changed = found.keys() == {"0", "1"}
        assert found in ({"0": f'{{"logOffset": {LAST}}}'}, {"0": None, "1": f'{{"logOffset": {LAST}}}'})
        assert {name.partition("/")[0] for name in _logs(prepared.live)} == ({"1"} if is_changed else {"0"})
        assert (history.batch, history.sink_batch) == (LAST, LAST)
        outcomes.add((kind, is_changed))
        history.close()
    assert outcomes == {(RecoveryKind.RESUME, False), (RecoveryKind.FINISH_RESTORE, True), (RecoveryKind.RESUME, True)}
    assert step > 12
