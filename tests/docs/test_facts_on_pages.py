"""Facts that pages state and code decides."""

from __future__ import annotations

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
