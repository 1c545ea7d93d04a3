"""What each page shows, read from the client."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from markupsafe import Markup

from dagster_ckpt.client import (
    Branch,
    Client,
    EventRecord,
    EventType,
    HistoryCursor,
    HistoryPage,
    SnapshotFigures,
    SnapshotHeader,
    SnapshotRecord,
    SnapshotStatus,
    StreamConnections,
    StreamDescription,
    StreamHealth,
)
from dagster_ckpt.errors import CkptError, SnapshotNotFoundError
from dagster_ckpt.ui.charts import Point, TimelineBar, graph_chart, line_chart, no_chart, points, timeline_chart
from dagster_ckpt.values.durations import headline, rounded_duration, size
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.validation import OptionDescription

# Snapshots in charts, rows of a table, executions on the time line.
CHARTED, ROWS, EXECUTIONS = 1_000, 50, 40
_DELAY = "watermark_delay_ms"
_PERCENTILES = (50, 90, 95, 99)
_EVENTS = 500


def number(value: int) -> str:
    return f"{value:,}"


# Figures of snapshots in charts and summary.
_FIGURES: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("Duration", "duration_ms", rounded_duration),
    ("Size", "full_bytes", size),
    ("New bytes", "incremental_bytes", size),
    ("State rows", "state_rows", number),
    ("Input rows", "rows", number),
    ("Records behind", "records_behind", number),
    ("Watermark delay (event time)", _DELAY, rounded_duration),
)
_DURATIONS = ("interval", "timeout", "min_pause", "alignment_timeout")
# The table of places shows the storage. The catalog records no trigger policy.
_RECORDED_ELSEWHERE = ("storage", "trigger")
_SETTINGS = {
    "restart": "Restart strategy",
    "kind": "Checkpoint storage",
    "checkpoint_path": "Checkpoints",
    "savepoint_path": "Savepoints",
    "live_root": "Live directories",
}
# Only Kafka sources, and queries with a watermark, have these.
_OPTIONAL = ("records_behind", _DELAY)
# No stream lags so far behind its events: the events are old.
_REPLAYED_MS = 30 * 86_400_000
_FAILURES = {
    EventType.EXECUTION_ENDED: "Execution failed",
    EventType.RECOVERY_FAILED: "Recovery failed",
    EventType.TERMINALLY_FAILED: "Not restarted any more",
    EventType.ALERT: "Alert of the supervisor",
}


@dataclass(frozen=True)
class Overview:
    stream: StreamDescription
    health: StreamHealth | None
    problem: str | None
    counts: Mapping[str, int]
    charts: tuple[Markup, ...]


@dataclass(frozen=True)
class Percentiles:
    """Statistics of one figure, as text: minimum, mean, maximum, then `_PERCENTILES`."""

    title: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Summary:
    stream: StreamDescription
    count: int
    rows: tuple[Percentiles, ...]


@dataclass(frozen=True)
class TimelinePage:
    """Everything newest first; `upgrades` includes results of preflights and comparisons."""

    stream: StreamDescription
    bars: tuple[TimelineBar, ...]
    branches: tuple[Branch, ...]
    upgrades: tuple[EventRecord, ...]
    chart: Markup


@dataclass(frozen=True)
class FailureGroup:
    """Failures of one kind (`what`) with one reason; `at_ms` is that of the newest."""

    what: str
    reason: str
    count: int
    at_ms: int
    first_ms: int


@dataclass(frozen=True)
class Failures:
    stream: StreamDescription
    snapshots: tuple[SnapshotRecord, ...]
    groups: tuple[FailureGroup, ...]


@dataclass(frozen=True)
class Option:
    name: str
    value: str
    effect: str
    explanation: str


@dataclass(frozen=True)
class Configuration:
    stream: StreamDescription
    options: tuple[Option, ...]
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SnapshotPage:
    stream: str
    record: SnapshotRecord
    header: SnapshotHeader | None
    problem: str | None
    operators: tuple[Mapping[str, object], ...]
    sinks: tuple[str, ...]
    properties: Mapping[str, str]
    holds: tuple[str, ...]


@dataclass(frozen=True)
class GraphPage:
    found: StreamConnections
    chart: Markup


def names(snapshots: Sequence[SnapshotRecord]) -> list[tuple[str, SnapshotRecord]]:
    labels = Counter(each.label for each in snapshots)
    return [(each.label if each.label and labels[each.label] == 1 else each.snapshot_id, each) for each in snapshots]


def overview(client: Client, stream: str) -> Overview:
    described = client.describe_stream(stream, limit=ROWS)
    problem = None
    try:
        health = client.health(stream)
    except CkptError as error:
        health, problem = None, str(error)
    figures = client.catalog.history.figures(described.stream_id, limit=CHARTED)
    starts = [each.started_at_ms for each in described.executions]
    lines = [(title, name, points(figures, name), text) for title, name, text in _FIGURES]
    charts = tuple(
        _delay_of_replayed(title, found) or line_chart(title, found, text, starts=starts)
        if name == _DELAY
        else line_chart(title, found, text, starts=starts)
        for title, name, found, text in lines
        if found or name not in _OPTIONAL
    )
    return Overview(described, health, problem, client.catalog.history.counts(described.stream_id), charts)


def _delay_of_replayed(title: str, delays: Sequence[Point]) -> Markup | None:
    least = min((round(point.value) for point in delays), default=0)
    if least < _REPLAYED_MS:
        return None
    return no_chart(
        title,
        f"The events are at least {rounded_duration(least)} old, as in a replay, so their delay is not drawn. Summary "
        "has the figures.",
    )


def graph(client: Client, stream: str | None) -> GraphPage:
    found = client.stream_connections(stream)
    return GraphPage(found, graph_chart(found))


def history(
    client: Client,
    stream: str,
    *,
    kind: SnapshotKind | None,
    status: SnapshotStatus | None,
    older_than: HistoryCursor | None,
) -> tuple[StreamDescription, HistoryPage]:
    described = client.describe_stream(stream, limit=1)
    page = client.catalog.history.page(described.stream_id, limit=ROWS, kind=kind, status=status, older_than=older_than)
    return described, page


def summary(client: Client, stream: str) -> Summary:
    described = client.describe_stream(stream, limit=1)
    figures = client.catalog.history.figures(described.stream_id, limit=CHARTED)
    rows = [
        *(_percentiles(title, [getattr(each, name) for each in figures], text) for title, name, text in _FIGURES),
        _percentiles("Time between snapshots", _intervals(figures), rounded_duration),
    ]
    return Summary(described, len(figures), tuple(row for row in rows if row is not None))


def timeline(client: Client, stream: str) -> TimelinePage:
    described = client.describe_stream(stream, limit=EXECUTIONS)
    catalog = client.catalog
    sources = {each.execution_id: str((each.recovery or {}).get("snapshot_id") or "") for each in described.executions}
    restored = catalog.snapshots.by_id([source for source in sources.values() if source])
    bars = tuple(TimelineBar(each, restored.get(sources[each.execution_id])) for each in described.executions)
    taken = catalog.history.figures(described.stream_id, limit=CHARTED)
    chart = timeline_chart(bars, taken, now_ms=catalog.now_ms())
    upgrades = _newest_events(
        client, described.stream_id, (EventType.UPGRADE_CHANGED, EventType.CODE_TRIED, EventType.HANDED_OVER)
    )
    branches = tuple(catalog.history.branches(described.stream_id))
    return TimelinePage(described, bars, branches, tuple(upgrades[:ROWS]), chart)


def failures(client: Client, stream: str) -> Failures:
    described = client.describe_stream(stream, limit=1)
    page = client.catalog.history.page(described.stream_id, limit=ROWS, status=SnapshotStatus.FAILED)
    bad = [
        each
        for each in _newest_events(client, described.stream_id, tuple(_FAILURES))
        if each.type is not EventType.EXECUTION_ENDED or each.payload.get("status") == "FAILED"
    ]
    return Failures(described, page.snapshots, tuple(_grouped(bad))[:ROWS])


def _newest_events(client: Client, stream_id: str, types: Sequence[EventType]) -> list[EventRecord]:
    events = client.catalog.events
    found = events.last_of([stream_id], types, up_to=events.latest_sequence(), each=_EVENTS)
    return found[stream_id][::-1]


def _grouped(failed: Sequence[EventRecord]) -> list[FailureGroup]:
    groups: dict[tuple[str, str], FailureGroup] = {}
    for event in failed:
        of = event.payload
        at = f" at {of['point']}" if of.get("point") else ""
        what = _FAILURES[event.type] + at
        reason = str(of.get("reason") or of.get("detail") or of.get("message") or of.get("alert") or "")
        seen = groups.get((what, headline(reason)))
        groups[what, headline(reason)] = FailureGroup(
            what,
            seen.reason if seen else reason,
            seen.count + 1 if seen else 1,
            seen.at_ms if seen else event.at_ms,
            event.at_ms,
        )
    return list(groups.values())


def snapshot(client: Client, stream: str, snapshot_id: str) -> SnapshotPage:
    described = client.describe_stream(stream, limit=1)
    record = client.catalog.snapshots.get(snapshot_id)
    if record.stream_id != described.stream_id:
        raise SnapshotNotFoundError(f"Stream {stream!r} has no snapshot {snapshot_id!r}. Its history lists them.")
    header, problem = None, None
    holds: tuple[str, ...] = ()
    if record.status is SnapshotStatus.COMPLETED:
        try:
            found = client.describe_snapshot(described.stream_id, snapshot_id)
            header, holds = found.header, tuple(f"{hold.kind.value} by {hold.holder}" for hold in found.holds)
        except CkptError as error:
            problem = str(error)
    properties = dict(header.properties if header is not None else record.properties)
    listed = properties.pop("state_operators", None)
    operators = tuple(each for each in listed if isinstance(each, Mapping)) if isinstance(listed, list) else ()
    sinks = _sinks(properties)
    # Named among the sinks.
    properties.pop("other_sinks", None)
    shown = {name: _json(value) for name, value in sorted(properties.items()) if value not in (None, "", [], {})}
    return SnapshotPage(described.stream_id, record, header, problem, operators, sinks, shown, holds)


def _sinks(properties: Mapping[str, object]) -> tuple[str, ...]:
    captured, others = properties.get("sinks"), properties.get("other_sinks")
    folders = [each.get("path") for each in captured if isinstance(each, Mapping)] if isinstance(captured, list) else []
    return tuple(map(str, [*folders, *(others if isinstance(others, list) else [])]))


def configuration(client: Client, stream: str) -> Configuration:
    described = client.describe_stream(stream, limit=1)
    recorded = described.settings
    options = tuple(
        Option(each.option, _option_value(each), each.effect.value, each.explanation)
        for each in (recorded.options.describe() if recorded.options is not None else ())
        if each.option not in _RECORDED_ELSEWHERE
    )
    settings = [(_SETTINGS[name], _json(value)) for name, value in _places(recorded.as_record()) if value is not None]
    return Configuration(described, options, tuple(settings))


def _option_value(option: OptionDescription) -> str:
    value = option.value
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "not set"
    if isinstance(value, int) and option.option in _DURATIONS:
        return rounded_duration(value)
    return value.name if isinstance(value, Enum) else str(value)


def _places(record: Mapping[str, object]) -> list[tuple[str, object]]:
    storage = record.get("storage")
    return [
        ("restart", record.get("restart")),
        *(
            (name, storage.get(name))
            for name in ("kind", "checkpoint_path", "savepoint_path")
            if isinstance(storage, Mapping)
        ),
        ("live_root", record.get("live_root")),
    ]


def _intervals(figures: Sequence[SnapshotFigures]) -> list[int | None]:
    return [after.completed_at_ms - before.completed_at_ms for before, after in itertools.pairwise(figures)]


def _percentiles(title: str, values: Sequence[int | None], text: Callable[[int], str]) -> Percentiles | None:
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    # The nearest rank, as in Flink's statistics.
    ranks = [known[max(0, -(-percent * len(known) // 100) - 1)] for percent in _PERCENTILES]
    mean = round(sum(known) / len(known))
    return Percentiles(title, tuple(text(value) for value in (known[0], mean, known[-1], *ranks)))


def _json(value: object) -> str:
    if isinstance(value, str):
        return without_secrets(value)
    return without_secrets(
        json.dumps(value, ensure_ascii=False, default=str, indent=2 if isinstance(value, dict | list) else None)
    )
