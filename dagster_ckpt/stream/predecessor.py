"""The code that a stream ran before the present one, to which a rollback goes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, SnapshotRecord

# Keys of a recorded launch: that it has secrets, which are not recorded, and the launch that a rollback replaced.
HIDES_SECRETS, INSTEAD_OF = "hides_secrets", "instead_of"


@dataclass(frozen=True)
class Predecessor:
    """The code that ran before the present one.

    Attributes:
        execution: The one that recorded the newest launch, or else the last one.
        cannot: Why its launch cannot be repeated, or None.
    """

    execution: ExecutionRecord
    snapshot: SnapshotRecord | None
    cannot: str | None

    def describe(self) -> str:
        execution = self.execution
        facts = [f"{name} {value}" for name, value in execution.program.items()]
        words = execution.launch.get("command") or execution.launch.get("request")
        facts += [f"launched by {' '.join(words) if isinstance(words, list) else words}"] if words else []
        described = f" ({', '.join(facts)})" if facts else ""
        return f"code version {execution.code_version}{described}"


def predecessor(catalog: Catalog, stream_id: str) -> Predecessor | None:
    """The code before the present one; None if only one is recorded.

    Code that a rollback has replaced is left out, so that a repeated rollback does not lead back to it.
    """
    executions = catalog.executions.of_stream(stream_id)
    runs = _runs(executions)
    if not runs:
        return None
    present = runs[0]
    replaced = present.execution.launch.get(INSTEAD_OF)
    found = next((n for n, run in enumerate(runs) if not run.is_same(present) and run.launch != replaced), None)
    if found is None:
        return None
    ids = {each.execution_id for each in executions[executions.index(runs[found].executions[0]) :]}
    snapshot = next((each for each in catalog.snapshots.restorable(stream_id) if each.execution_id in ids), None)
    return Predecessor(runs[found].execution, snapshot, _why_unlike(runs[found], present))


@dataclass(frozen=True)
class _DriverRun:
    """The executions of one driver, newest first, with its restarts in place."""

    executions: tuple[ExecutionRecord, ...]

    @property
    def execution(self) -> ExecutionRecord:
        return next((each for each in self.executions if each.launch), self.executions[0])

    @property
    def launch(self) -> dict[str, Any]:
        return {name: value for name, value in self.execution.launch.items() if name != INSTEAD_OF}

    def is_same(self, other: _DriverRun) -> bool:
        """Whether both ran the same code; what was not recorded makes no difference."""
        versions = self.execution.code_version, other.execution.code_version
        facts = ((self.execution.program, other.execution.program), (self.launch, other.launch))
        return versions[0] == versions[1] and all(one == two or not one or not two for one, two in facts)


def _runs(executions: Sequence[ExecutionRecord]) -> list[_DriverRun]:
    ran = [each for each in executions if each.recovery]
    return [_DriverRun(tuple(of_run)) for _, of_run in groupby(ran, key=lambda each: each.run_id)]


def _why_unlike(old: _DriverRun, present: _DriverRun) -> str | None:
    if not old.launch:
        return "how it was launched was not recorded"
    if old.launch.get(HIDES_SECRETS):
        return "its launch contains secrets, which are not recorded"
    if old.launch == present.launch:
        return "the present code was launched in the same way"
    return None
