# ruff: noqa: E501
"""`docs/reliability.md`: what was tried, how often, and what did not hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, FileFault, LeaseFault
from tests.torture.trial import Outcome

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"

_HEAD = """# Reliability: what was broken, and what held

Written by `make torture`; a slice of it runs with `make test`.

Each operation below is done again and again, in a process of its own, and at each of its numbered calls something goes wrong: of the calls that change a
local disk (open, write, flush, rename, link, delete, ...), and of the transactions with the catalog (SQLite). All but the fault is real: catalog, storage, live
directories, sink logs. What Spark writes is written by hand as it does, so no JVM is started. After each fault, with the process that met it gone:

- the next plain start recovers without a person, at a right batch, in a live directory that is whole and has, byte for byte, what Spark wrote; it never starts empty;
- the log of the file sink is at the batch of the query, neither ahead nor behind;
- every listed checkpoint and savepoint passes verification with every byte, before and after housekeeping; a savepoint that was there still is;
- after housekeeping nothing is left half deleted;
- files of another stream in the same storage and live folder, and files beside them, are as they were;
- what failed said so by an error of this package;
- where the process was killed or its answer lost: the same operation, done once more, is fine, and all of this holds again.

"""
_TAIL = """
## Reproduce

```console
$ make torture                                  # all of it; rewrites this page
$ .venv/bin/python -m tests.torture --only 'fork' --fault POWER_SOME    # one operation, one fault
```

A number beside a point in a message is the call: `tests.torture.trial.torture('fork', FileFault.POWER_SOME, first=17, at_most=1)` does that one alone.

## Tried elsewhere

"""

_ELSEWHERE = {
    "tests/lifecycle/test_lease_lost_at_every_step.py": "the lease is lost at any catalog call or file step of any operation",
    "tests/storage/test_store_crashes.py": "kills and errors at each call of an object store",
    "tests/lifecycle/test_upgrade_crashes.py": "an upgrade, and its rollback, that die at each of their steps",
    "tests/fuzz": "crafted and damaged bytes for every reader (`make fuzz`)",
    "tests/soak": "random kills of real Spark queries, compared row for row (`make soak`)",
}


def written(outcomes: Sequence[Outcome], seconds: float, step: int) -> str:
    """The page.

    Args:
        outcomes: What came of each operation and fault.
        seconds: How long it took.
        step: Every so many calls were tried.
    """
    calls = (
        "every call" if step == 1 else f"every {step}th call, beginning with the first; `make torture` tries every one"
    )
    points = sum(outcome.points for outcome in outcomes)
    bad = [outcome for outcome in outcomes if outcome.violations]
    return (
        _HEAD
        + f"**{points:,} faults in {seconds / 60:.0f} minutes; {sum(len(each.violations) for each in bad)} violations.** Tried: {calls}.\n\n"
        + _table("File calls", outcomes, FileFault)
        + _table("Catalog calls", outcomes, CatalogFault)
        + _table("Requests to an object store", outcomes, ObjectFault)
        + _table("The lease", outcomes, LeaseFault)
        + _violated(bad)
        + _TAIL
        + _elsewhere()
    )


def _elsewhere() -> str:
    rows = [f"| {what} | `{path}` |" for path, what in _ELSEWHERE.items() if (PAGE.parents[1] / path).exists()]
    return "\n".join(["| what | where |", "|---|---|", *rows, ""])


def _table(
    title: str,
    outcomes: Sequence[Outcome],
    faults: type[FileFault] | type[CatalogFault] | type[ObjectFault] | type[LeaseFault],
) -> str:
    lines = [f"## {title}", "", "Points tried; violations, where there are any, after a slash.", ""]
    lines += [f"- {fault.name}: {fault.value}" for fault in faults]
    columns = " | ".join(fault.name for fault in faults)
    lines += ["", f"| operation | calls | {columns} |", "|---|---:|" + "---:|" * len(faults)]
    for name in dict.fromkeys(outcome.scenario for outcome in outcomes if isinstance(outcome.fault, faults)):
        of_fault = {outcome.fault: outcome for outcome in outcomes if outcome.scenario == name}
        cells = [_cell(of_fault.get(fault)) for fault in faults]
        calls = max((of_fault[fault].calls for fault in faults if fault in of_fault), default=0)
        lines.append(f"| {name} | {calls} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return f"{outcome.points} / **{len(outcome.violations)}**" if outcome.violations else str(outcome.points)


def _violated(bad: Sequence[Outcome]) -> str:
    if not bad:
        return ""
    lines = ["## What did not hold", ""]
    for outcome in bad:
        first = outcome.violations[0].replace("\n", " ")[:300]
        lines.append(f"- {outcome.scenario}, {outcome.fault.name}: {len(outcome.violations)}; the first: {first}")
    return "\n".join([*lines, ""])
