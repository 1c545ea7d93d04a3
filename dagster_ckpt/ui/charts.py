"""Charts as SVG text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

from markupsafe import Markup, escape

from dagster_ckpt.client import (
    ExecutionRecord,
    ExecutionStatus,
    SnapshotFigures,
    SnapshotRecord,
    StreamConnections,
    describe_snapshot,
)
from dagster_ckpt.values.durations import utc_time
from dagster_ckpt.values.modes import SnapshotKind

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 150, 8, 22
# More dots would overlap.
_MOST_POINTS = 200
_SAVEPOINT = 2.0


@dataclass(frozen=True)
class Point:
    """A value at a time."""

    at_ms: int
    value: float
    of: SnapshotFigures


def points(figures: Sequence[SnapshotFigures], name: str) -> list[Point]:
    """The snapshots are oldest first."""
    values = ((each, getattr(each, name)) for each in figures)
    return [Point(each.completed_at_ms, float(value), each) for each, value in values if value is not None]


def thinned(values: Sequence[Point]) -> list[Point]:
    """The largest value of each part of the time."""
    if len(values) <= _MOST_POINTS:
        return list(values)
    size = len(values) / _MOST_POINTS
    parts = (values[round(part * size) : round((part + 1) * size)] for part in range(_MOST_POINTS))
    return [max(part, key=lambda point: point.value) for part in parts if part]


def _named(snapshot: SnapshotFigures) -> str:
    kind = "chk-" if snapshot.kind is SnapshotKind.CHECKPOINT else "savepoint "
    return f"{kind}{snapshot.number}, batch {snapshot.batch_id}"


def _dot(point: Point, place: tuple[float, float], text: Callable[[int], str]) -> str:
    title = escape(f"{_named(point.of)}: {text(round(point.value))} at {utc_time(point.at_ms)}")
    return f'<circle cx="{place[0]}" cy="{place[1]}" r="3"><title>{title}</title></circle>'


def line_chart(title: str, values: Sequence[Point], text: Callable[[int], str]) -> Markup:
    """A line over time, which starts at zero. `text` formats a value for the axis and the summary."""
    if not values:
        return Markup(
            '<figure class="chart"><figcaption>{}</figcaption><p class="muted">No data yet.</p></figure>'
        ).format(title)
    # Always with the newest.
    shown = [*thinned(values[:-1]), values[-1]]
    first, last = values[0].at_ms, values[-1].at_ms
    top = max(point.value for point in shown) or 1.0
    across, down = _WIDTH - 2 * _LEFT, _HEIGHT - _TOP - 18

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + (across * (point.at_ms - first) / (last - first) if last > first else across / 2)
        return round(x, 1), round(_TOP + down * (1 - point.value / top), 1)

    newest, highest = text(round(shown[-1].value)), text(round(top))
    path = " ".join(f"{x},{y}" for x, y in map(place, shown))
    # `Markup.format` would take half the page's time.
    dots = Markup("".join(map(_dot, shown, map(place, shown), repeat(text))))
    summary = f"{title}: newest {newest}, highest {highest}, {len(values)} snapshots"
    return Markup(
        '<figure class="chart"><figcaption>{title} <span class="muted">newest {newest}</span></figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{summary}">'
        '<line class="axis" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>'
        '<line class="grid" x1="{left}" x2="{right}" y1="{top}" y2="{top}"/>'
        '<text x="{left}" y="{label}">{highest}</text>'
        '<text x="{left}" y="{foot}">{begin}</text><text x="{right}" y="{foot}" class="end">{end}</text>'
        '<polyline points="{path}"/><g class="dots">{dots}</g></svg></figure>'
    ).format(
        title=title,
        newest=newest,
        summary=summary,
        highest=highest,
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _LEFT,
        base=_TOP + down,
        top=_TOP,
        label=_TOP - 6,
        foot=_HEIGHT - 4,
        begin=utc_time(first),
        end=utc_time(last),
        path=path,
        dots=dots,
    )


@dataclass(frozen=True)
class TimelineBar:
    """An execution on the time line, and its starting snapshot."""

    execution: ExecutionRecord
    restored: SnapshotRecord | None


_WIDE, _ROW, _BAR = 1200, 26, 14


def timeline_chart(bars: Sequence[TimelineBar], taken: Sequence[SnapshotFigures], *, now_ms: int) -> Markup:
    """Executions as bars, snapshots as marks on them, and a curve from each restored snapshot to its execution.

    Bars are newest first, snapshots oldest first. A running execution ends at `now_ms`.
    """
    if not bars:
        return Markup('<p class="muted">The stream was never started.</p>')
    first = min(bar.execution.started_at_ms for bar in bars)
    span = max(now_ms - first, 1)
    across = _WIDE - 2 * _LEFT
    height = _ROW * len(bars) + 24

    def x(at_ms: int) -> float:
        return round(_LEFT + across * min(max(at_ms - first, 0), span) / span, 1)

    rows = {bar.execution.execution_id: row for row, bar in enumerate(bars)}
    drawn = [
        _bar(bar, row * _ROW + 4, x(bar.execution.started_at_ms), x(bar.execution.ended_at_ms or now_ms))
        for row, bar in enumerate(bars)
    ]
    for each in thinned(
        # Savepoints cover checkpoints.
        [
            Point(one.completed_at_ms, _SAVEPOINT if one.kind is SnapshotKind.SAVEPOINT else 1.0, one)
            for one in taken
            if one.completed_at_ms >= first
        ]
    ):
        row = next((n for n, bar in enumerate(bars) if bar.execution.started_at_ms <= each.at_ms), None)
        if row is not None:
            y = row * _ROW + 4
            drawn.append(
                Markup(
                    '<line class="{kind}" x1="{x}" x2="{x}" y1="{y}" y2="{end}"><title>{title}</title></line>'
                ).format(
                    kind="mark savepoint" if each.value == _SAVEPOINT else "mark",
                    x=x(each.at_ms),
                    y=y,
                    end=y + _BAR,
                    title=_mark_title(each.of),
                )
            )
    for row, bar in enumerate(bars):
        source = bar.restored
        if source is None or source.completed_at_ms is None:
            continue
        begin, end = x(source.completed_at_ms), x(bar.execution.started_at_ms)
        origin = rows.get(source.execution_id or "", min(row + 1, len(bars) - 1)) * _ROW + 4
        drawn.append(
            Markup(
                '<path class="restore" d="M{x1},{y1} C{x1},{mid} {x2},{mid} {x2},{y2}"><title>{title}</title></path>'
            ).format(
                x1=begin,
                y1=origin,
                x2=end,
                y2=row * _ROW + 4 + _BAR,
                mid=(origin + row * _ROW + _BAR) / 2,
                title=f"restored from {describe_snapshot(source)}",
            )
        )
    return Markup(
        '<svg class="timeline" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{drawn}'
        '<text x="{left}" y="{foot}">{begin}</text><text x="{right}" y="{foot}" class="end">{now}</text></svg>'
    ).format(
        width=_WIDE,
        height=height,
        label=f"Time line of {len(bars)} executions; the table below has the same content",
        drawn=Markup("").join(drawn),
        left=_LEFT,
        right=_WIDE - _LEFT,
        foot=height - 4,
        begin=utc_time(first),
        now=utc_time(now_ms),
    )


def _bar(bar: TimelineBar, y: float, begin: float, end: float) -> Markup:
    execution = bar.execution
    until = "now" if execution.ended_at_ms is None else utc_time(execution.ended_at_ms)
    title = f"{execution.status.value}: {utc_time(execution.started_at_ms)} to {until}"
    return Markup(
        '<rect class="bar {kind}" x="{x}" y="{y}" width="{width}" height="{bar}"><title>{title}</title></rect>'
    ).format(
        kind=_bar_class(execution.status), x=begin, y=y, width=max(round(end - begin, 1), 2), bar=_BAR, title=title
    )


def _bar_class(status: ExecutionStatus) -> str:
    if not status.is_over:
        return "good"
    return "bad" if status in (ExecutionStatus.FAILED, ExecutionStatus.BROKEN) else "ended"


def _mark_title(each: SnapshotFigures) -> str:
    return f"{_named(each)}, {utc_time(each.completed_at_ms)}"


_BOX_WIDTH, _BOX_HEIGHT, _GAP_ACROSS, _GAP_DOWN, _NAME = 190, 48, 110, 22, 20


def graph_chart(graph: StreamConnections) -> Markup:
    """Each stream right of those that it reads, with the batches that it is behind on the line between."""
    columns = _columns(graph)
    boxes = {
        stream: (1 + across * (_BOX_WIDTH + _GAP_ACROSS), 1 + down * (_BOX_HEIGHT + _GAP_DOWN))
        for across, column in enumerate(columns)
        for down, stream in enumerate(column)
    }
    drawn = [_box(each.stream_id, each.status.value, each.batch_id, *boxes[each.stream_id]) for each in graph.streams]
    for each in graph.connections:
        (x, y), (to_x, to_y) = boxes[each.edge.upstream], boxes[each.edge.reader]
        x, y, to_y = x + _BOX_WIDTH, y + _BOX_HEIGHT // 2, to_y + _BOX_HEIGHT // 2
        behind = each.batches_behind
        is_bad = each.has_read_undone or behind is None
        drawn.append(
            Markup(
                '<path class="edge{bad}" d="M{x},{y} C{mid},{y} {mid},{to_y} {to_x},{to_y}"><title>{title}</title>'
                '</path><text x="{label_x}" y="{label_y}" class="end">{label}</text>'
            ).format(
                bad=" bad" if is_bad else "",
                x=x,
                y=y,
                mid=(x + to_x) // 2,
                to_x=to_x,
                to_y=to_y,
                title=str(each.edge),
                label_x=to_x - 8,
                label_y=to_y - 6,
                label="undone" if each.has_read_undone else "?" if behind is None else f"{behind:,} behind",
            )
        )
    # A small graph is not enlarged.
    width = max(len(columns) * (_BOX_WIDTH + _GAP_ACROSS) - _GAP_ACROSS + 2, 1000)
    return Markup(
        '<svg class="graph" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{drawn}</svg>'
    ).format(
        width=width,
        height=max(map(len, columns), default=0) * (_BOX_HEIGHT + _GAP_DOWN) + 2,
        label=f"Graph of {len(graph.streams)} streams; the table below has the same content",
        drawn=Markup("").join(drawn),
    )


def _columns(graph: StreamConnections) -> list[list[str]]:
    """The length of the longest way to each stream; streams that read each other in a circle end at the right."""
    column = {each.stream_id: 0 for each in graph.streams}
    for _ in column:
        for each in graph.connections:
            least = min(column[each.edge.upstream] + 1, len(column) - 1)
            column[each.edge.reader] = max(column[each.edge.reader], least)
    return [[stream for stream, at in column.items() if at == number] for number in sorted(set(column.values()))]


def _box(stream: str, status: str, batch: int | None, x: int, y: int) -> Markup:
    name = stream if len(stream) <= _NAME else f"{stream[: _NAME - 1]}…"
    return Markup(
        '<rect class="box" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"><title>{stream}</title></rect>'
        '<text x="{left}" y="{first}" class="name">{name}</text><text x="{left}" y="{second}">{what}</text>'
    ).format(
        x=x,
        y=y,
        width=_BOX_WIDTH,
        height=_BOX_HEIGHT,
        stream=stream,
        left=x + 10,
        first=y + 20,
        second=y + 38,
        name=name,
        what=f"{status.lower()}{f', batch {batch:,}' if batch is not None else ''}",
    )
