"""How drivers were launched, so that a rollback can launch the code from before.

The run that launches a driver notes command or request with the execution that the driver begins. Secrets are not kept:
such a launch is shown, and not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import LAUNCH_OF, ExecutionRecord, RequestRecord, SnapshotRecord
from dagster_ckpt.client.launching import DriverLaunch
from dagster_ckpt.client.platforms import PlatformLaunch
from dagster_ckpt.errors import RequestFailedError
from dagster_ckpt.values.redaction import shown_command, shown_settings, without_secrets

# What is recorded, by class; the rest, such as a platform's client, is that of the loaded code.
_FIELDS = {"command": DriverLaunch, "request": PlatformLaunch}
_HIDES, _INSTEAD_OF = "hides_secrets", "instead_of"


def record_of(launch: DriverLaunch | PlatformLaunch) -> dict[str, Any]:
    if isinstance(launch, DriverLaunch):
        kept: dict[str, Any] = {"command": list(launch.command), "environment": dict(launch.environment)}
    else:
        kept = {"request": _plain(launch.request)}
    shown = _shown(kept)
    return kept if shown == kept else {**shown, _HIDES: True}


def launch_to_use(
    catalog: Catalog, stream_id: str, launch: DriverLaunch | PlatformLaunch, request: RequestRecord | None
) -> tuple[DriverLaunch | PlatformLaunch, dict[str, Any]]:
    """The launch of a start, and its record: that of the loaded code, unless that was rolled back.

    Raises:
        RequestFailedError: The launch that a rollback names cannot be repeated.
    """
    loaded = record_of(launch)
    named = request.arguments.get(LAUNCH_OF) if request is not None else None
    if named is not None:
        recorded = catalog.executions.get(named).launch
    else:
        # Not of the latest one: it may be a restart in place, or have failed before its query ran.
        recorded = next((each.launch for each in catalog.executions.of_stream(stream_id) if each.launch), {})
        is_rolled_back = recorded.get(_INSTEAD_OF) == loaded
        if not is_rolled_back:
            return launch, loaded
    kept = {name: value for name, value in recorded.items() if name != _INSTEAD_OF}
    why = _why_not_again(kept, launch)
    if why is not None:
        raise RequestFailedError(f"The previous driver of stream {stream_id!r} is not launched again: {why}.")
    return replace(launch, **kept), ({**kept, _INSTEAD_OF: loaded} if kept != loaded else loaded)


@dataclass(frozen=True)
class Predecessor:
    """The code that ran before the present one.

    Attributes:
        execution: That with which its newest launch was recorded, or else its last one.
        snapshot: The newest one from before the present code, if any is left.
        cannot: Why its launch cannot be repeated, or None.
    """

    execution: ExecutionRecord
    snapshot: SnapshotRecord | None
    cannot: str | None

    def describe(self) -> str:
        """Which code to deploy."""
        execution = self.execution
        facts = [f"{name} {value}" for name, value in execution.program.items()]
        words = execution.launch.get("command") or execution.launch.get("request")
        facts += [f"launched by {' '.join(words) if isinstance(words, list) else words}"] if words else []
        described = f" ({', '.join(facts)})" if facts else ""
        return f"code version {execution.code_version}{described}"


def predecessor(catalog: Catalog, stream_id: str) -> Predecessor | None:
    """The code before the present one; None if the stream has only run one code, as far as was recorded.

    Code that a rollback has replaced is left out, so that a repeated rollback does not lead back to it.
    """
    executions = catalog.executions.of_stream(stream_id)
    runs = _runs(executions)
    if not runs:
        return None
    present = runs[0]
    replaced = present.execution.launch.get(_INSTEAD_OF)
    found = next((n for n, run in enumerate(runs) if not run.is_same(present) and run.launch != replaced), None)
    if found is None:
        return None
    ids = {each.execution_id for each in executions[executions.index(runs[found].executions[0]) :]}
    snapshot = next((each for each in catalog.snapshots.restorable(stream_id) if each.execution_id in ids), None)
    return Predecessor(runs[found].execution, snapshot, _why_unlike(runs[found], present))


@dataclass(frozen=True)
class _DriverRun:
    """The executions of one driver, newest first: its first one, and restarts in place."""

    executions: tuple[ExecutionRecord, ...]

    @property
    def execution(self) -> ExecutionRecord:
        """The one with which the launch was recorded."""
        return next((each for each in self.executions if each.launch), self.executions[0])

    @property
    def launch(self) -> dict[str, Any]:
        return {name: value for name, value in self.execution.launch.items() if name != _INSTEAD_OF}

    def is_same(self, other: _DriverRun) -> bool:
        """Whether both ran the same code; what was not recorded makes no difference."""
        versions = self.execution.code_version, other.execution.code_version
        facts = ((self.execution.program, other.execution.program), (self.launch, other.launch))
        return versions[0] == versions[1] and all(one == two or not one or not two for one, two in facts)


def _runs(executions: Sequence[ExecutionRecord]) -> list[_DriverRun]:
    """Of drivers whose query ran, newest first."""
    ran = [each for each in executions if each.recovery]
    return [_DriverRun(tuple(of_run)) for _, of_run in groupby(ran, key=lambda each: each.run_id)]


def _why_unlike(old: _DriverRun, present: _DriverRun) -> str | None:
    if not old.launch:
        return "how it was launched was not recorded"
    if old.launch.get(_HIDES):
        return "its launch contains secrets, which are not recorded"
    if old.launch == present.launch:
        return "the present code was launched in the same way"
    return None


def _why_not_again(kept: Mapping[str, Any], launch: DriverLaunch | PlatformLaunch) -> str | None:
    if not kept:
        return "how it was launched was not recorded"
    if kept.get(_HIDES):
        return "its launch contains secrets, which are not recorded"
    kind = next((kind for name, kind in _FIELDS.items() if name in kept), None)
    if kind is None or not isinstance(launch, kind):
        return f"the loaded code launches drivers by {type(launch).__name__}"
    return None


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _shown(each) for name, each in shown_settings(value).items()}
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return shown_command(value)
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return without_secrets(value) if isinstance(value, str) else value
