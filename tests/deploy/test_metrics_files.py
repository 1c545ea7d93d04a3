"""Dashboard and alert rules ask for metrics and labels that exist; every metric is on the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from promql_parser import AggregateExpr, BinaryExpr, MatchOp, VectorSelector

from dagster_ckpt.values.metrics import METRICS, Metric

FILES = Path(__file__).parents[2] / "deploy" / "metrics"
DECLARED = {metric.prometheus_name: metric for metric in METRICS}
# Grafana replaces them before Prometheus sees them.
VARIABLES = {"$__rate_interval": "1m", "$stream": ".*"}


def of_dashboard() -> Iterator[tuple[str, str]]:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for each in dashboard["annotations"]["list"]:
        yield each["name"], each["expr"]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [*of_dashboard(), *((rule["alert"], rule["expr"]) for rule in rules())]


def parsed(expression: str) -> Any:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def selectors(expression: Any) -> list[VectorSelector]:
    found: list[VectorSelector] = []
    promql_parser.walk(expression, lambda node: found.append(node) if isinstance(node, VectorSelector) else None)
    return found


def asked_of(selector: VectorSelector) -> Metric:
    assert selector.name in DECLARED, f"no metric is called {selector.name}"
    metric = DECLARED[selector.name]
    for matcher in selector.matchers.matchers:
        assert matcher.name in metric.labels, f"{selector.name} has no label {matcher.name}"
        if matcher.name == "kind":
            values = matcher.value.split("|") if matcher.op is MatchOp.Re else [matcher.value]
            assert set(values) <= set(metric.kinds), f"{selector.name} has no kind {matcher.value}"
    return metric


def grouped_by(expression: Any) -> set[str]:
    """The labels that aggregations and comparisons name."""
    labels: set[str] = set()

    def note(node: Any) -> None:
        if isinstance(node, AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        if isinstance(node, BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            labels.update(node.modifier.matching.labels)

    promql_parser.walk(expression, note)
    return labels


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS, ids=[title for title, _ in EXPRESSIONS])
def test_an_expression_asks_for_what_is_declared(title: str, expression: str) -> None:
    read = parsed(expression)
    metrics = [asked_of(selector) for selector in selectors(read)]
    assert metrics
    assert grouped_by(read) <= {label for metric in metrics for label in metric.labels}


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("dagster_ckpt_snapshot_completed", "no metric is called dagster_ckpt_snapshot_completed"),
        ('dagster_ckpt_state_rows{kind="checkpoint"}', "has no label kind"),
        ('dagster_ckpt_stream_status{kind=~"failed|lost"}', "has no kind"),
    ],
)
def test_what_is_not_declared_is_found(expression: str, problem: str) -> None:
    [selector] = selectors(parsed(f"sum(rate({expression}[5m]))"))
    with pytest.raises(AssertionError, match=problem):
        asked_of(selector)


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {selector.name for _, expression in of_dashboard() for selector in selectors(parsed(expression))}
    assert set(DECLARED) - shown == {"dagster_ckpt_counting_since_seconds"}


def test_messages_name_labels_that_the_result_has() -> None:
    for rule in rules():
        labels = {label for selector in selectors(parsed(rule["expr"])) for label in asked_of(selector).labels}
        named = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert named <= labels, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in dashboard["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_each_status_has_a_name_and_a_color() -> None:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    [panel] = [panel for panel in dashboard["panels"] if panel["type"] == "state-timeline"]
    [mapping] = panel["fieldConfig"]["defaults"]["mappings"]
    named = {number: each["text"] for number, each in mapping["options"].items() if each["color"]}
    asked = dict(re.findall(r"(\d) \* [^}]*kind=\"(\w+)\"", panel["targets"][0]["expr"]))
    assert named == asked
    assert set(asked.values()) == set(DECLARED["dagster_ckpt_stream_status"].kinds)


def test_prometheus_scrapes_the_page_and_reads_the_rules() -> None:
    configured = yaml.safe_load((FILES / "prometheus.yaml").read_text())
    assert configured["rule_files"] == ["alerts.yaml"]
    [job] = configured["scrape_configs"]
    assert job["static_configs"][0]["targets"] == ["checkpoint-page:3080"]
