"""Charts as SVG text."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, repeat

from markupsafe import Markup, escape

from dagster_ckpt.client import (
    ExecutionRecord,
    ExecutionStatus,
    SnapshotFigures,
    SnapshotRecord,
    StreamConnections,
    describe_snapshot,
)
from dagster_ckpt.values.durations import headline, utc_time
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.redaction import without_secrets

_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 150, 8, 22
# More dots would overlap.
_MOST_POINTS = 200
_SAVEPOINT = 2.0
# Room for the name at an end of the axis.
_END_NAME = 170
_FAR_ABOVE = 4
_MINUTE_MS = 60_000
# Starts that continue where the previous execution stopped.
_GOES_ON = ("RESUME", "CLONE")


@dataclass(frozen=True)
class Point:
    at_ms: int
    value: float
    of: SnapshotFigures


def points(figures: Sequence[SnapshotFigures], name: str) -> list[Point]:
    values = ((each, getattr(each, name)) for each in figures)
    return [Point(each.completed_at_ms, float(value), each) for each, value in values if value is not None]


def thinned(values: Sequence[Point]) -> list[Point]:
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


_STEPS = tuple(
    seconds * 1000
    for seconds in (1, 5, 15, 30, 60, 300, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800)
)
_DAY_MS = 86_400_000


def ticks(first_ms: int, last_ms: int, *, most: int) -> list[tuple[int, str]]:
    """Round times between two others, with names: a time of day, or a date where they are days apart."""
    span_ms = last_ms - first_ms
    fitting = (step for step in _STEPS if span_ms // step <= most)
    step_ms = next(fitting, max(-(-span_ms // most // _DAY_MS), 1) * _DAY_MS)
    begin_ms = -(-first_ms // step_ms) * step_ms
    # Year and month, month and day, hour and minute, or with seconds.
    finest = ((30 * _DAY_MS, slice(0, 7)), (_DAY_MS, slice(5, 10)), (_MINUTE_MS, slice(11, 16)), (0, slice(11, 19)))
    name = next(part for least_ms, part in finest if step_ms >= least_ms)
    return [(at_ms, utc_time(at_ms)[name]) for at_ms in range(begin_ms, last_ms + 1, step_ms)]


def _time_axis(first_ms: int, last_ms: int, x: Callable[[int], float], *, top: float, base: float, most: int) -> Markup:
    """Draw ticks with names below; none is named near the two ends, which the caller names."""
    drawn = Markup("").join(
        Markup('<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{base}"/>').format(x=x(at_ms), top=top, base=base)
        for at_ms, _ in ticks(first_ms, last_ms, most=most)
    )
    clear = _END_NAME / (x(last_ms) - x(first_ms)) * (last_ms - first_ms) if last_ms > first_ms else 0
    return drawn + Markup("").join(
        Markup('<text class="tick" x="{x}" y="{y}">{name}</text>').format(x=x(at_ms), y=base + 14, name=name)
        for at_ms, name in ticks(first_ms, last_ms, most=most)
        if first_ms + clear < at_ms < last_ms - clear
    )


def _scale(values: Sequence[float]) -> float:
    """The top of an axis: the largest value, unless a few far above all others would flatten the rest."""
    ordered = sorted(values)
    usual = ordered[-1 - len(ordered) // 20]
    return (usual * 2 if ordered[-1] > usual * _FAR_ABOVE else ordered[-1]) or 1.0


def line_chart(
    title: str, values: Sequence[Point], text: Callable[[int], str], *, starts: Sequence[int] = ()
) -> Markup:
    """Draw a line over time, which starts at zero. `text` formats a value for the axis and the summary.

    The line is interrupted at the times `starts`: nothing was measured since the stop before.
    """
    if not values:
        return no_chart(title, "No data yet.")
    # The newest value is always shown.
    shown = [*thinned(values[:-1]), values[-1]]
    first, last = values[0].at_ms, values[-1].at_ms
    most = max(point.value for point in shown)
    top = _scale([point.value for point in shown])
    across, base = _WIDTH - 2 * _LEFT, _HEIGHT - 18

    def x(at_ms: int) -> float:
        return round(_LEFT + (across * (at_ms - first) / (last - first) if last > first else across / 2), 1)

    def place(point: Point) -> tuple[float, float]:
        return x(point.at_ms), round(_TOP + (base - _TOP) * (1 - min(point.value / top, 1)), 1)

    newest, highest = text(round(shown[-1].value)), text(round(most))
    inner = [at_ms for at_ms in sorted(starts) if first < at_ms <= last]
    summary = f"{title}: newest {newest}, highest {highest}, {len(values)} snapshots"
    # `Markup.format` would take half the page's time.
    dots = Markup("".join(map(_dot, shown, map(place, shown), repeat(text))))
    restarts = Markup("").join(
        Markup('<line class="start" x1="{x}" x2="{x}" y1="{top}" y2="{base}"><title>{title}</title></line>').format(
            x=x(at_ms), top=_TOP, base=base, title=f"start at {utc_time(at_ms)}"
        )
        for at_ms in inner
    )
    return Markup(
        '<figure class="chart"><figcaption>{title} <span class="muted">newest {newest}</span>'
        '<output class="muted" aria-hidden="true"></output></figcaption>'
        '<svg viewBox="0 0 {width} {height}" role="img" aria-label="{summary}">'
        '<line class="axis" x1="{left}" x2="{right}" y1="{base}" y2="{base}"/>{axis}'
        '<line class="grid" x1="{left}" x2="{right}" y1="{top}" y2="{top}"/>{restarts}'
        '<text x="{left}" y="{label}">{highest}</text>'
        '<text x="{left}" y="{foot}">{begin}</text><text x="{right}" y="{foot}" class="end">{end}</text>'
        '<path class="line" d="{path}"/><g class="dots">{dots}</g></svg></figure>'
    ).format(
        title=title,
        newest=newest,
        summary=summary,
        highest=highest if most <= top else f"{text(round(top))}, cut off; the highest is {highest}",
        width=_WIDTH,
        height=_HEIGHT,
        left=_LEFT,
        right=_WIDTH - _LEFT,
        base=base,
        top=_TOP,
        label=_TOP - 6,
        foot=_HEIGHT - 4,
        axis=_time_axis(first, last, x, top=_TOP, base=base, most=6),
        restarts=restarts,
        begin=utc_time(first),
        end=utc_time(last),
        path=_path(shown, inner, place),
        dots=dots,
    )


def no_chart(title: str, why: str) -> Markup:
    return Markup('<figure class="chart"><figcaption>{}</figcaption><p class="muted">{}</p></figure>').format(
        title, why
    )


def _path(shown: Sequence[Point], starts: Sequence[int], place: Callable[[Point], tuple[float, float]]) -> str:
    parts = []
    for _, points_of_one in groupby(shown, lambda point: bisect(starts, point.at_ms)):
        places = " ".join(f"{x},{y}" for x, y in map(place, points_of_one))
        parts.append(f"M{places}{'' if ' ' in places else ' h0'}")
    return " ".join(parts)


@dataclass(frozen=True)
class TimelineBar:
    execution: ExecutionRecord
    restored: SnapshotRecord | None


_WIDE, _ROW, _BAR, _ABOVE = 1200, 40, 10, 18
_SHORTEST = 6


def timeline_chart(bars: Sequence[TimelineBar], taken: Sequence[SnapshotFigures], *, now_ms: int) -> Markup:
    """Draw executions as bars, snapshots as marks below them, and a curve from each restored snapshot to its execution.

    A row holds an execution and those that continued in its live directory. Bars are newest first, snapshots oldest
    first.
    """
    if not bars:
        return Markup('<p class="muted">The stream was never started.</p>')
    first = min(bar.execution.started_at_ms for bar in bars)
    span = max(now_ms - first, 1)
    across = _WIDE - 2 * _LEFT
    rows = _rows(bars)
    base = _ROW * len(rows) + 4

    def x(at_ms: int) -> float:
        return round(_LEFT + across * min(max(at_ms - first, 0), span) / span, 1)

    tops = {bar.execution.execution_id: row * _ROW + _ABOVE for row, group in enumerate(rows) for bar in group}
    drawn = [_time_axis(first, now_ms, x, top=0, base=base, most=10)]
    for row, group in enumerate(rows):
        drawn.append(_label(group, row * _ROW + _ABOVE - 5, x(group[-1].execution.started_at_ms)))
        for bar in group:
            end_ms = bar.execution.ended_at_ms or now_ms
            drawn.append(_bar(bar, row * _ROW + _ABOVE, x(bar.execution.started_at_ms), x(end_ms)))
    for each in thinned(
        # Savepoints cover checkpoints.
        [
            Point(one.completed_at_ms, _SAVEPOINT if one.kind is SnapshotKind.SAVEPOINT else 1.0, one)
            for one in taken
            if one.completed_at_ms >= first
        ]
    ):
        of = next((bar.execution for bar in bars if bar.execution.started_at_ms <= each.at_ms), None)
        if of is not None:
            drawn.append(_mark(each, x(each.at_ms), tops[of.execution_id] + _BAR))
    for bar in bars:
        source, end = bar.restored, tops[bar.execution.execution_id] + _BAR
        if source is None or source.completed_at_ms is None:
            continue
        begin = tops.get(source.execution_id or "", min(end - _BAR + _ROW, base - _ROW + _ABOVE - 4)) + _BAR
        drawn.append(
            Markup(
                '<path class="restore" d="M{x1},{y1} C{x1},{mid} {x2},{mid} {x2},{y2}"><title>{title}</title></path>'
            ).format(
                x1=x(source.completed_at_ms),
                y1=begin,
                x2=x(bar.execution.started_at_ms),
                y2=end,
                mid=(begin + end) / 2 if begin != end else end + 14,
                title=f"restored from {describe_snapshot(source)}",
            )
        )
    return Markup(
        '<div class="wide"><svg class="timeline" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{drawn}'
        '<text x="{left}" y="{foot}">{begin}</text><text x="{right}" y="{foot}" class="end">{now}</text></svg></div>'
    ).format(
        width=_WIDE,
        height=base + 18,
        label=f"Time line of {len(bars)} executions; the table below has the same content",
        drawn=Markup("").join(drawn),
        left=_LEFT,
        right=_WIDE - _LEFT,
        foot=base + 14,
        begin=utc_time(first),
        now=utc_time(now_ms),
    )


def _rows(bars: Sequence[TimelineBar]) -> list[list[TimelineBar]]:
    rows: list[list[TimelineBar]] = []
    for bar in bars:
        if rows and (rows[-1][-1].execution.recovery or {}).get("kind") in _GOES_ON:
            rows[-1].append(bar)
        else:
            rows.append([bar])
    return rows


def _label(group: Sequence[TimelineBar], y: float, x: float) -> Markup:
    oldest = group[-1]
    begun = describe_snapshot(oldest.restored) if oldest.restored else oldest.execution.began_with
    failed = sum(_bar_class(bar.execution.status) == "bad" for bar in group)
    facts = [
        f"from {begun}" if begun else "",
        f"{len(group)} executions" if len(group) > 1 else "",
        f"{failed} failed" if failed and len(group) > 1 else oldest.execution.status.value.lower() if failed else "",
    ]
    is_left = x < _WIDE / 2
    return Markup('<text x="{x}" y="{y}"{anchor}>{text}</text>').format(
        x=x, y=y, anchor=Markup("") if is_left else Markup(' class="end"'), text=", ".join(filter(None, facts))
    )


def _mark(each: Point, x: float, y: float) -> Markup:
    title = escape(f"{_named(each.of)}, {utc_time(each.of.completed_at_ms)}")
    if each.value == _SAVEPOINT:
        return Markup(f'<circle class="mark savepoint" cx="{x}" cy="{y + 4}" r="4"><title>{title}</title></circle>')
    return Markup(f'<line class="mark" x1="{x}" x2="{x}" y1="{y + 1}" y2="{y + 6}"><title>{title}</title></line>')


def _bar(bar: TimelineBar, y: float, begin: float, end: float) -> Markup:
    execution = bar.execution
    until = "now" if execution.ended_at_ms is None else utc_time(execution.ended_at_ms)
    title = f"{execution.status.value}: {utc_time(execution.started_at_ms)} to {until}"
    if execution.reason and execution.status.is_over:
        title += f": {without_secrets(headline(execution.reason))}"
    width = max(round(end - begin, 1), 2)
    drawn = Markup('<rect class="bar" x="{x}" y="{y}" width="{width}" height="{bar}"/>').format(
        x=begin, y=y, width=width, bar=_BAR
    )
    tip = min(width, _SHORTEST)
    return Markup("<g><title>{title}</title>{life}{end}</g>").format(
        title=title,
        life=drawn,
        end=Markup('<rect class="bar {kind}" x="{x}" y="{y}" width="{width}" height="{bar}"/>').format(
            kind=_bar_class(execution.status), x=round(begin + width - tip, 1), y=y - 2, width=tip, bar=_BAR + 4
        ),
    )


def _bar_class(status: ExecutionStatus) -> str:
    if not status.is_over:
        return "good"
    return "bad" if status in (ExecutionStatus.FAILED, ExecutionStatus.BROKEN) else "ended"


_BOX_WIDTH, _BOX_HEIGHT, _GAP_ACROSS, _GAP_DOWN, _NAME = 190, 48, 110, 22, 20


def graph_chart(graph: StreamConnections) -> Markup:
    """Draw each stream right of those that it reads, with the batches that it is behind on the line between."""
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
    """Streams by the longest path to each; those that read each other in a circle end at the right."""
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
