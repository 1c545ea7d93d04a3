"""Facts that pages state and code decides."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from dagster_ckpt.spark.versions import SparkFile
from dagster_ckpt.values.metrics import as_table
from tests.support.page_blocks import DOCS

FILES = {
    "offset log": SparkFile.OFFSETS,
    "commit log": SparkFile.COMMITS,
    "log of a file source, log of a file sink": SparkFile.FILE_LOG,
    "operator metadata": SparkFile.OPERATOR_METADATA,
    "state schema": SparkFile.STATE_SCHEMA,
    "changelog": SparkFile.CHANGELOG,
    "RocksDB snapshot": SparkFile.ROCKSDB_SNAPSHOT,
}


def known_versions() -> dict[str, str]:
    """The table of docs/evidence/coverage.md."""
    section = (DOCS / "evidence/coverage.md").read_text("utf-8").partition("## Unknown file versions")[2]
    return dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", section, re.M))


@pytest.mark.parametrize(("name", "file"), FILES.items(), ids=FILES)
def test_the_versions_of_a_file_are_those_that_are_read(name: str, file: SparkFile) -> None:
    assert known_versions()[name] == ", ".join(f"v{version}" for version in sorted(file.versions))


def test_no_kind_of_file_is_missing() -> None:
    assert set(known_versions()) - {"file", "---"} == set(FILES)
    assert set(FILES.values()) == set(SparkFile)


def test_the_page_has_every_metric_as_it_is_declared() -> None:
    page = (DOCS / "guides/metrics.md").read_text("utf-8")
    assert "\n".join(as_table()) in page, "replace its table by what `as_table` gives"


def test_the_page_has_every_alert_rule() -> None:
    page = (DOCS / "guides/metrics.md").read_text("utf-8").partition("## The alert rules")[2]
    groups = yaml.safe_load((DOCS.parent / "deploy/metrics/alerts.yaml").read_text("utf-8"))["groups"]
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [rule["alert"] for group in groups for rule in group["rules"]]


def rows_of(section: str, title: str) -> dict[str, dict[str, str]]:
    """By the first column, each row of a table that was measured, by heading."""
    measured = json.loads((DOCS.parent / f"benchmarks/measured/{section}.json").read_text("utf-8"))
    [table] = [each for each in measured["tables"] if each["title"].startswith(title)]
    return {row[0]: dict(zip(table["headings"], row, strict=True)) for row in table["rows"]}


def test_the_guide_has_the_seconds_that_were_measured_after_a_kill() -> None:
    measured = rows_of("recovery", "Seconds from SIGKILL")
    page = (DOCS / "guides/recover-in-seconds.md").read_text("utf-8")
    for shown, victim in (
        ("the driver's Python", "driver's Python"),
        ("its JVM", "JVM"),
        ("the whole run", "whole run"),
    ):
        ways = [measured.get(f"{victim}{how}") for how in ("", ", with an archive of classes", ", with standby")]
        seconds = [f"{way['query running']} s" if way is not None else "as without" for way in ways]
        assert f"| {shown} | {' | '.join(seconds)} |" in page
    flink = rows_of("recovery", "Flink")
    lost = sorted(round(float(flink[f"TaskManager, {how}"]["median"])) for how in ("another waits", "started again"))
    worker = float(flink["Python worker"]["median"])
    assert f"after {lost[0]} to {lost[1]} s" in page
    assert f"died after {worker:.1f} s" in page


def test_the_guide_has_the_gap_that_was_measured() -> None:
    measured = rows_of("hand-over", "Seconds from the last batch")
    gap, stopped = measured["handed over, two batches verified"], measured["stopped with a savepoint, then started"]
    page = (DOCS / "guides/upgrade-without-a-gap.md").read_text("utf-8")
    assert f"{float(gap['median']):.1f} s ([measured]" in page
    assert f"at most {float(gap['max']):.1f} s" in page
    assert f"for {float(stopped['median']):.0f} s if you stop" in page
