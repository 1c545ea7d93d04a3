"""Below a real `dagster dev`: new code of a stream outside of Dagster is regretted, and the old driver runs again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pyarrow.dataset
import pytest

from dagster_ckpt import Client
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionRecord, ExecutionStatus
from examples.flights.dagster_dev import DagsterDev, running_dagster_dev
from examples.flights.workspace import Workspace
from tests.support.small_spark import lay_file

pytestmark = [
    pytest.mark.spark,
    pytest.mark.thorough(sample="tests/client/test_roll_back_launch.py"),
    pytest.mark.timeout(1200),
]
DEFINITIONS = Path(__file__).with_name("definitions_of_releases.py")
PATIENCE_S = 180.0
ROWS = 5


def await_that(condition: Callable[[], bool], what: str, *logs: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        said = "\n".join(path.read_text(errors="replace")[-3000:] for log in logs for path in [log] if log.is_file())
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:.0f} s for {what}; {said}"
        time.sleep(0.3)


class Releases:
    """The stream `prices`, whose releases write their number beside each row."""

    def __init__(self, workspace: Workspace, catalog: Catalog) -> None:
        self.workspace, self.catalog = workspace, catalog
        self.files = 0
        (workspace.root / "in").mkdir(parents=True)

    def feed(self, files: int) -> None:
        for number in range(self.files, self.files + files):
            lay_file(self.workspace.root / "in", number, [{"a": number * ROWS + row} for row in range(ROWS)])
        self.files += files

    def client(self) -> Client:
        root = self.workspace.root
        return Client(
            catalog=self.workspace.catalog_url, storage=f"file://{root}/snapshots", live_root=str(self.workspace.live)
        )

    def await_running(self, dev: DagsterDev, *, besides: str = "") -> ExecutionRecord:
        found: list[ExecutionRecord] = []

        def is_running() -> bool:
            last = self.catalog.executions.latest("prices")
            found[:] = [last] if last is not None and last.execution_id != besides else []
            return bool(found) and found[0].status is ExecutionStatus.RUNNING

        await_that(is_running, "a running query", dev.log, *self.workspace.root.glob("logs/*.log"))
        return found[0]

    def await_rows(self, dev: DagsterDev) -> Counter[tuple[int, str]]:
        """As soon as each input row is there."""
        found = Counter[tuple[int, str]]()

        def has_all() -> bool:
            found.clear()
            found.update(self.rows())
            return len({value for value, _ in found}) == self.files * ROWS

        await_that(has_all, "all rows", dev.log, *self.workspace.root.glob("logs/*.log"))
        return Counter(found)

    def rows(self) -> list[tuple[int, str]]:
        log = self.workspace.root / "out" / "_spark_metadata"
        lines = [line for entry in log.glob("[0-9]*") for line in entry.read_text().splitlines()[1:]]
        paths = list(dict.fromkeys(json.loads(line)["path"].removeprefix("file://") for line in lines))
        table = pyarrow.dataset.dataset(paths, format="parquet").to_table().to_pylist() if paths else []
        return [(row["a"], row["release"]) for row in table]


def test_the_driver_before_is_launched_again_with_its_state_and_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    workspace.create()
    with closing(Catalog(workspace.catalog_url)) as catalog, closing_drivers(catalog):
        releases = Releases(workspace, catalog)
        releases.feed(3)
        monkeypatch.setenv("PRICES_RELEASE", "1")
        with running_dagster_dev(workspace, DEFINITIONS) as dev:
            dev.launch("prices_stream")
            first = releases.await_running(dev)
            assert set(releases.await_rows(dev)) == {(value, "1") for value in range(3 * ROWS)}
        # The driver goes on while the new code is deployed.
        monkeypatch.setenv("PRICES_RELEASE", "2")
        with running_dagster_dev(workspace, DEFINITIONS) as dev, releases.client() as client:
            client.restart("prices", timeout_s=PATIENCE_S)
            second = releases.await_running(dev, besides=first.execution_id)
            releases.feed(3)
            of_both = releases.await_rows(dev)
            assert Counter(release for _, release in of_both) == {"1": 3 * ROWS, "2": 3 * ROWS}

            client.roll_back_launch("prices", timeout_s=PATIENCE_S)
            third = releases.await_running(dev, besides=second.execution_id)
            releases.feed(1)
            # The rows of the new code are undone, and the old code writes them.
            assert releases.await_rows(dev) == Counter((value, "1") for value in range(7 * ROWS))
            assert (first.code_version, second.code_version, third.code_version) == ("1", "2", "1")
            client.stop("prices", savepoint=True, timeout_s=PATIENCE_S)


@contextmanager
def closing_drivers(catalog: Catalog) -> Iterator[None]:
    """Kill the drivers that a failed test has left."""
    try:
        yield
    finally:
        lease, launch = catalog.leases.current("prices"), catalog.launches.latest("prices")
        pids = [*((lease.pid, lease.jvm_pid) if lease is not None else ()), launch.pid if launch is not None else None]
        for pid in pids:
            if pid is not None and psutil.pid_exists(pid):
                os.kill(pid, signal.SIGKILL)
