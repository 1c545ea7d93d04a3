"""Which changes of a query's sources are refused, as cases. No Spark."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from dagster_ckpt.recovery.source_change import ReadSource, source_differences
from dagster_ckpt.spark.query import sources
from dagster_ckpt.spark.query.kafka_source import ReadTopics
from dagster_ckpt.spark.query.sources import (
    CLUSTER,
    PATH,
    PATTERN,
    TABLE,
    TABLE_ID,
    TOPIC_ID,
    TOPICS,
    SourceIdentity,
    identities_of_record,
    keyed,
    kind_of_offset,
    source_identities,
)

CASES = yaml.safe_load((Path(__file__).parent / "source_differences.yaml").read_text())


def identity(given: dict[str, Any], options: dict[str, str] | None = None) -> SourceIdentity:
    named = {PATH: "path", TABLE: "table", TABLE_ID: "table_id", PATTERN: "pattern", CLUSTER: "cluster"}
    what = {name: str(given[field]) for name, field in named.items() if field in given}
    what |= {TOPICS: ",".join(given["topics"])} if "topics" in given else {}
    what |= {f"{TOPIC_ID}{topic}": text for topic, text in given.get("ids", {}).items()}
    return SourceIdentity(given["kind"], given.get("name"), what, options or given.get("options", {}))


def was(given: dict[str, Any]) -> ReadSource:
    return ReadSource(
        identity=identity(given) if "kind" in given else None,
        kind=given.get("offset_kind"),
        has_read=given.get("has_read", True),
        files=given.get("files", ()),
        topics=given.get("read_topics", ()),
        table_id=given.get("offset_table_id"),
    )


@pytest.mark.parametrize("case", CASES, ids=[case["case"] for case in CASES])
def test_a_change_of_sources(case: dict[str, Any]) -> None:
    before = {each.get("name") or str(index): was(each) for index, each in enumerate(case["was"])}

    found = source_differences(before, keyed([identity(each) for each in case["now"]]))

    refused = {each.source: each for each in found if each.is_refused}
    assert refused.keys() == case.get("refused", {}).keys()
    for source, why in case.get("refused", {}).items():
        assert why in refused[source].why
        assert f"source {source}: was " in str(refused[source])


def test_a_changed_option_is_told_and_not_refused() -> None:
    before = {"0": ReadSource(identity({"kind": "file", "path": "file:/a"}, {"pathglobfilter": "*.json"}))}

    (found,) = source_differences(before, {"0": identity({"kind": "file", "path": "file:/a"})})

    assert not found.is_refused
    assert str(found) == "source 0: was file file:/a, is file file:/a (pathglobfilter *.json -> default)"


def test_recorded_sources_are_read_back_or_unknown_as_a_whole() -> None:
    sources = [identity({"kind": "file", "path": "file:/a", "name": "one"}), identity({"kind": "rate"})]
    record = [each.as_record() for each in sources]

    assert identities_of_record(record) == tuple(sources)
    for unknown in (None, [], "rate", [*record, {"kind": 1}], {"kind": "rate"}):
        assert identities_of_record(unknown) is None


@pytest.mark.parametrize(
    ("offset", "kind"),
    [
        ('{"logOffset":4}', "file"),
        ('{"orders":{"0":4}}', "kafka"),
        ('{"sourceVersion":1,"reservoirId":"i","reservoirVersion":4,"index":-1,"isStartingVersion":false}', "delta"),
        ('{"version":1,"snapshot_id":4,"position":0,"scan_all_files":false}', "iceberg"),
        ('{"offset":4,"timestamp":5}', "rate-micro-batch"),
        ("4", None),
        ("{}", None),
        ("no JSON", None),
        (None, None),
    ],
)
def test_an_offset_shows_its_kind_of_source(offset: str | None, kind: str | None) -> None:
    assert kind_of_offset(offset) == kind


def test_the_partitions_that_a_source_is_assigned_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"assign": '{"orders":[0]}', "kafka.bootstrap.servers": "broker:9092"}
    leaf: Any = SimpleNamespace(
        getClass=lambda: SimpleNamespace(getSimpleName=lambda: "StreamingRelationV2"),
        sourceName=lambda: "kafka",
        extraOptions=lambda: Options(options),
    )
    for name in ("delta_folder", "iceberg_table", "_name"):
        monkeypatch.setattr(sources, name, lambda _leaf: None)
    monkeypatch.setattr(sources, "topics_of", lambda _writer, source: ReadTopics(source.topics, None))
    monkeypatch.setattr(sources, "leaves_of", lambda _writer: [sources.Leaf(leaf, "0", 0, "0", is_again=False)])

    (found,) = source_identities(Mock()) or ()

    assert (found.topics, found.options) == ({"orders"}, {"assign": '{"orders":[0]}'})


class Options(dict[str, str]):
    def asCaseSensitiveMap(self) -> Options:  # noqa: N802 - Spark's name
        return self
