"""Live directories of real queries, and ways to damage copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from spark_scenarios import (
    HEAP,
    ROCKSDB,
    ROCKSDB_CHANGELOG,
    ROCKSDB_JOIN_V3,
    ROCKSDB_V2,
    ROCKSDB_V2_NO_CHANGELOG,
    Workload,
    aggregation,
    join,
    run_to_the_end,
    stateless,
    write_input,
)

from dagster_ckpt.config.state_backend import StateBackend
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from tests.support.needs import OfEach, runs_here

BATCHES = 6
QUERIES: dict[str, tuple[Callable[[DataFrame, DataFrame], DataFrame], StateBackend]] = {
    "stateless": (stateless, HEAP),
    "heap": (aggregation, HEAP),
    "rocksdb": (aggregation, ROCKSDB),
    "changelog": (aggregation, ROCKSDB_CHANGELOG),
    "format-v2": (aggregation, ROCKSDB_V2),
    "join": (join, HEAP),
    "join-v3": (join, ROCKSDB_JOIN_V3),
}

FIRST = {"changelog": ROCKSDB, "format-v2": ROCKSDB_V2_NO_CHANGELOG}


@dataclass(frozen=True)
class Patient:
    """One live directory, or a copy of it with a copy of its sink's log."""

    root: Path
    sink: Path

    @property
    def live(self) -> LiveDirectory:
        return LiveDirectory(str(self.root))

    @property
    def sinks(self) -> tuple[str, ...]:
        return (f"FileSink[file:{self.sink}]",)

    @property
    def newest(self) -> int:
        commit = self.live.positions().commit
        assert commit is not None
        return commit

    def copy(self, target: Path) -> Patient:
        shutil.copytree(self.root, target / "live")
        shutil.copytree(self.sink / "_spark_metadata", target / "output" / "_spark_metadata")
        for entry in (target / "output" / "_spark_metadata").iterdir():
            if entry.name.startswith("."):
                entry.unlink()
            else:
                entry.write_text(entry.read_text().replace(f"{self.sink}/", f"{target / 'output'}/"))
        return Patient(target / "live", target / "output")

    def one(self, pattern: str) -> Path:
        """The first of the files that fit, `{N}`, `{V}` and so on put in."""
        n = self.newest
        names = pattern.format(N=n, N1=n - 1, N2=n - 2, V=n + 1)
        return sorted(path for path in self.root.glob(names) if not path.name.startswith("."))[0]

    def remove(self, pattern: str) -> None:
        path = self.one(pattern)
        path.unlink()
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def write(self, pattern: str, data: bytes) -> None:
        path = self.one(pattern)
        path.write_bytes(data)
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def truncate(self, pattern: str, keep: float = 0.5) -> None:
        path = self.one(pattern)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * keep)])
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def flip(self, pattern: str, *, at: int = -20) -> None:
        """Alter one byte, and keep Hadoop from noticing."""
        path = self.one(pattern)
        data = bytearray(path.read_bytes())
        data[at] ^= 0xFF
        path.write_bytes(data)
        path.with_name(f".{path.name}.crc").unlink(missing_ok=True)

    def copy_entry(self, log: str, source: int, target: int, *, replace: tuple[str, str] = ("", "")) -> None:
        text = (self.root / log / str(source)).read_text()
        (self.root / log / str(target)).write_text(text.replace(*replace) if replace[0] else text)
        (self.root / log / f".{target}.crc").unlink(missing_ok=True)

    def set_query_id(self, query_id: str) -> None:
        (self.root / "metadata").write_text(json.dumps({"id": query_id}))
        (self.root / ".metadata.crc").unlink(missing_ok=True)


def write_batches(folder: Path) -> None:
    """Input of so many batches that the newest entries of the logs lie beyond the last compact one."""
    for side in ("left", "right"):
        write_input(folder / side)
        for path in sorted((folder / side).iterdir())[BATCHES:]:
            path.unlink()


def run_all(spark: SparkSession, folder: Path) -> dict[str, tuple[Workload, Patient]]:
    patients: OfEach[tuple[Workload, Patient]] = OfEach()
    for name, (build, backend) in QUERIES.items():
        if not runs_here(name):
            continue
        work = Workload(build, backend, folder / name)
        work.folder.mkdir()
        live = LiveDirectory(str(work.folder / "live"))
        write_batches(work.folder)
        if name in FIRST:
            # Without changelogs every version has its zip. So those that come later have one to build on, and no
            # test depends on when Spark's maintenance would have made it.
            set_aside = sorted((work.folder / "left").iterdir())[2:]
            for path in set_aside:
                path.rename(work.folder / path.name)
            run_to_the_end(spark, replace(work, backend=FIRST[name]), live)
            for path in set_aside:
                (work.folder / path.name).rename(path)
        # The joins have eight times the stores; what matters of them shows in fewer batches.
        run_to_the_end(spark, work, live, files_per_batch=2 if build is join else 1)
        patients[name] = (work, Patient(work.folder / "live", work.output))
    return patients
