"""The metrics of all streams over HTTP, as a scraper reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from dagster_ckpt.client import Client
from dagster_ckpt.ui.app import exposition
from dagster_ckpt.values.metrics import LAST_SIZE, METRICS, SOURCE_LAG, Sample, as_table
from tests.support.golden_stream import STREAM

PARSERS = {
    "text/plain": text_format,
    "application/openmetrics-text; version=1.0.0": open_metrics,
}


@pytest.mark.parametrize("accept", PARSERS)
def test_a_scraper_reads_the_declared_metrics_in_the_format_that_it_asks_for(page: str, accept: str) -> None:
    answer = requests.get(f"{page}/metrics", headers={"Accept": accept}, timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(accept.partition(";")[0])
    families = {family.name: family for family in PARSERS[accept](answer.text)}
    declared = {metric.family: metric for metric in METRICS}
    assert set(families) == set(declared)
    for name, family in families.items():
        assert family.type == ("counter" if declared[name].is_counter else "gauge")
        assert all(set(sample.labels) == set(declared[name].labels) for sample in family.samples)
    [status] = families["dagster_ckpt_stream_status"].samples
    assert (status.labels, status.value) == ({"stream": STREAM, "kind": "suspended"}, 1)


def test_labels_with_any_characters_are_read_back() -> None:
    source = 'FileStreamSource["/in"]\n\\'
    text, _ = exposition([Sample(SOURCE_LAG, "a stream", 3, source), Sample(LAST_SIZE, "a", 2**60, "savepoint")], "")
    samples = [sample for family in text_format(text.decode()) for sample in family.samples]
    assert [(each.labels, each.value) for each in samples] == [
        ({"stream": "a", "kind": "savepoint"}, 2**60),
        ({"stream": "a stream", "source": source}, 3),
    ]


def test_a_catalog_that_is_away_is_an_error_of_the_scrape(page: str, client: Client) -> None:
    path = Path(client.catalog.database.url.database or "")
    path.rename(path.with_suffix(".away"))
    path.mkdir()
    answer = requests.get(f"{page}/metrics", timeout=30)
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (500, "text/plain")
    assert "The checkpoint catalog" in answer.text


def test_a_client_gives_the_metrics_of_one_stream(client: Client) -> None:
    assert {each.stream_id for each in client.metrics(STREAM)} == {STREAM}


def test_names_follow_the_conventions() -> None:
    names = [metric.prometheus_name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.prometheus_name.endswith("_total") == metric.is_counter
        assert metric.unit in ("s", "By", "1") or metric.unit.startswith("{")
        assert metric.description.endswith(".")
        assert len(metric.name) <= 64, "the column of the catalog"
    assert len(list(as_table())) == len(METRICS) + 2
