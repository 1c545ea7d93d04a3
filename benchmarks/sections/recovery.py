"""How long a stream is away after a kill, beside a job of Flink."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.bench import Bench, Findings, Section
from benchmarks.killing import Memory, Phase, RunningStream, Victim, dagster_with_streams
from benchmarks.packages import PeerMissingError, environment
from benchmarks.recovering_streams import KEYS, ON_EXECUTORS, PLAIN, WITH_ARCHIVE, WITH_STANDBY
from benchmarks.results import Table, at_most, megabytes, seconds
from benchmarks.sections.flink import FLINK

# Runs with Flink's Python, which has none of our packages.
FLINK_RECOVERY = "benchmarks.flink_recovery"
ROOT = Path(__file__).parents[2]
TIMES = 10
CASES = (
    (PLAIN, Victim.DRIVER),
    (WITH_STANDBY, Victim.DRIVER),
    (PLAIN, Victim.JVM),
    (WITH_STANDBY, Victim.JVM),
    (PLAIN, Victim.RUN),
    (WITH_ARCHIVE, Victim.DRIVER),
    (WITH_ARCHIVE, Victim.JVM),
    (WITH_ARCHIVE, Victim.RUN),
    (ON_EXECUTORS, Victim.EXECUTOR),
)
Recoveries = dict[tuple[str, Victim], list[dict[Phase, float]]]


def _measure(bench: Bench) -> Findings:
    times = max(1, round(TIMES * bench.share))
    recoveries: Recoveries = {}
    memory: dict[str, Memory] = {}
    with dagster_with_streams(bench.repetition(0)) as streams:
        # One after the other: beside each other they would slow down each other's starts.
        for name in dict.fromkeys(name for name, _ in CASES):
            stream = streams(name)
            stream.start()
            for victim in [victim for of, victim in CASES if of == name]:
                recoveries[name, victim] = [_killed(stream, victim, memory) for _ in range(times)]
            stream.stop()
    flink: dict[str, list[float]] = {}
    reason = ""
    try:
        flink = _flink(bench, times)
    except (PeerMissingError, RuntimeError) as error:
        reason = str(error)
    return findings(recoveries, memory, flink, reason)


def _killed(stream: RunningStream, victim: Victim, memory: dict[str, Memory]) -> dict[Phase, float]:
    stream.await_checkpoint()
    if stream.name == WITH_STANDBY:
        memory["spare"] = stream.memory(stream.await_spare())
        memory["driver"] = stream.memory(stream.driver)
    return stream.kill(victim)


def _flink(bench: Bench, times: int) -> dict[str, list[float]]:
    """Let Flink's program kill its parts.

    Raises:
        PeerMissingError: It could not be installed.
        RuntimeError: It failed.
    """
    python = environment(bench.folder, FLINK) / "python"
    folder = bench.scratch / "flink"
    folder.mkdir()
    command = [str(python.absolute()), "-m", FLINK_RECOVERY, str(folder.absolute()), str(times)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"Flink's job failed: {done.stderr.strip().splitlines()[-1:]}")
    measured: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return measured


def findings(
    recoveries: Recoveries, memory: Mapping[str, Memory], flink: Mapping[str, Sequence[float]], reason: str
) -> Findings:
    """Tables and targets; `reason` says why there is nothing of Flink."""
    times = len(next(iter(recoveries.values())))
    ours = Table(
        title=f"Seconds from SIGKILL to the end of each phase (median of {times})",
        headings=("killed", *(phase.value for phase in Phase), "slowest first batch"),
        rows=tuple(
            (_case(name, victim), *(_median(taken, phase) for phase in Phase), _slowest(taken))
            for (name, victim), taken in recoveries.items()
        ),
        note="A phase without a figure does not occur, or its record was replaced before the bench had read it.",
    )
    theirs = Table(
        title="Flink: seconds from SIGKILL until every task runs again",
        headings=("killed", "median", "min", "max"),
        rows=tuple(
            (name, seconds(statistics.median(taken)), seconds(min(taken)), seconds(max(taken)))
            for name, taken in flink.items()
        ),
        note=f"Not measured: {reason}" if reason else "The loss of a TaskManager is noticed by heartbeats that fail.",
    )
    costs = Table(
        title="Memory of a spare process, MB",
        headings=("", "Python resident", "Python, shared pages in part", "JVM resident"),
        rows=tuple(
            (name, megabytes(each.python), megabytes(each.python_share), megabytes(each.jvm))
            for name, each in memory.items()
        ),
    )
    limits = {
        (PLAIN, Victim.DRIVER): 12,
        (WITH_STANDBY, Victim.DRIVER): 5,
        (PLAIN, Victim.JVM): 10,
        (WITH_ARCHIVE, Victim.JVM): 10,
        (PLAIN, Victim.RUN): 25,
    }
    targets = tuple(
        at_most(
            f"{_case(*case)} killed, until its query runs",
            limit,
            statistics.median(each[Phase.RUNNING] for each in recoveries[case]),
            unit="s",
        )
        for case, limit in limits.items()
    )
    return Findings((ours, theirs, costs), targets, {"Flink": FLINK.rpartition("=")[2]})


def _case(name: str, victim: Victim) -> str:
    return victim.value + {WITH_STANDBY: ", with standby", WITH_ARCHIVE: ", with an archive of classes"}.get(name, "")


def _median(taken: Sequence[Mapping[Phase, float]], phase: Phase) -> str:
    found = [each[phase] for each in taken if phase in each]
    return f"{statistics.median(found):.1f}" if found else ""


def _slowest(taken: Sequence[Mapping[Phase, float]]) -> str:
    return f"{max(each[Phase.FIRST_BATCH] for each in taken):.1f}"


RECOVERY = Section(
    name="recovery",
    title="Recovery after a kill",
    method=(
        f"A stream that counts a thousand rows a second by {KEYS:,} keys (RocksDB, a batch each half second, a "
        "checkpoint every 5 s, restarts without a delay, local[2]) runs below a `dagster dev`. Its parts are killed "
        "one after another, each time after a checkpoint, and with standby once the spare process is ready. The "
        "archive is one that the command `class-archive` wrote. The stream whose executor is killed has two, with a "
        "core each (`local-cluster`); its query runs on, and the first batch is one that was planned after the kill. "
        "The moments are those of Dagster's run log, of the catalog and of Spark's commits. Flink is a standalone "
        "cluster (JobManager, TaskManagers) on the same machine, with a job of the same size: a Python function, "
        "RocksDB, checkpoints every 5 s, restarts without a delay, heartbeats as they are by default. `--share 0.2` "
        "kills twice instead of ten times."
    ),
    measure=_measure,
)
