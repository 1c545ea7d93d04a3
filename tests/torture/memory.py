"""What earlier runs of `make torture` have tried, so that the next one goes on where time was up.

It is kept in `.torture/outcomes.json` and holds for the package and the torture as they were: after a change of either,
everything is tried again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.torture.bucket import ObjectFault
from tests.torture.faults import CatalogFault, Fault, FileFault, LeaseFault
from tests.torture.trial import Outcome

_ROOT = Path(__file__).parents[2]
_FILE = _ROOT / ".torture" / "outcomes.json"
_FAULTS: dict[str, type[FileFault] | type[CatalogFault] | type[ObjectFault] | type[LeaseFault]] = {
    each.__name__: each for each in (FileFault, CatalogFault, ObjectFault, LeaseFault)
}


@dataclass(frozen=True)
class Memory:
    """Of the runs that went on from each other.

    Attributes:
        outcomes: Pairs of an operation and a fault that were tried whole.
        seconds: How long the runs took together.
        runs: How many they were.
    """

    outcomes: Sequence[Outcome] = ()
    seconds: float = 0.0
    runs: int = 0


def recalled(file: Path = _FILE) -> Memory:
    """What may be relied on; nothing if the code has changed."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Memory()
    if told["code"] != digest_of_the_code():
        return Memory()
    outcomes = [
        Outcome(each["scenario"], _fault(each), each["calls"], each["points"], each["violations"])
        for each in told["outcomes"]
    ]
    return Memory(outcomes, told["seconds"], told["runs"])


def remember(memory: Memory, file: Path = _FILE) -> None:
    """Keep it for the next run."""
    outcomes = [
        {
            "scenario": each.scenario,
            "kind": type(each.fault).__name__,
            "fault": each.fault.name,
            "calls": each.calls,
            "points": each.points,
            "violations": each.violations,
        }
        for each in memory.outcomes
    ]
    told = {
        "code": digest_of_the_code(),
        "seconds": memory.seconds,
        "runs": memory.runs,
        "outcomes": outcomes,
    }
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(told), encoding="utf-8")


def digest_of_the_code(root: Path = _ROOT) -> str:
    """Of every module that a run executes."""
    digest = hashlib.sha256()
    for folder in ("dagster_ckpt", "tests/torture", "tests/support"):
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _fault(told: dict[str, str]) -> Fault:
    return _FAULTS[told["kind"]][told["fault"]]
