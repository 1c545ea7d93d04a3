"""A start that rewrites state, killed with its JVM by SIGKILL as Spark writes one file after the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.spark.checkpoint_dir.state_files import ROCKSDB
from dagster_ckpt.spark.versions import Feature
from dagster_ckpt.state.rewriting import shape_in
from dagster_ckpt.state.stopped_state import StateShape
from dagster_ckpt.stream.ownership import check_places
from dagster_ckpt.stream.start_from import StartFrom
from tests.recovery.test_state_rewrite_at_a_start import Orders
from tests.support.needs import needs
from tests.support.query_bench import make_stream
from tests.support.small_spark import small_spark

pytestmark = [pytest.mark.spark, pytest.mark.state, pytest.mark.timeout(3600), needs(Feature.STATE_REWRITER)]
PARTITIONS = 5
# A kill takes a JVM. After each file: KILL_EVERY_FILES=1.
EVERY = int(os.environ.get("KILL_EVERY_FILES", "5"))
ROOT = Path(__file__).parents[2]


def run(root: Path, *, feeds: int, rewrites: bool) -> subprocess.Popen[bytes]:
    """Another process, with a JVM of its own, in a group of its own."""
    arguments = [str(root), str(feeds), str(int(rewrites))]
    log = (root / "log").open("ab")
    command = [sys.executable, "-m", "tests.recovery.test_state_rewrite_sigkill", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def files_of_the_rewrite(root: Path, known: set[Path]) -> int:
    folder = root / "live/orders"
    new = [path for path in folder.glob("live-*") if path not in known]
    return sum(1 for directory in new for path in directory.rglob("*") if path.is_file())


def test_a_plain_start_goes_on_whenever_the_process_was_killed(tmp_path: Path) -> None:
    assert run(tmp_path, feeds=2, rewrites=False).wait() == 0, (tmp_path / "log").read_text()
    stream = make_stream(tmp_path)
    before = stream.catalog.streams.get("orders").live_directory
    kills, at = 0, 1
    while True:
        known = set((tmp_path / "live/orders").glob("live-*"))
        process = run(tmp_path, feeds=0, rewrites=True)
        while process.poll() is None and files_of_the_rewrite(tmp_path, known) < at:
            time.sleep(0.005)
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if stream.catalog.streams.get("orders").live_directory != before:
            # It had been faster.
            break
        kills += 1
        check_places(stream, StartFrom(), predecessor_ended=True)
        assert planned_start(stream, StartFrom()).kind is RecoveryKind.RESUME
        # Spark writes several files at once, so a later kill need not find each of them.
        at = max(at, files_of_the_rewrite(tmp_path, known)) + EVERY

    assert kills > 1
    last = run(tmp_path, feeds=1, rewrites=True)
    assert last.wait() == 0, (tmp_path / "log").read_text()
    stream.catalog.close()


def _in_a_process(root: Path, feeds: int, *, rewrites: bool) -> None:
    with small_spark() as spark:
        files = len(list((root / "landing").glob("*.json"))) if (root / "landing").exists() else 0
        orders = Orders(spark, root, make_stream(root), files)
        orders.feed(feeds)
        orders.run(state_partitions=PARTITIONS if rewrites else None)
        assert not rewrites or shape_in(orders.live) == StateShape(ROCKSDB, PARTITIONS)
        assert orders.totals_are_right()
        orders.stream.catalog.close()


if __name__ == "__main__":
    _in_a_process(Path(sys.argv[1]), int(sys.argv[2]), rewrites=sys.argv[3] == "1")
