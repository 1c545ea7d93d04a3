"""Streams into real tables whose process is killed with SIGKILL, at random and at each step of a roll-back.

`python -m tests.sinks.killed_program FOLDER JARS FORMAT SEED`; each result is a JSON line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import SparkSession

from dagster_ckpt import Client
from tests.sinks.mortal_program import Life, When
from tests.support.shop_tables import ROOT, Shops, tell

DEADLINE_S = 600.0
# The roll-back to a batch, to a snapshot after the live directory was lost, and to before the first batch.
WAYS = ("batch-1", "latest", "empty")
LONGEST_COMMIT_MS = 150
# In turn with each of these ways.
STEPS = [
    ("commit", When.BEFORE),
    ("commit", When.AFTER),
    ("commit", When.WITHIN),
    ("switch", When.AFTER),
    ("finish", When.BEFORE),
    ("finish", When.AFTER),
    ("commit", When.WITHIN),
    ("commit", When.WITHIN),
    ("commit", When.AFTER),
    ("switch", When.BEFORE),
]


class Killed:
    """A stream whose processes are killed, and which this process continues.

    Args:
        spark: The session of this process.
        life: A run of the stream.
    """

    def __init__(self, spark: SparkSession, life: Life) -> None:
        self.life, self.shops, self.spark = life, life.opened(spark), spark
        self.deaths = 0

    def run_and_die(self, dies_when: Callable[[], bool] | None = None, *, alone: bool = False, **how: Any) -> None:
        """Run a process of the stream until it is killed.

        Args:
            dies_when: Polled while it runs: True kills it. None: it kills itself.
            alone: Its JVM is not killed with it, and finds out for itself.
            how: Changes to the run.
        """
        log = self.shops.folder / f"log-{self.deaths}"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.sinks.mortal_program", json.dumps(asdict(replace(self.life, **how)))],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + DEADLINE_S
        try:
            while process.poll() is None:
                if dies_when is not None and dies_when():
                    process.kill() if alone else os.killpg(process.pid, signal.SIGKILL)
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(log.read_text()[-3000:])
                time.sleep(0.02)
            if process.wait() != -signal.SIGKILL:
                raise RuntimeError(f"it was not killed: {log.read_text()[-3000:]}")
        finally:
            if not alone:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self.deaths += 1

    @property
    def batch(self) -> int:
        """The newest batch that a directory has committed."""
        folder = self.shops.folder / "live" / self.shops.stream
        commits = (path.name for path in folder.glob("live-*/commits/*"))
        return max((int(name) for name in commits if name.isdecimal()), default=-1)

    def soon(self, random: Random, *, directories: int = 0) -> Callable[[], bool]:
        """True some time after one to three more batches, or after another directory is there."""
        wanted, pause = self.batch + random.randint(1, 3), random.uniform(0, 1)
        reached: list[float] = []

        def holds() -> bool:
            made = len(list((self.shops.folder / "live" / self.shops.stream).glob("live-*")))
            if not reached and (made >= directories if directories else self.batch >= wanted):
                reached.append(time.monotonic())
            return bool(reached) and time.monotonic() - reached[0] >= pause

        return holds


def at_random(killed: Killed, random: Random) -> Iterator[tuple[str, Shops]]:
    """A stream through everything that can happen to it; what its table then shows, after each."""
    shops = killed.shops
    shops.feed(9)
    killed.run_and_die(killed.soon(random))
    killed.run_and_die(killed.soon(random), alone=True)
    shops.run()
    yield "killed at random", shops

    shops.savepoint("nine")
    shops.feed(4)
    killed.run_and_die(killed.soon(random))
    shops.lose_the_directory()
    killed.run_and_die(killed.soon(random, directories=1), max_replayed_batches=random.choice((0, 100)))
    shops.run(files_per_batch=2)
    yield "its directory destroyed", shops

    directories = len(list((shops.folder / "live" / shops.stream).glob("live-*")))
    killed.run_and_die(killed.soon(random, directories=directories + 1), start_from="nine")
    shops.run(files_per_batch=3)
    yield "rewound", shops

    shops.feed(1)
    with Client(**shops.places) as client:
        client.fork(shops.stream, into="forked", start_from="nine")
    forked = killed.life.opened(killed.spark)
    forked.stream = "forked"
    forked.table = f"{shops.table}_forked"
    forked.run(files_per_batch=2)
    yield "forked", forked
    shops.run()
    yield "beside its fork", shops


def at_each_step(spark: SparkSession, life: Life, random: Random) -> Iterator[dict[str, Any]]:
    """A roll-back that is killed at a step, for each step; the next start finishes it, or begins it again."""
    for number, ((step, when), way) in enumerate(zip(STEPS, cycle(WAYS), strict=False)):
        killed = Killed(spark, replace(life, name=f"step_{number}"))
        shops = killed.shops
        shops.feed(3)
        shops.run()
        shops.savepoint("three")
        shops.feed(1)
        shops.run()
        if way == "latest":
            shops.lose_the_directory()
        within_ms = random.randint(0, LONGEST_COMMIT_MS)
        how = {"step": step, "when": when, "within_ms": within_ms, "start_from": way}
        killed.run_and_die(**how, files_per_batch=2, max_replayed_batches=0)
        shops.feed(1)
        shops.run(files_per_batch=3, max_replayed_batches=0)
        yield {"scenario": f"{when} {step}, {way}", "within_ms": within_ms, **shops.told()}


def main(folder: Path, jars: str, table: str, seed: int) -> None:
    """Play both, and tell what the table shows."""
    random = Random(seed)
    life = Life(table, str(folder), jars, "at_random")
    spark = life.session()
    for told in at_each_step(spark, life, random):
        tell(told)
    for name, shops in at_random(Killed(spark, life), random):
        tell({"scenario": name, "fed": shops.fed, **shops.told()})
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
