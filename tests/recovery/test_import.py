"""An import is a query of its own: it resumes from another deployment's snapshot and leaves that deployment alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.catalog.records import OriginKind, SnapshotRecord, StartCause
from dagster_ckpt.client.preflight import planned_start
from dagster_ckpt.client.rebuild import rebuild
from dagster_ckpt.config.checkpoint_storage import FileSystemCheckpointStorage
from dagster_ckpt.errors import (
    CatalogError,
    LeaseHeldError,
    LeaseLostError,
    LiveDirectoryError,
    OptionError,
    RequestFailedError,
    SharedSinkError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StreamNotFoundError,
)
from dagster_ckpt.io.location import folders_overlap
from dagster_ckpt.recovery.fork import Fork, import_snapshot
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.recovery.prepare import PreparedStart, prepare
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.liveness import this_holder
from dagster_ckpt.stream.ownership import OWNER
from dagster_ckpt.stream.start_from import StartFrom
from tests.support import verbs
from tests.support.as_writer import as_writer, holding, keeping
from tests.support.executioner import Executioner, Killed
from tests.support.lost_lease import Steps, take_checkpoint
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.rewind_history import LAST, History
from tests.support.thorough import either

OTHER = "ForeachBatchSink"


def tree(folder: Path) -> dict[str, tuple[str, int]]:
    """Everything below a folder: content and number of names; a catalog by its rows would be the same."""
    return {
        str(path.relative_to(folder)): (
            (hashlib.sha1(path.read_bytes()).hexdigest(), path.stat().st_nlink) if path.is_file() else ("", 0)
        )
        for path in sorted(folder.rglob("*"))
        if path.suffix not in (".db-wal", ".db-shm")
    }


def at(root: Path, stream_id: str = STREAM) -> StreamHandle:
    """A stream of a deployment with everything of its own below a folder."""
    root.mkdir(parents=True, exist_ok=True)
    storage = FileSystemCheckpointStorage(f"file://{root}/snapshots", 64, savepoint_path=f"file://{root}/savepoints")
    like = Shelf.reopened(root).stream
    return replace(like, stream_id=stream_id, name=stream_id, asset_key=stream_id, store=open_store(storage, stream_id))


@dataclass
class Deployments:
    """Production, which has a savepoint, and staging, which has nothing yet."""

    root: Path
    production: History
    savepoint: SnapshotRecord
    staging: StreamHandle

    @staticmethod
    def below(root: Path) -> Deployments:
        (root / "production").mkdir()
        production = History(root / "production")
        savepoint = verbs.trigger_savepoint(production.shelf.stream, origin="a test", label="for staging")
        return Deployments(root, production, savepoint, at(root / "staging"))

    @property
    def location(self) -> str:
        return str(self.savepoint.location)

    @property
    def new(self) -> Path:
        return self.root / "staging/out"

    def outputs(self, **changed: str) -> dict[str, str]:
        return {str(self.production.sink): str(self.new), OTHER: "a table of staging"} | changed

    def make(self, location: str | None = None, *, into: StreamHandle | None = None, **how: Any) -> Fork:
        how.setdefault("outputs", self.outputs())
        return import_snapshot(into or self.staging, location or self.location, origin="a test", **how)

    def start(self, folder: Path | None = None, **output: str) -> PreparedStart:
        """What the next start of the import would give to Spark, of a query that names a place."""
        plan = planned_start(self.staging, StartFrom())
        assert plan.kind is RecoveryKind.FINISH_RESTORE
        named = NamedOutput(**output) if output else NamedOutput("parquet", str(folder or self.new))
        with keeping(self.staging.catalog, self.staging.stream_id) as lease:
            return prepare(self.staging, plan, lease, named)

    def close(self) -> None:
        self.production.close()
        self.staging.catalog.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Deployments]:
    deployments = Deployments.below(tmp_path)
    yield deployments
    deployments.close()


def test_it_stands_where_the_snapshot_stands_as_a_query_of_its_own_and_production_is_as_it_was(
    two: Deployments,
) -> None:
    before = tree(two.root / "production")

    made = two.make()
    prepared = two.start()

    state = inspect_live_directory(prepared.live)
    assert (state.status, state.batch_id, made.batch_id) == (LiveStatus.GOOD, LAST, LAST)
    assert json.loads(prepared.live.folder.read("metadata"))["id"] == made.query_id != two.production.query_id
    assert (made.of_stream_id, made.of_deployment) == (STREAM, two.production.shelf.stream.catalog.deployment_id)
    assert {path.name for path in (two.new / "_spark_metadata").iterdir()} == {"8.compact"}
    assert {path.read_text() for path in (two.new / "_spark_metadata").iterdir()} == {"v1"}
    assert tree(two.root / "production") == before
    record = two.staging.catalog.streams.get(STREAM)
    assert record.origin is not None
    assert record.origin.kind is OriginKind.FORK
    assert two.staging.catalog.snapshots.of_stream(STREAM) == []


def test_a_checkpoint_is_imported_and_nothing_of_it_is_needed_afterwards(two: Deployments) -> None:
    its = two.production.shelf.stream
    two.production.commit(LAST + 1)
    with holding(its.catalog, STREAM) as lease:
        take_checkpoint(its, lease, "first", its.catalog.executions.last_sinks(STREAM))
    checkpoint = its.catalog.snapshots.newest_checkpoint(STREAM)
    assert checkpoint is not None

    made = two.make(f"{checkpoint.location}/_metadata")
    shutil.rmtree(two.root / "production")

    assert inspect_live_directory(two.start().live).batch_id == made.batch_id == LAST + 1


def test_rows_are_copied_where_that_is_asked_for_and_share_no_bytes_with_the_originals(two: Deployments) -> None:
    before = tree(two.root / "production")

    two.make(with_rows=True)
    two.start()

    assert tree(two.root / "production") == before
    assert sorted(path.name for path in two.new.glob("part-*")) == [f"part-{batch}" for batch in range(LAST + 1)]
    named = (two.new / "_spark_metadata/8").read_text()
    assert f"{two.new}/part-8" in named
    assert "production" not in named


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ({}, r"sink file:.*out put is not mapped"),
        ({"{sink}": "{new}"}, r"sink ForeachBatchSink is not mapped"),
        ({"{sink}": " ", OTHER: "t"}, r"sink file:.*out put is not mapped"),
        ({"{sink}": "{new}", OTHER: "t", "/elsewhere": "/x"}, "/elsewhere is not one of its sinks"),
        ({"{sink}": "file:{sink}/", OTHER: "t"}, r"overlaps, file:.*where the original writes"),
        ({"{sink}": "{sink}/below", OTHER: "t"}, r"overlaps, file:.*where the original writes"),
        ({"{sink}": "{root}/production", OTHER: "t"}, r"overlaps, file:.*where the original writes"),
        ({"{sink}": "{new}", OTHER: OTHER}, r"ForeachBatchSink, where the original writes"),
        ({"{sink}": "{new}", OTHER: "{new}"}, r"is mapped to it as well"),
        ({"{sink}": "{snapshot}/out", OTHER: "t"}, r"overlaps the snapshot"),
        ({"{sink}": "{used}", OTHER: "t"}, "_spark_metadata/0 already exists there"),
        ({"{sink}": "{batch}", OTHER: "t"}, "day=1/part-0 already exists there"),
        ({"{sink}": "{new}", OTHER: "{batch}"}, "day=1/part-0 already exists there"),
    ],
)
def test_a_sink_that_is_not_mapped_to_a_free_place_is_refused_and_nothing_is_made(
    two: Deployments, outputs: dict[str, str], words: str
) -> None:
    places = {"sink": str(two.production.sink), "new": str(two.new), "root": str(two.root)}
    places |= {"snapshot": two.location, "used": f"{two.root}/used", "batch": f"{two.root}/batch"}
    for file in ("used/_spark_metadata/0", "batch/day=1/part-0"):
        (two.root / file).parent.mkdir(parents=True)
        (two.root / file).write_text("v1")
    before = tree(two.root / "production"), tree(two.root / "staging")

    with pytest.raises(SharedSinkError, match=rf"not imported, nothing was changed.*{words}"):
        two.make(outputs={old.format(**places): new.format(**places) for old, new in outputs.items()})

    assert (tree(two.root / "production"), tree(two.root / "staging")) == before


def test_a_folder_that_another_stream_of_the_catalog_writes_or_will_is_refused(two: Deployments) -> None:
    writing, waiting = (replace(two.staging, stream_id=name, name=name) for name in ("writing", "waiting"))
    writing.register()
    as_writer(writing.catalog, "writing").executions.start(
        "its", run_id="run", cause=StartCause.MANUAL, holder=this_holder("its", "run", None)
    )
    as_writer(writing.catalog).executions.heartbeat("its", {"sinks": [f"FileSink[file:{two.root}/live output]"]})
    waiting = replace(waiting, store=open_store(FileSystemCheckpointStorage(f"file://{two.root}/x"), "waiting"))
    two.make(into=waiting, outputs={str(two.production.sink): f"{two.root}/planned", OTHER: "t"})

    for folder in ("live output", "planned"):
        with pytest.raises(SharedSinkError, match=r"another stream of this catalog writes there, or will"):
            two.make(outputs=two.outputs(**{str(two.production.sink): f"{two.root}/{folder}"}))


@pytest.mark.parametrize(
    "output",
    [
        {"format": "parquet", "place": "{production}/out put"},
        {"format": "parquet", "place": "{root}/not mapped"},
        {"format": "kafka", "place": "orders"},
        {"format": "delta", "place": "{root}/not mapped"},
    ],
)
def test_its_query_is_started_only_on_a_place_that_a_sink_is_mapped_to(
    two: Deployments, output: dict[str, str]
) -> None:
    two.make()
    before = tree(two.root)
    places = {"root": two.root, "production": two.root / "production"}

    with pytest.raises(SharedSinkError, match=r"not started, nothing was changed.*(mapped to it|state comes from)"):
        two.start(**{name: value.format(**places) for name, value in output.items()})

    changed = {path for path, content in tree(two.root).items() if before.get(path) != content}
    assert changed <= {"staging/catalog.db"}
    two.start(format="delta", place="a table of staging")


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("s3a://bucket/out", "s3://bucket/out/rows", True),
        ("s3a://bucket", "s3a://bucket/out", True),
        ("s3a://bucket/out", "s3a://bucket/out-2", False),
        ("s3a://bucket/out", "/bucket/out", False),
        ("/a/out", "file:/a/out/../out/rows", True),
        ("/a/out", "/a/out-2", False),
    ],
)
def test_folders_overlap_where_one_lies_in_the_other(one: str, other: str, overlap: bool) -> None:
    assert folders_overlap(one, other) is folders_overlap(other, one) is overlap


def test_what_is_no_snapshot_of_another_deployment_is_refused(two: Deployments) -> None:
    own = replace(two.production.shelf.stream, stream_id="scratch")
    with pytest.raises(SnapshotNotFoundError, match=r"of this deployment.*fork_stream_job"):
        two.make(into=own)
    with pytest.raises(SnapshotNotFoundError):
        two.make(f"file://{two.root}/nothing")
    with pytest.raises(OptionError, match="not the location"):
        two.make("for staging")
    with pytest.raises(OptionError, match="contains a user name"):
        two.make("s3://me:secret@host/savepoint")
    two.staging.register()
    with pytest.raises(SnapshotNotFoundError, match="import_stream_job"):
        planned_start(two.staging, StartFrom(two.location))


def test_an_altered_snapshot_makes_nothing(two: Deployments) -> None:
    folder = Path(two.location.removeprefix("file://"))
    data = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1] + b"?")

    with pytest.raises(SnapshotCorruptError):
        two.make()

    assert two.staging.register().live_directory is None


@pytest.mark.parametrize("shared", ["live", "snapshots"])
def test_a_stream_with_the_originals_own_folders_is_refused(two: Deployments, shared: str) -> None:
    two.production.shelf.checkpoint()
    its = two.production.shelf.stream
    stream = (
        replace(two.staging, live_root=its.live_root) if shared == "live" else replace(two.staging, store=its.store)
    )
    before = tree(two.root / "production")

    with pytest.raises(LiveDirectoryError, match=r"has no execution of it, but its folders contain .*(live-1-0|chk-)"):
        two.make(into=stream)

    assert tree(two.root / "production") == before


def test_a_live_folder_that_another_deployment_has_claimed_is_refused(two: Deployments) -> None:
    made = two.make()
    owner = Path(two.staging.live_folder) / OWNER
    assert owner.read_text() == two.staging.catalog.deployment_id
    owner.write_text("another")

    with pytest.raises(LiveDirectoryError, match="contains the live directories of deployment another"):
        two.make()

    assert two.staging.catalog.streams.get(STREAM).live_directory == made.live_directory


def test_what_the_stream_itself_has_committed_is_given_up_only_if_asked(two: Deployments) -> None:
    made = two.make()
    catalog = two.staging.catalog
    as_writer(catalog).executions.start(
        "its", run_id="run", cause=StartCause.MANUAL, holder=this_holder("its", "run", None)
    )
    as_writer(catalog).executions.running("its", live_directory=made.live_directory, recovery={})
    as_writer(catalog).executions.heartbeat("its", {"batch_id": LAST + 1})

    with pytest.raises(RequestFailedError, match="replace_state"):
        two.make()
    again = two.make(replace_state=True)

    assert again.query_id != made.query_id, "Delta would pass over its batches"


def test_a_stream_that_runs_imports_nothing(two: Deployments) -> None:
    two.staging.register()
    two.staging.catalog.leases.acquire(STREAM, this_holder("other", "run", None), 60_000)

    with pytest.raises(LeaseHeldError):
        two.make()


def refuses_to_start_or_begins_whole(two: Deployments, *, was_made: bool) -> None:
    """After an import that was cut off nothing is started of what it left."""
    record = two.staging.register()
    assert (record.live_directory is not None) is was_made
    if was_made or not any(built.live.positions().commit is not None for built in two.staging.live_directories()):
        return
    with pytest.raises(LiveDirectoryError, match="Nothing was changed"):
        planned_start(two.staging, StartFrom())


@pytest.mark.parametrize("with_rows", [False, True], ids=["apart", "with rows"])
def test_killed_at_any_step_there_is_a_whole_import_or_none_and_it_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_rows: bool
) -> None:
    two = Deployments.below(tmp_path)
    before = tree(tmp_path / "production")
    two.staging.catalog.close()
    step = 0
    killed = True
    while killed:
        shutil.rmtree(tmp_path / "staging")
        two.staging = at(tmp_path / "staging")
        with monkeypatch.context() as patch:
            Executioner(patch, step)
            try:
                two.make(with_rows=with_rows)
                killed = False
            except Killed:
                step += either(quick=3, thorough=1)
        if killed:
            # Its query would not be kept out of the original's output. Early on, there is nothing to register.
            with suppress(StreamNotFoundError):
                assert rebuild(two.staging, origin="a test").live_directory is None, f"killed at step {step}"
        refuses_to_start_or_begins_whole(two, was_made=not killed)
        made = two.make(with_rows=with_rows)
        live = two.start().live
        assert json.loads(live.folder.read("metadata"))["id"] == made.query_id, f"killed at step {step}"
        assert inspect_live_directory(live).batch_id == LAST
        assert len(list(two.new.glob("part-*"))) == (LAST + 1 if with_rows else 0)
        assert tree(tmp_path / "production") == before
        two.staging.catalog.close()
    two.production.close()
    assert step > 8


def test_a_lease_lost_at_any_step_leaves_the_successors_import_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Deployments.below(tmp_path)
    before = tree(tmp_path / "production")
    two.staging.catalog.close()
    step, lost, lost_under_way = 0, True, 0
    while lost:
        shutil.rmtree(tmp_path / "staging")
        two.staging = at(tmp_path / "staging")
        new = at(tmp_path / "staging")
        new.catalog.database.limit_calls(1)
        made: list[Fork] = []

        def comes(new: StreamHandle = new, made: list[Fork] = made) -> bool:
            try:
                held = new.catalog.leases.current(STREAM)
                if held is not None:
                    holder = this_holder("new", "run", None)
                    taken = new.catalog.leases.acquire(STREAM, holder, 10**9, take_over=held)
                    new.catalog.leases.release(taken)
                made.append(two.make(into=new))
            except CatalogError:
                # The old one is in a transaction: it comes at the next step.
                return False
            return True

        with monkeypatch.context() as patch:
            steps = Steps(patch, step, comes)
            try:
                two.make()
            except LeaseLostError:
                lost_under_way += 1
                assert two.staging.catalog.streams.get(STREAM).live_directory == made[0].live_directory
        assert inspect_live_directory(two.start().live).batch_id == LAST
        assert tree(tmp_path / "production") == before
        lost = steps.has_come
        new.catalog.close()
        two.staging.catalog.close()
        step += either(quick=4, thorough=1)
    two.production.close()
    assert lost_under_way > either(quick=2, thorough=10)
