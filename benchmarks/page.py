"""docs/evidence/performance.md, from the kept results of every section."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.machine import HARDWARE
from benchmarks.results import Bound, SectionResult, Table, Target

HEAD = """# Performance

`make bench` writes this page from `benchmarks/measured`, where each section keeps what it found last. A section
measures `dagster_ckpt` and its peers in turn, so the ratios hold on another machine although the seconds differ.
`x ours` is how many times longer a peer took: the median of the ratios within one repetition, and the ratio of
the minima. CPU s is the user and system time of the measured call, or of the peer's process tree.
"""
# From this number of targets of one kind on, one row shows them all: the section has the figures.
_MANY = 4


def render(results: Sequence[SectionResult], missing: Sequence[str]) -> str:
    """The page.

    Args:
        results: What the sections found, in their order.
        missing: Names of sections without a result.
    """
    parts = [HEAD, _summary(results), _machines(results)]
    if missing:
        parts.append(f"Not measured yet: {', '.join(missing)}.\n")
    parts += [_section(result) for result in results]
    return "\n".join(parts)


def table_lines(table: Table) -> str:
    """A table in Markdown."""
    rule = ("---", *("---:" for _ in table.headings[1:]))
    rows = (table.headings, rule, *table.rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def target_table(targets: Sequence[Target]) -> Table:
    """Targets as a table."""
    return Table(
        title="Targets",
        headings=("target", "wanted", "measured", ""),
        rows=tuple((target.what, _wanted(target), _measured(target), _verdict(target)) for target in targets),
    )


def _summary(results: Sequence[SectionResult]) -> str:
    targets = [target for result in results for target in result.targets]
    met = sum(target.met is True for target in targets)
    return f"## Targets\n\n{met} of {len(targets)} are met.\n\n{table_lines(target_table(_grouped(targets)))}\n"


def _grouped(targets: Sequence[Target]) -> list[Target]:
    """Many upper limits that are the same for calls of one kind as one: the slowest call."""
    groups: dict[tuple[object, ...], list[Target]] = {}
    for target in targets:
        kind, colon, _ = target.what.partition(": ")
        limit = (target.bound, target.limit, target.unit)
        is_of_a_kind = bool(colon) and target.bound is Bound.AT_MOST and target.measured is not None
        groups.setdefault((kind, *limit) if is_of_a_kind else (target.what, *limit, len(groups)), []).append(target)
    return [row for group in groups.values() for row in ([_slowest(group)] if len(group) >= _MANY else group)]


def _slowest(group: Sequence[Target]) -> Target:
    slowest = max(group, key=lambda target: target.measured or 0)
    kind, _, call = slowest.what.partition(": ")
    return slowest.model_copy(update={"what": f"{kind}: slowest of {len(group)} calls ({call})"})


def _machines(results: Sequence[SectionResult]) -> str:
    sections: dict[str, list[str]] = {}
    for result in results:
        parts = (value if name in HARDWARE else f"{name} {value}" for name, value in result.machine.items())
        sections.setdefault(", ".join(parts), []).append(f"`{result.name}`")
    lines = [f"- On {machine}. Sections: {', '.join(names)}." for machine, names in sections.items()]
    return "\n".join(["## Machines", "", *lines, ""])


def _section(result: SectionResult) -> str:
    versions = ", ".join(f"{name}: {version}" for name, version in result.versions.items())
    lines = [
        f"## {result.title}",
        "",
        result.method,
        "",
        f"`make bench ONLY={result.name}`, {result.measured_at}, {result.took_s:.0f} s, load "
        f"{result.load[0]:.1f} to {result.load[1]:.1f}. {versions}".rstrip(),
        "",
    ]
    for table in result.tables:
        lines += [f"### {table.title}", "", table_lines(table), ""]
        if table.note:
            lines += [table.note, ""]
    return "\n".join(lines)


def _wanted(target: Target) -> str:
    return f"{target.bound.value} {target.limit:g}{_unit(target)}"


def _measured(target: Target) -> str:
    if target.measured is None:
        return f"not measured: {target.reason}"
    digits = 0 if target.measured >= 100 or float(target.measured).is_integer() else 2
    return f"{target.measured:.{digits}f}{_unit(target)}"


def _verdict(target: Target) -> str:
    return {True: "met", False: "**not met**", None: ""}[target.met]


def _unit(target: Target) -> str:
    return f" {target.unit}" if target.unit else ""
