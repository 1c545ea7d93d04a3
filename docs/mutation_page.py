"""Writes docs/evidence/mutation-testing.md from what mutmut has found; `make mutants` runs both.

mutation_survivors.yaml gives the reason why a survivor is acceptable, by function and changed line, because mutmut's
numbers change with the code. A survivor without a reason makes the program exit with status 1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import yaml

DOCS = Path(__file__).parent
PAGE = DOCS / "evidence/mutation-testing.md"
REASONS = DOCS / "mutation_survivors.yaml"
MUTMUT = Path(sys.executable).with_name("mutmut")
# A mutant that never ends is noticed as well.
NOTICED = {"killed", "timeout", "suspicious", "segfault", "caught by type check"}
# x_function or xǁClassǁmethod.
_NAME = re.compile(r"dagster_ckpt\.(?P<module>[\w.]+)\.x[_ǁ](?P<function>\w+?)__mutmut_\d+")

HEAD = """# Mutation testing

<!-- Written by docs/mutation_page.py from the results of mutmut and from docs/mutation_survivors.yaml. -->
<!-- pyml disable no-reversed-links-->

`make mutants` changes one thing at a time in the modules that carry [Flink's rules](../flink-rules.md)
(a comparison, a number, an argument, a word), runs the tests that reach it, and counts the changes
that no test notices. [mutmut](https://mutmut.readthedocs.io) makes the mutants, inside functions
without a decorator. Tables outside functions (which reasons count, what is kept at which end) are
compared whole, by `test_exactly_the_listed_reasons_count_against_a_checkpoint` and
`test_what_is_kept_at_the_end_follows_the_policy`. Only tests without a JVM and a server take part, so
what only a test with a real query would notice counts as a survivor.
"""


@dataclass(frozen=True)
class Mutant:
    """One change, and what became of it.

    Attributes:
        name: As mutmut names it.
        status: In mutmut's words.
    """

    name: str
    status: str

    @property
    def module(self) -> str:
        """The module within dagster_ckpt."""
        return self._parts()["module"]

    @property
    def function(self) -> str:
        """The function or method, with the name of its class."""
        return self._parts()["function"].replace("ǁ", ".")

    def change(self) -> str:
        """The changed line, or the deleted one."""
        shown = subprocess.run([MUTMUT, "show", self.name], capture_output=True, text=True, check=True).stdout
        lines = [line for line in shown.splitlines() if re.match(r"[-+](?![-+])", line)]
        added = [line[1:].strip() for line in lines if line.startswith("+") and line[1:].strip(" )")]
        return " ".join(added) or "without: " + " ".join(line[1:].strip() for line in lines)

    def _parts(self) -> re.Match[str]:
        match = _NAME.fullmatch(self.name)
        if match is None:
            raise ValueError(f"mutmut names a mutant {self.name!r}, which this page cannot place.")
        return match


def mutants() -> list[Mutant]:
    """Every mutant of the last run."""
    told = subprocess.run([MUTMUT, "results", "--all", "true"], capture_output=True, text=True, check=True).stdout
    lines = (line.strip().rpartition(": ") for line in told.splitlines() if "__mutmut_" in line)
    return [Mutant(name, status) for name, _, status in lines]


def reason_of(function: str, change: str, reasons: Iterable[dict[str, str]]) -> str | None:
    """Why a survivor is none to worry about."""
    return next((str(r["reason"]) for r in reasons if r["function"] == function and r["change"] in change), None)


def _each(cells: Iterable[str]) -> str:
    return "<br>".join(dict.fromkeys(cells))


def main() -> int:
    """Write the page, print the score."""
    found = mutants()
    reasons = yaml.safe_load(REASONS.read_text(encoding="utf-8"))
    tried = [mutant for mutant in found if mutant.status != "not checked"]
    total = Counter(mutant.module for mutant in tried)
    noticed = Counter(mutant.module for mutant in tried if mutant.status in NOTICED)
    left = Counter(mutant.module for mutant in found if mutant.status == "not checked")
    score = ["| module | mutants tried | noticed | score |", "|---|---|---|---|"]
    for module in sorted(total):
        path = "dagster_ckpt/" + module.replace(".", "/") + ".py"
        share = f"{noticed[module] / total[module]:.1%}"
        tries = f"{total[module]}" + (f" ({left[module]} not yet)" if left[module] else "")
        score.append(f"| `{path}` | {tries} | {noticed[module]} | {share} |")
    every = f"| all | {total.total()} | {noticed.total()} | {noticed.total() / total.total():.1%} |"
    survivors: dict[str, tuple[list[str], list[str]]] = {}
    unexplained = []
    for mutant in tried:
        if mutant.status in NOTICED:
            continue
        change = mutant.change()
        reason = reason_of(mutant.function, change, reasons)
        if reason is None:
            unexplained.append(f"{mutant.name} ({mutant.status}): {change}")
        # Of a deleted case the first line says which.
        shown = change if not change.startswith("without: ") else change.partition(" #")[0]
        cell = shown.replace("|", "\\|")
        why = (reason or "not explained yet").removeprefix("no difference; ")
        functions, changes = survivors.setdefault(why, ([], []))
        functions.append(f"`{mutant.function}`")
        changes.append(f"`{cell}`")
    rows = ["| function | change | why it makes no difference |", "|---|---|---|"]
    rows += [f"| {_each(functions)} | {_each(changes)} | {why} |" for why, (functions, changes) in survivors.items()]
    text = [HEAD, "## Score", "", *score, every, "", "## Survivors", "", *rows, ""]
    PAGE.write_text("\n".join(text), encoding="utf-8")
    print("\n".join([*score, every, *(f"not explained: {line}" for line in unexplained)]))
    if len(tried) < len(found):
        print(f"{len(found) - len(tried)} mutants were not tried: run mutmut to its end.")
    return int(bool(unexplained) or len(tried) < len(found))


if __name__ == "__main__":
    sys.exit(main())
