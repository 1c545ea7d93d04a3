"""A real stream whose live directory and newest snapshots are damaged at random comes back row for row by itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, SnapshotRecord, StartCause
from dagster_ckpt.client.health import HealthCheck, Verdict, judge
from dagster_ckpt.client.health_facts import HealthSettings, health_facts
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.config.state_backend import HashMapStateBackend, StateBackend
from dagster_ckpt.errors import RecoveryExhaustedError
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.runtime.run_request import EndKind
from dagster_ckpt.spark.query.session import apply_state_backend
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.values.durations import wall_clock_ms
from tests.support.query_bench import Bench, make_stream
from tests.support.small_spark import small_spark

pytestmark = pytest.mark.spark

BACKENDS: dict[str, StateBackend] = {"heap": HashMapStateBackend(), "rocksdb": EmbeddedRocksDBStateBackend(True)}
# A snapshot of the state every other batch, so that there is one to damage.
SETTINGS = {
    "spark.sql.streaming.stateStore.minDeltasForSnapshot": "2",
    "spark.sql.streaming.stateStore.maintenanceInterval": "200ms",
}
FILES, UNSEEN = 5, 2


def stream_of(root: Path) -> StreamHandle:
    return replace(make_stream(root, num_retained=3), restart=RestartStrategies.fixed_delay_restart(20, 1))


@dataclass
class Life:
    """A stream that has run for a while and was killed, as it lay there."""

    bench: Bench
    kept: Path
    files: int

    def again(self) -> Bench:
        """Put everything back as it was, with files that the stream has not seen."""
        self.bench.stream.catalog.close()
        # Its maintenance would write what belongs to the life before.
        self.bench.spark.sparkContext._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()
        shutil.rmtree(self.bench.root)
        shutil.copytree(self.kept, self.bench.root)
        self.bench = Bench(self.bench.spark, self.bench.root, stream_of(self.bench.root), files=self.files)
        return self.bench


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with small_spark(SETTINGS) as session:
        yield session


@pytest.fixture(scope="module")
def lives(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Life]:
    @cache
    def life(backend: str) -> Life:
        apply_state_backend(spark, BACKENDS[backend])
        return lived(spark, tmp_path_factory.mktemp(backend))

    return life


@pytest.fixture
def life(request: pytest.FixtureRequest, spark: SparkSession, lives: Callable[[str], Life]) -> Life:
    apply_state_backend(spark, BACKENDS[request.param])
    return lives(request.param)


def lived(spark: SparkSession, place: Path) -> Life:
    root = place / "stream"
    root.mkdir()
    bench = Bench(spark, root, stream_of(root))
    bench.feed(FILES)
    bench.run(bench.feeding(lambda: bench.committed() >= FILES - 1 and len(bench.snapshots()) >= 3))
    # One file would be the last batch that `run_to_the_end` waits for, if the batch without data came already.
    bench.feed(UNSEEN)
    bench.stream.catalog.close()
    shutil.copytree(root, place / "kept")
    return Life(bench, place / "kept", bench.files)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(bytes(content))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def state(live: Path, *suffixes: str) -> list[Path]:
    found = sorted(path for path in (live / "state").rglob("*") if path.suffix in suffixes and path.is_file())
    return [path for path in found if path.stat().st_size]


def newest(log: Path) -> Path:
    return max((path for path in log.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def each(paths: Sequence[Path], damage: Callable[[Path], object]) -> None:
    assert paths
    for path in paths:
        damage(path)


DELTAS, SNAPSHOTS = (".delta", ".changelog"), (".snapshot", ".zip")
LIVE: dict[str, Callable[[Path], object]] = {
    "lost": shutil.rmtree,
    "state deleted": lambda live: each(state(live, *SNAPSHOTS, *DELTAS), Path.unlink),
    "all state truncated": lambda live: each(state(live, *SNAPSHOTS, *DELTAS), truncate),
    "all state flipped": lambda live: each(state(live, *SNAPSHOTS, *DELTAS), flip),
    "metadata flipped": lambda live: flip(live / "metadata"),
    "newest offsets truncated": lambda live: truncate(newest(live / "offsets")),
    "offset log emptied": lambda live: each(list((live / "offsets").iterdir()), Path.unlink),
    "commits emptied": lambda live: each(list((live / "commits").iterdir()), lambda path: path.write_bytes(b"")),
}


def folder(snapshot: SnapshotRecord) -> Path:
    return Path((snapshot.location or "").removeprefix("file://"))


def data_of(snapshot: SnapshotRecord) -> list[Path]:
    return [path for path in folder(snapshot).rglob("*") if path.is_file() and path.name != "_metadata"]


SNAPSHOT: dict[str, Callable[[SnapshotRecord], object]] = {
    "lost": lambda snapshot: shutil.rmtree(folder(snapshot)),
    "metadata flipped": lambda snapshot: flip(folder(snapshot) / "_metadata"),
    "metadata truncated": lambda snapshot: truncate(folder(snapshot) / "_metadata"),
    "wrong digest": lambda snapshot: each(data_of(snapshot) or [folder(snapshot) / "_metadata"], flip),
    "data truncated": lambda snapshot: each(data_of(snapshot) or [folder(snapshot) / "_metadata"], truncate),
}


CASES = [("heap" if seed % 3 else "rocksdb", seed) for seed in range(8)]


def test_the_seeds_reach_every_damage() -> None:
    drawn = [draw(seed) for _, seed in CASES]

    assert {live for live, _ in drawn} == set(LIVE)
    assert {snapshot for _, snapshots in drawn for snapshot in snapshots} == set(SNAPSHOT)
    assert {len(snapshots) for _, snapshots in drawn} == {0, 1, 2}


def draw(seed: int) -> tuple[str, list[str]]:
    """The damage of the live directory, and those of the newest snapshots: at most two of three."""
    random = Random(23 + seed)
    live = list(LIVE)[seed % len(LIVE)]
    return live, [random.choice(list(SNAPSHOT)) for _ in range(random.randint(0, 2))]


@pytest.mark.thorough(but="rocksdb-0")
@pytest.mark.parametrize(("life", "seed"), CASES, indirect=["life"])
def test_damaged_at_random_it_comes_back_row_for_row_as_long_as_a_point_is_good(life: Life, seed: int) -> None:
    bench = life.again()
    live, snapshots = draw(seed)
    for snapshot, damage in zip(bench.snapshots(), snapshots, strict=False):
        SNAPSHOT[damage](snapshot)
    good = [snapshot for snapshot in bench.snapshots() if not is_broken(bench, snapshot)]
    assert good
    LIVE[live](Path(bench.stream.catalog.streams.get("orders").live_directory or ""))

    outcome = bench.run_to_the_end(cause=StartCause.RESTART_NEW_RUN)

    assert outcome.end.kind is EndKind.INTERRUPTED
    bench.assert_exact()
    recovery = bench.stream.catalog.executions.get(outcome.execution_id).recovery or {}
    assert recovery["snapshot_id"] == good[0].snapshot_id, (live, snapshots, recovery)
    assert count_events(bench, EventType.TERMINALLY_FAILED) == 0


def is_broken(bench: Bench, snapshot: SnapshotRecord) -> bool:
    try:
        return bool(bench.stream.store.verify(snapshot.location or ""))
    except Exception:  # noqa: BLE001 - unreadable in whichever way
        return True


@pytest.mark.thorough(but="rocksdb")
@pytest.mark.parametrize("life", BACKENDS, indirect=True)
def test_without_a_good_point_it_fails_for_good_with_one_alert_and_health_is_red(life: Life) -> None:
    bench = life.again()
    for snapshot, damage in zip(bench.snapshots(), ("wrong digest", "metadata truncated", "lost"), strict=True):
        SNAPSHOT[damage](snapshot)
    LIVE["all state flipped"](Path(bench.stream.catalog.streams.get("orders").live_directory or ""))

    with pytest.raises(RecoveryExhaustedError, match="cannot be recovered automatically"):
        bench.run_to_the_end(cause=StartCause.RESTART_NEW_RUN)

    last = bench.stream.catalog.executions.latest("orders")
    assert last is not None
    assert (last.status, last.settled) == (ExecutionStatus.FAILED, True)
    assert count_events(bench, EventType.TERMINALLY_FAILED) == 1
    assert "orders" not in bench.stream.catalog.executions.unsettled_runs()
    now_ms = wall_clock_ms() + (bench.stream.options.interval or 0)
    facts = health_facts(bench.stream.catalog, {"orders": HealthSettings()}, now_ms=now_ms)["orders"]
    findings = {each.check: each for each in judge(facts, bench.stream.options, HealthSettings(), now_ms=now_ms)}
    for check in (HealthCheck.PROGRESS, HealthCheck.CHECKPOINT_AGE, HealthCheck.RESTORABILITY):
        assert findings[check].verdict is Verdict.ERROR, findings[check]
    assert Verdict.PASS not in {findings[check].verdict for check in (HealthCheck.SOURCE_LAG, HealthCheck.PROGRESS)}


def count_events(bench: Bench, what: EventType) -> int:
    return sum(event.type is what for event in bench.stream.catalog.events.after(0))
