"""How far the memory of a process grows that takes snapshots: `python -m benchmarks.driver_memory FOLDER SST_BYTES`.

The result is one line of JSON. The kernel keeps the peak of the resident memory, and forgets it when told to.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.engine import Engine
from benchmarks.synthetic import write_batches
from dagster_ckpt.spark.checkpoint_dir.restore import DonorCheck

PARTITIONS = 1000
BATCHES = 100
CHANGELOG_BYTES = 2000
FORGET_THE_PEAK = "5"


@dataclass(frozen=True)
class Step:
    """One thing the process did.

    Attributes:
        what: What.
        files: Files in the snapshot.
        grown_bytes: Peak of the resident memory above what it was before.
        kept_bytes: What of that is still resident afterwards.
        wall_s: How long it took.
    """

    what: str
    files: int
    grown_bytes: int
    kept_bytes: int
    wall_s: float


def main(folder: Path, sst_bytes: int) -> list[Step]:
    """Take a first, an incremental and an unchanged snapshot, and restore one.

    Args:
        folder: An empty folder.
        sst_bytes: Bytes of each partition's SST.
    """
    _warm_up(folder / "small")
    engine = Engine(folder / "stream", f"file://{folder}/snapshots")
    shape = {"partitions": PARTITIONS, "changelog_bytes": CHANGELOG_BYTES, "sst_bytes": sst_bytes}
    write_batches(engine.live, first=0, last=BATCHES - 2, **shape)
    locations: list[str] = []
    counts: list[int] = []

    def snapshot() -> None:
        stored = engine.checkpoint(locations[-1] if locations else None)
        locations.append(stored.location)
        counts.append(stored.file_count)

    steps = [_observed("first snapshot", snapshot, counts)]
    write_batches(engine.live, first=BATCHES - 1, last=BATCHES - 1, **shape)
    steps.append(_observed("snapshot after one more batch", snapshot, counts))
    steps.append(_observed("snapshot, nothing changed", snapshot, counts))
    steps.append(_observed("restore", lambda: engine.restore(locations[-1], "live-2", DonorCheck.DIGEST), counts))
    return steps


def _warm_up(folder: Path) -> None:
    """Load everything once: what the code itself needs is not what a snapshot needs."""
    engine = Engine(folder / "stream", f"file://{folder}/snapshots")
    write_batches(engine.live, partitions=4, first=0, last=3, changelog_bytes=CHANGELOG_BYTES, sst_bytes=100_000)
    location = engine.checkpoint().location
    engine.restore(engine.checkpoint(location).location, "live-2", DonorCheck.DIGEST)


def _observed(what: str, work: Callable[[], object], counts: list[int]) -> Step:
    gc.collect()
    Path("/proc/self/clear_refs").write_text(FORGET_THE_PEAK)
    before, began = _resident("VmRSS"), time.perf_counter()
    work()
    wall, peak = time.perf_counter() - began, _resident("VmHWM")
    gc.collect()
    return Step(what, counts[-1], peak - before, _resident("VmRSS") - before, wall)


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status does not say {name}.")


if __name__ == "__main__":
    print(json.dumps([asdict(step) for step in main(Path(sys.argv[1]), int(sys.argv[2]))]))
