"""Chosen positions of Kafka sources: what is accepted, and what a live directory says afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery import source_check
from dagster_ckpt.recovery.plan import Restore
from dagster_ckpt.recovery.source_check import move_sources, resolved_offsets
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry
from dagster_ckpt.spark.query.kafka_source import KafkaSource
from dagster_ckpt.spark.query.sources import Leaf
from dagster_ckpt.stream.start_from import SourceOffsets, StartFrom

METADATA = '{"batchWatermarkMs":0,"batchTimestampMs":1,"conf":{}}'
KAFKA = '{"orders":{"1":20,"0":10},"returns":{"0":5}}'
FILES = '{"logOffset":3}'


@pytest.fixture
def live(tmp_path: Path) -> LiveDirectory:
    for name, text in {
        "offsets/6": "v1\n" + "\n".join([METADATA, FILES, KAFKA]),
        "offsets/7": "v1\n" + "\n".join([METADATA, FILES, KAFKA.replace("10", "11")]),
        "offsets/8": "v1\n" + "\n".join([METADATA, FILES, KAFKA.replace("10", "12")]),
        "commits/6": "v1\n{}",
        "commits/7": 'v1\n{"nextBatchWatermarkMs":0}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return LiveDirectory(str(tmp_path))


def test_the_next_batch_begins_at_the_chosen_offsets_and_the_planned_one_is_gone(live: LiveDirectory) -> None:
    before = live.folder.read("offsets/7")

    move_sources(live, SourceOffsets.parse('{"orders": {"0": 99}}'))

    after = parse_offset_entry(live.folder.read("offsets/7"), "offsets/7")
    files, kafka = after.sources.values()
    assert files == FILES
    assert json.loads(kafka or "") == {"orders": {"0": 99, "1": 20}, "returns": {"0": 5}}
    assert live.folder.size("offsets/8") is None
    assert parse_offset_entry(before, "offsets/7").conf == after.conf


def test_named_sources_keep_their_names(live: LiveDirectory) -> None:
    live.folder.write("offsets/7", ["\n".join(["v2", METADATA, f"files:{FILES}", f"kafka:{KAFKA}"]).encode()])

    move_sources(live, SourceOffsets.parse('{"returns": {"0": 0}}'))

    sources = parse_offset_entry(live.folder.read("offsets/7"), "offsets/7").sources
    assert list(sources) == ["files", "kafka"]
    assert json.loads(sources["kafka"] or "")["returns"] == {"0": 0}


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ('{"payments": {"0": 1}}', "topic 'payments', but the query reads orders, returns"),
        ('{"orders": {"7": 1}}', "partition 7 of topic 'orders', but the query reads 0, 1"),
    ],
)
def test_what_the_query_does_not_read_is_refused_and_nothing_changes(
    live: LiveDirectory, offsets: str, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        move_sources(live, SourceOffsets.parse(offsets))

    assert live.folder.size("offsets/8") is not None


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        # Two sources with a partition each (assign).
        (['{"orders":{"0":500}}', '{"orders":{"1":600}}'], {"0": 100, "1": 101}),
        (['{"orders":{"0":500,"1":600}}', '{"orders":{"1":600}}'], {"0": 100, "1": 101}),
        (['{"orders":{"0":500}}', '{"returns":{"1":600}}'], {"0": 100}),
    ],
)
def test_a_time_is_looked_up_in_each_source_of_the_topic(
    positions: list[str], expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = chosen_time(monkeypatch, positions, ["k1:9092,k2:9092", "k2:9092, k1:9092"])
    assert plan.source_offsets == SourceOffsets({"orders": expected})


def test_a_time_is_refused_for_topics_of_one_name_on_two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ['{"orders":{"0":500}}', '{"orders":{"0":600}}']
    with pytest.raises(OptionError, match=r"from eu:9092 and from us:9092\. Give offsets instead"):
        chosen_time(monkeypatch, two, ["us:9092", "eu:9092"])


def chosen_time(patch: pytest.MonkeyPatch, positions: list[str], servers: list[str]) -> Any:
    offsets = {str(at): each for at, each in enumerate(positions)}
    found = [(Leaf(at, at, int(at), at, is_again=False), at, each) for at, each in offsets.items()]
    patch.setattr(source_check, "_offsets_to_read", lambda *_: offsets)
    patch.setattr(source_check, "sources_in_entry", lambda *_: found)
    patch.setattr(source_check, "kafka_source", lambda node: KafkaSource({"bootstrap.servers": servers[int(node)]}))
    patch.setattr(source_check, "offsets_at", lambda _w, _s, asked, _at: {each: 100 + each[1] for each in asked})
    chosen = SourceOffsets.parse('{"orders": "2026-11-23T07:00:00Z"}')
    snapshot: Any = SimpleNamespace(batch_id=9, snapshot_id="s")
    unused: Any = None
    return resolved_offsets(unused, Restore(reason="", snapshot=snapshot, source_offsets=chosen), lambda: unused)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "7", '{"orders": {}}', '{"orders": {"0": -1}}', '{"orders": {"x": 1}}', '{"orders": 5}'),
        *('{"orders": {"0": "5"}}', '{"orders": "yesterday"}', '{"orders": {"0": true}}', '{"orders": "12:00"}'),
    ],
)
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(OptionError, match=r"source_offsets is .* Give "):
        SourceOffsets.parse(text)


def test_an_option_is_kept_as_it_was_given() -> None:
    given = '{"orders": {"0": 124}, "returns": "2026-11-23T08:00:00+01:00"}'

    start = StartFrom("batch-7", source_offsets=given)

    assert start.chosen_offsets == SourceOffsets({"orders": {"0": 124}}, {"returns": 1795417200000})
    assert StartFrom("batch-7", source_offsets=start.source_offsets) == start


@pytest.mark.parametrize("point", ["latest", "empty"])
def test_a_batch_or_a_snapshot_is_named_with_them(point: str) -> None:
    with pytest.raises(OptionError, match="source_offsets is for a start from a snapshot or a batch"):
        StartFrom(point, source_offsets='{"orders": {"0": 1}}')
