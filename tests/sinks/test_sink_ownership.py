"""A start changes the log of a sink only where the query names it, and where catalog, stream and log agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_ckpt.sinks import registry
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import Past, SinkLogAtHand, past_of
from dagster_ckpt.sinks.registry import register_sink, sinks_of
from dagster_ckpt.sinks.sink import Sink
from dagster_ckpt.sinks.sink_ownership import NamedSinks, Refusal, SinkFacts, Start, Verdict, judge
from dagster_ckpt.spark.query.output import NamedOutput

CASES = yaml.safe_load(Path(__file__).with_name("sink_ownership.yaml").read_text())

FLAGS = (
    "named",
    "ours",
    "others_known",
    "noted",
    "originals",
    "anothers",
    "former",
    "left_behind",
    "blank",
    "last",
    "planned",
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['start']}: {case['says']}")
def test_whose_sink_it_is_decides_what_a_start_does_with_it(case: dict[str, Any]) -> None:
    flags = {name: case[name] for name in FLAGS if name in case}
    facts = SinkFacts(Start(case["start"]), case["at"], past=Past(case.get("past", "SAME")), **flags)

    told = judge(FileSink.at("/out"), facts)

    assert told.verdict is Verdict(case["verdict"])
    assert told.refusal is (Refusal[case["why"]] if "why" in case else None)


PASTS = {
    "no log": (SinkLogAtHand(None), "ab", "NONE"),
    "the log as it was": (SinkLogAtHand(1, frozenset("ab")), "ab", "SAME"),
    "later batches": (SinkLogAtHand(3, frozenset("ab"), frozenset("cd"), is_later=True), "ab", "SAME"),
    "compacted since": (SinkLogAtHand(9, frozenset(), frozenset("abcd"), compacted=True, is_later=True), "ab", "SAME"),
    "compacted, and the oldest dropped": (
        SinkLogAtHand(9, frozenset(), frozenset("bcd"), compacted=True, is_later=True),
        "ab",
        "SAME",
    ),
    "nothing was written up to there": (SinkLogAtHand(3, frozenset(), frozenset("cd"), is_later=True), "", "SAME"),
    "an entry up to there is another's": (
        SinkLogAtHand(3, frozenset("ax"), frozenset("cd"), is_later=True),
        "ab",
        "SHARED",
    ),
    "the snapshot has more": (SinkLogAtHand(0, frozenset("a")), "ab", "PART"),
    "the snapshot has all": (SinkLogAtHand(0), "ab", "PART"),
    "the snapshot has more, and later batches": (
        SinkLogAtHand(3, frozenset("a"), frozenset("c"), is_later=True),
        "ab",
        "SHARED",
    ),
    "nothing in common": (SinkLogAtHand(3, frozenset("xy"), frozenset("z"), is_later=True), "ab", "STRANGER"),
    "nothing in common, compacted": (
        SinkLogAtHand(9, frozenset(), frozenset("xyz"), compacted=True, is_later=True),
        "ab",
        "STRANGER",
    ),
    "rows where the snapshot has none": (SinkLogAtHand(3, frozenset("x")), "", "STRANGER"),
}


@pytest.mark.parametrize(("at_hand", "noted", "past"), PASTS.values(), ids=PASTS)
def test_a_log_has_the_past_of_a_snapshot_or_not(at_hand: SinkLogAtHand, noted: str, past: str) -> None:
    assert past_of(at_hand, frozenset(noted)) is Past(past)


def test_a_described_query_names_its_folder_and_no_other(tmp_path: Path) -> None:
    before = sinks_of([f"FileSink[file:{tmp_path}/before]", "ForeachBatchSink"])
    in_the_snapshot = [FileSink.at(f"{tmp_path}/in the snapshot")]

    seen = NamedSinks.of(NamedOutput("parquet", f"{tmp_path}/now"), before, in_the_snapshot)
    topic = NamedSinks.of(NamedOutput("kafka", "orders"), before)
    unseen = NamedSinks.of(None, before, in_the_snapshot)

    def names(named: NamedSinks, folder: str) -> bool:
        return named.names(FileSink.at(folder))

    assert (names(seen, f"file:{tmp_path}/now"), names(seen, f"{tmp_path}/before")) == (True, False)
    assert topic.sinks == ()
    assert [names(unseen, f"{tmp_path}/{name}") for name in ("before", "in the snapshot", "now")] == [True, True, False]


@pytest.mark.parametrize("output_format", ["geoparquet", "org.apache.spark.sql.parquet"])
def test_a_format_that_is_not_known_is_of_the_file_sink_that_the_stream_wrote_to_in_its_folder(
    tmp_path: Path, output_format: str
) -> None:
    before = sinks_of([f"FileSink[file:{tmp_path}/out]", f"DeltaSink[{tmp_path}/table]"])
    in_the_snapshot = [FileSink.at(f"{tmp_path}/noted")]

    def named(folder: str) -> list[str | None]:
        output = NamedOutput(output_format, f"{tmp_path}/{folder}")
        return [sink.place for sink in NamedSinks.of(output, before, in_the_snapshot).sinks]

    assert named("out") == [f"file:{tmp_path}/out"]
    assert named("noted") == [f"{tmp_path}/noted"]
    assert named("table") == named("new") == []


def test_a_format_of_files_that_is_not_known_is_of_a_file_sink_in_a_new_folder(tmp_path: Path) -> None:
    named = NamedSinks.of(NamedOutput("geoparquet", str(tmp_path), of_files=True), [])

    assert [type(sink) for sink in named.sinks] == [FileSink]


def test_a_query_that_does_not_say_where_it_writes_may_write_to_the_last_sink_of_its_kind(tmp_path: Path) -> None:
    @register_sink
    class Rows(Sink):
        rolls_back = True

        @classmethod
        def of(cls, name: str) -> Rows | None:
            return cls(name, "rows.db") if name == "ForeachBatchSink[rows.db]" else None

    before = sinks_of(["ForeachBatchSink[rows.db]", f"FileSink[{tmp_path}]"])

    def named(output: NamedOutput) -> list[str]:
        return [sink.name for sink in NamedSinks.of(output, before).sinks]

    try:
        assert named(NamedOutput("foreachbatch", None)) == ["ForeachBatchSink[rows.db]"]
        assert named(NamedOutput("foreachbatch", "other.db")) == []
        assert named(NamedOutput("console", None)) == []
        assert named(NamedOutput("parquet", None)) == []
    finally:
        registry._registered.remove(Rows)
