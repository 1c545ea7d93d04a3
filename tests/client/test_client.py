"""The client, as a notebook uses it: a plain Python process that has the catalog's URL and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind, RequestRecord, RequestStatus, SnapshotStatus
from dagster_ckpt.client import Client
from dagster_ckpt.client.description import StreamStatus
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.config.checkpoint_storage import CustomCheckpointStorage, FileSystemCheckpointStorage
from dagster_ckpt.errors import (
    CatalogError,
    OptionError,
    RequestFailedError,
    SnapshotNotFoundError,
    StreamNotFoundError,
)
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.recovery.plan import RecoveryKind
from dagster_ckpt.stream.recorded_settings import RecordedSettings
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import DesiredState, ExternalizedCheckpointCleanup, SnapshotKind
from tests.support.as_writer import as_writer
from tests.support.golden_stream import STREAM, GoldenStream

RETAIN = ExternalizedCheckpointCleanup.RETAIN_ON_CANCELLATION


@pytest.fixture
def golden(tmp_path: Path) -> Iterator[GoldenStream]:
    """A stream that has run up to batch 4 with options of its own, and whose process is gone."""
    golden = GoldenStream(tmp_path)
    options = CheckpointConfig(cleanup=RETAIN, num_retained=5, interval=60_000, timeout=1_200_000).options
    golden.stream = replace(golden.stream, options=options, asset_key="shop/orders")
    yield golden.make()
    golden.close()


@pytest.fixture
def client(golden: GoldenStream) -> Iterator[Client]:
    with Client(url(golden), origin="a notebook") as client:
        yield client


def url(golden: GoldenStream) -> str:
    return f"sqlite:///{golden.root / 'catalog.db'}"


def die(golden: GoldenStream) -> None:
    """Let its process fail, so that the restart strategy is to start it again."""
    golden.end(ExecutionStatus.FAILED)
    with golden.stream.catalog.database.writing() as connection:
        connection.exec_driver_sql("UPDATE executions SET settled = 0")


class TestOptions:
    def test_known_defect_16_a_cancel_keeps_what_the_streams_own_options_keep(
        self, golden: GoldenStream, client: Client
    ) -> None:
        """With default options, canceling deleted the checkpoints that RETAIN_ON_CANCELLATION keeps."""
        kept = golden.snapshot()
        die(golden)

        stopped = client.cancel(STREAM)

        assert not stopped.was_running
        assert stopped.retention is not None
        assert [each.snapshot_id for each in client.list_snapshots(STREAM)] == [kept.snapshot_id]
        assert client.verify(STREAM)[0].passed
        assert client.describe_stream(STREAM).summary.status is StreamStatus.CANCELED

    def test_a_stream_that_nobody_defines_is_retired_also_if_it_has_ended(
        self, golden: GoldenStream, client: Client
    ) -> None:
        kept = golden.snapshot()
        golden.end()
        client.set_desired_state(STREAM, "RUNNING")
        asked = client.request_start(STREAM)

        for _ in range(2):
            retired = client.retire(STREAM)

            assert not retired.was_running
            assert [each.snapshot_id for each in client.list_snapshots(STREAM)] == [kept.snapshot_id]
            row = client.desired_state(STREAM)
            assert row is not None
            assert row.desired is DesiredState.CANCELED
            assert client.catalog.requests.get(asked.request_id).status is RequestStatus.WITHDRAWN

        with Client(
            url(golden),
            checkpointing={STREAM: CheckpointConfig(cleanup=ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)},
        ) as deleting:
            deleting.retire(STREAM)
            assert deleting.list_snapshots(STREAM) == []

    def test_they_are_those_of_the_last_registration(self, golden: GoldenStream, client: Client) -> None:
        assert client.describe_stream(STREAM).settings == RecordedSettings(
            options=golden.stream.options,
            restart=golden.stream.restart.get_description(),
            storage=golden.stream.storage,
            live_root=golden.stream.live_root,
        )

    def test_those_of_the_caller_take_precedence(self, golden: GoldenStream) -> None:
        golden.snapshot()
        die(golden)
        given = {STREAM: CheckpointConfig(cleanup=ExternalizedCheckpointCleanup.DELETE_ON_CANCELLATION)}

        with Client(url(golden), checkpointing=given) as client:
            client.cancel(STREAM)

            assert client.list_snapshots(STREAM) == []

    def test_what_a_verb_registers_is_what_was_recorded(self, golden: GoldenStream, client: Client) -> None:
        before = client.describe_stream(STREAM).settings

        client.set_desired_state(STREAM, "SUSPENDED")

        assert client.describe_stream(STREAM).settings == before

    def test_settings_that_cannot_be_read_are_an_error_not_defaults(self, golden: GoldenStream, client: Client) -> None:
        with golden.stream.catalog.database.writing() as connection:
            connection.exec_driver_sql("""UPDATE streams SET options = '{"checkpointing": {"cleanup": "MAYBE"}}'""")

        with pytest.raises(CatalogError, match="MAYBE"):
            client.cancel(STREAM)

    def test_a_stream_whose_options_nobody_knows_keeps_everything(self, golden: GoldenStream, tmp_path: Path) -> None:
        """Its catalog was lost: what it is rebuilt with must not delete what its own options keep."""
        golden.snapshot()
        golden.end()
        deployment = golden.stream.catalog.deployment_id
        places = {"storage": str(golden.root / "snapshots"), "live_root": str(golden.root / "live")}

        with Client(f"sqlite:///{tmp_path / 'new.db'}", **places) as client:
            report = client.rebuild(STREAM, take_over_deployment=deployment)

            assert report.registered
            options = client.describe_stream(STREAM).settings.options
            assert options is not None
            assert options.cleanup is RETAIN


class TestPlaces:
    def test_a_plain_absolute_path_is_a_storage(self, golden: GoldenStream) -> None:
        golden.snapshot()

        with Client(url(golden), storage=str(golden.root / "snapshots")) as client:
            assert client.verify(STREAM)[0].passed

    @pytest.mark.parametrize("option", ["storage", "live_root"])
    def test_a_relative_path_is_refused_with_what_to_type(self, tmp_path: Path, option: str) -> None:
        here = Path("data/checkpoints").absolute()
        with pytest.raises(OptionError, match=rf"{option} is 'data/checkpoints', a relative path.* such as {here}"):
            Client(f"sqlite:///{tmp_path / 'catalog.db'}", **{option: "data/checkpoints"})
        assert not (tmp_path / "catalog.db").exists()

    @pytest.mark.parametrize(
        ("path", "why"),
        [("dbfs:/live", "REST API"), ("/Volumes/main/s/v/live", "a mount"), ("file:///dbfs/live", "a mount")],
    )
    def test_a_path_of_databricks_that_python_and_spark_see_differently_is_refused(
        self, tmp_path: Path, path: str, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DATABRICKS_RUNTIME_VERSION", "18.0")
        with pytest.raises(OptionError, match=rf"live_root is '{path}'.*{why}.* abfss://"):
            Client(f"sqlite:///{tmp_path / 'catalog.db'}", live_root=path)
        monkeypatch.delenv("DATABRICKS_RUNTIME_VERSION")
        if not path.startswith("dbfs:"):
            # On a Mac, external disks.
            Client(f"sqlite:///{tmp_path / 'catalog.db'}", live_root=path).close()

    def test_a_relative_folder_for_a_savepoint_is_refused(self, client: Client) -> None:
        with pytest.raises(OptionError, match="target_directory is 'savepoints', a relative path"):
            client.trigger_savepoint(STREAM, target_directory="savepoints")

    def test_an_absolute_folder_for_a_savepoint_is_taken(self, golden: GoldenStream, client: Client) -> None:
        folder = golden.root / "elsewhere"

        savepoint = client.trigger_savepoint(STREAM, target_directory=str(folder))

        assert (savepoint.location or "").startswith(f"file://{folder}/")

    @pytest.mark.parametrize("option", ["storage", "live_root"])
    def test_another_place_than_the_streams_own_is_refused(self, golden: GoldenStream, option: str) -> None:
        with (
            Client(url(golden), **{option: "/somewhere/else"}) as client,
            pytest.raises(OptionError, match=r"/somewhere/else.*Leave"),
        ):
            client.sweep(STREAM, dry_run=False)

    def test_credentials_come_from_the_caller_and_places_from_the_catalog(self, golden: GoldenStream) -> None:
        given = FileSystemCheckpointStorage(f"file://{golden.root / 'snapshots'}", storage_options={"key": "x"})

        with Client(url(golden), storage=given) as client:
            opened = client._open(STREAM).storage

        assert isinstance(opened, FileSystemCheckpointStorage)
        assert isinstance(golden.stream.storage, FileSystemCheckpointStorage)
        assert (opened.savepoint_location, dict(opened.storage_options)) == (
            golden.stream.storage.savepoint_location,
            {"key": "x"},
        )

    def test_a_storage_of_a_users_has_to_be_given(self, golden: GoldenStream, client: Client) -> None:
        golden.stream = replace(golden.stream, storage=CustomCheckpointStorage("a.b:C", {"password": "hunter2"}))
        golden.stream.register()

        with pytest.raises(OptionError, match="a class of your own"):
            client.trigger_savepoint(STREAM)
        assert "hunter2" not in str(golden.stream.catalog.streams.get(STREAM).options)

    def test_the_folder_of_a_sqlite_catalog_is_created(self, tmp_path: Path) -> None:
        with Client(f"sqlite:///{tmp_path / 'not/there/catalog.db'}") as client:
            assert client.list_streams() == []


class TestListsAndDescriptions:
    def test_streams(self, golden: GoldenStream, client: Client) -> None:
        newest = golden.snapshot()

        [stream] = client.list_streams()

        assert (stream.stream_id, stream.asset_key) == (STREAM, "shop/orders")
        assert stream.newest_snapshot is not None
        assert stream.newest_snapshot.snapshot_id == newest.snapshot_id
        # Its row says RUNNING, and nobody holds its lease: its process died.
        assert stream.status is StreamStatus.FAILED
        assert f"chk-1 of {STREAM} at batch 4, COMPLETED" in repr(stream)

    def test_a_stream(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()
        golden.end()

        found = client.describe_stream("shop/orders")

        assert (found.stream_id, found.summary.status, found.summary.reason) == (
            STREAM,
            StreamStatus.SUSPENDED,
            "because",
        )
        assert [each.status for each in found.executions] == [ExecutionStatus.SUSPENDED]
        assert [each.number for each in found.snapshots] == [1]
        assert found.desired is None

    def test_snapshots(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()
        savepoint = client.trigger_savepoint(STREAM, label="mine")

        assert [each.snapshot_id for each in client.list_snapshots(STREAM, kind=SnapshotKind.SAVEPOINT)] == [
            savepoint.snapshot_id
        ]
        assert len(client.list_snapshots(STREAM)) == 2
        assert client.list_snapshots(STREAM, status=SnapshotStatus.FAILED) == []

    @pytest.mark.parametrize("name", ["latest", "chk-1"])
    def test_a_snapshot(self, golden: GoldenStream, client: Client, name: str) -> None:
        golden.snapshot()
        client.tag(STREAM, "chk-1", label="good")

        found = client.describe_snapshot(STREAM, name)

        assert (found.header.batch_id, found.record.label) == (4, "good")
        assert [hold.holder for hold in found.holds] == ["a notebook"]
        assert found.file_count > 0

    def test_one_that_does_not_exist(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()

        with pytest.raises(SnapshotNotFoundError, match="It has: chk-1 at batch 4"):
            client.describe_snapshot(STREAM, "chk-9")

    @pytest.mark.parametrize(
        "verb", ["describe_stream", "list_snapshots", "trigger_savepoint", "cancel", "doctor", "health", "sweep"]
    )
    def test_a_stream_that_the_catalog_does_not_know(self, client: Client, verb: str) -> None:
        with pytest.raises(StreamNotFoundError, match=f"Streams in it: {STREAM}"):
            getattr(client, verb)("ordrs")

    def test_a_desired_state_of_such_a_stream_registers_nothing(self, client: Client) -> None:
        with pytest.raises(StreamNotFoundError):
            client.set_desired_state("ordrs", DesiredState.RUNNING)
        assert [each.stream_id for each in client.list_streams()] == [STREAM]


class TestVerbs:
    def test_a_savepoint_of_a_stream_that_does_not_run(self, golden: GoldenStream, client: Client) -> None:
        savepoint = client.trigger_savepoint(STREAM, label="before-release-42")

        assert (savepoint.label, savepoint.batch_id) == ("before-release-42", 4)
        assert "SnapshotRecord(savepoint before-release-42 of golden at batch 4, COMPLETED" in repr(savepoint)

    @pytest.mark.parametrize("fails", ["before", "meanwhile"])
    def test_a_savepoint_of_a_query_that_fails_again_and_again(
        self, golden: GoldenStream, client: Client, monkeypatch: pytest.MonkeyPatch, fails: str
    ) -> None:
        golden.begin_again({})
        end = as_writer(golden.stream.catalog, STREAM).executions.end
        fail = partial(end, "second", ExecutionStatus.FAILED, "a bug", settled=False)
        submit = client.catalog.requests.submit

        def submit_and_fail(*arguments: Any, **options: Any) -> RequestRecord:
            request = submit(*arguments, **options)
            fail()
            return request

        if fails == "before":
            fail()
        monkeypatch.setattr(client.catalog.requests, "submit", submit_and_fail)

        savepoint = client.trigger_savepoint(STREAM, label="broken")

        assert (savepoint.label, savepoint.batch_id) == ("broken", 4)
        assert client.list_requests(STREAM) == []

    @pytest.mark.parametrize("verb", ["trigger_checkpoint", "request_checkpoint", "request_savepoint", "stop"])
    def test_what_only_a_running_stream_can_do(self, client: Client, verb: str) -> None:
        with pytest.raises(RequestFailedError, match="is not running"):
            getattr(client, verb)(STREAM)

    def test_a_suspend_between_two_restarts(self, golden: GoldenStream, client: Client) -> None:
        die(golden)

        stopped = client.stop(STREAM, savepoint=False)

        assert (stopped.was_running, stopped.savepoint) == (False, None)
        assert client.describe_stream(STREAM).summary.status is StreamStatus.SUSPENDED

    def test_a_label_without_a_savepoint_is_refused(self, client: Client) -> None:
        with pytest.raises(OptionError, match="savepoint is False"):
            client.stop(STREAM, savepoint=False, label="mine")

    def test_keeping(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()

        client.tag(STREAM, "chk-1")
        promoted = client.promote(STREAM, "latest", label="promoted")
        client.release(STREAM, "chk-1")

        assert client.prefer_savepoint(STREAM, "promoted").snapshot_id == promoted.snapshot_id
        assert client.describe_snapshot(STREAM, "chk-1").holds == ()

    def test_a_preview_changes_nothing(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()
        golden.end()

        preview = client.preview_rewind(STREAM, start_from="chk-1")

        assert preview.plan.kind is RecoveryKind.RESTORE
        assert client.preview_rewind(STREAM, start_from="empty").plan.kind is RecoveryKind.START_EMPTY
        with pytest.raises(OptionError, match="state_partitions is 0"):
            client.preview_rewind(STREAM, start_from=StartFrom(state_partitions=0))
        assert client.describe_stream(STREAM).requests == ()

    def test_a_start_is_requested(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()
        golden.end()

        asked = client.request_start(STREAM, start_from=StartFrom("chk-1", accept_loss=True))

        assert (asked.kind, asked.status, asked.origin) == (RequestKind.START, RequestStatus.PENDING, "a notebook")
        assert asked.arguments["start_from"] == "chk-1"
        assert [each.request_id for each in client.describe_stream(STREAM).requests] == [asked.request_id]
        golden.stream.catalog.requests.fail_start(asked.request_id, "no such code")
        with pytest.raises(RequestFailedError, match="failed: no such code"):
            client.await_request(asked)

    def test_a_fork_into_a_new_stream_takes_over_the_settings(self, golden: GoldenStream, client: Client) -> None:
        golden.end()

        made = client.fork(STREAM, into="copy")

        assert (made.stream_id, made.batch_id) == ("copy", 4)
        copy = client.describe_stream("copy")
        assert copy.settings == client.describe_stream(STREAM).settings
        assert copy.record.live_directory == made.live_directory

    def test_an_import_into_another_deployment(self, golden: GoldenStream, client: Client, tmp_path: Path) -> None:
        golden.end()
        savepoint = client.trigger_savepoint(STREAM)
        places = {"storage": str(tmp_path / "staging/snapshots"), "live_root": str(tmp_path / "staging/live")}
        sinks = {str(sink["path"]): str(tmp_path / "staging/out") for sink in savepoint.properties["sinks"]}

        with Client(f"sqlite:///{tmp_path / 'staging.db'}", **places) as staging:
            made = staging.import_snapshot(
                savepoint.location or "", into="staged", outputs=sinks or {"ConsoleTable": "staging"}
            )

            assert (made.of_stream_id, made.batch_id) == (STREAM, 4)
            assert [each.stream_id for each in staging.list_streams()] == ["staged"]

    def test_examination(self, golden: GoldenStream, client: Client) -> None:
        golden.snapshot()
        golden.end()

        assert [each.passed for each in client.verify(STREAM, "all")] == [True]
        assert client.doctor(STREAM).diagnosis.can_resume
        assert client.doctor(STREAM, directory=str(golden.live)).diagnosis.batch_id == 4
        health = client.health(STREAM)
        assert any(message.startswith("restorability: PASS") for message in health.messages())

    def test_a_dry_run_removes_nothing(self, golden: GoldenStream, client: Client) -> None:
        snapshot = golden.snapshot()
        golden.end()
        shutil.copytree(golden.root / "snapshots" / STREAM, golden.root / "before")

        assert client.sweep(STREAM, older_than_ms=0).dry_run
        assert client.apply_retention(STREAM, dry_run=True).dry_run
        assert not client.clean_sinks(STREAM).deleted
        assert client.apply_retention(STREAM, state="CANCELED", dry_run=True).dry_run
        assert {each: report.failed for each, report in client.apply_retention_to_all(dry_run=True).items()} == {
            STREAM: ()
        }
        kept = client.apply_retention(STREAM, state="CANCELED")

        assert kept.deleted == ()
        assert [each.snapshot_id for each in client.list_snapshots(STREAM)] == [snapshot.snapshot_id]
        files = [{path.name for path in (golden.root / each).rglob("*")} for each in ("before", f"snapshots/{STREAM}")]
        assert files[0] == files[1]

    def test_a_desired_state(self, client: Client) -> None:
        assert client.desired_state(STREAM) is None

        client.set_desired_state(STREAM, DesiredState.SUSPENDED)

        row = client.desired_state(STREAM)
        assert row is not None
        assert (row.desired, row.origin) == (DesiredState.SUSPENDED, "a notebook")


class TestConnection:
    def test_the_repr_tells_the_catalog_without_its_password(self, golden: GoldenStream) -> None:
        assert repr(Client(url(golden), origin="me")) == f"Client({url(golden)!r}, origin='me')"

    def test_a_catalog_of_the_callers_stays_open(self, golden: GoldenStream) -> None:
        catalog = Catalog(url(golden))
        with Client(catalog) as client:
            assert client.catalog is catalog
        assert [each.stream_id for each in catalog.streams.all()] == [STREAM]

    def test_resources(self, golden: GoldenStream) -> None:
        class Resources:
            live_directory = str(golden.root / "live")

            def catalog(self) -> Catalog:
                return Catalog(url(golden))

            def storage(self) -> Any:
                return golden.stream.storage

        with Client.from_resources(Resources(), Resources(), Resources()) as client:
            assert client.trigger_savepoint(STREAM).batch_id == 4

    def test_resources_from_environment_variables(self, golden: GoldenStream, monkeypatch: pytest.MonkeyPatch) -> None:
        """Outside of a run Dagster leaves the name of the variable in its place."""
        monkeypatch.setenv("CATALOG", url(golden))
        monkeypatch.setenv("LIVE", str(golden.root / "live"))
        resources = (
            CheckpointCatalogResource(url=dg.EnvVar("CATALOG")),
            CheckpointStorageResource(path=str(golden.root / "snapshots")),
            StateBackendResource(live_directory=dg.EnvVar("LIVE")),
        )

        with Client.from_resources(*resources) as client:
            assert client.trigger_savepoint(STREAM).batch_id == 4

    def test_it_needs_neither_dagster_nor_spark(self, golden: GoldenStream) -> None:
        """A notebook beside the deployment has only this package."""
        golden.snapshot()
        golden.end()
        program = f"""
import sys
sys.modules["dagster"] = sys.modules["pyspark"] = None
from dagster_ckpt.client import Client
from dagster_ckpt.stream.start_from import StartFrom
with Client({url(golden)!r}) as client:
    print(client.trigger_savepoint("shop/orders").batch_id, client.verify("shop/orders")[0].passed)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

        assert (done.stdout.split(), done.stderr) == (["4", "True"], "")


class TestRebuildOfEverything:
    def test_snapshots_and_live_directories_alone_bring_every_stream_back(
        self, golden: GoldenStream, client: Client
    ) -> None:
        kept = golden.snapshot()
        golden.end(ExecutionStatus.SUSPENDED)
        lost = client.catalog.deployment_id
        (golden.root / "snapshots" / "no-stream").mkdir()
        storage = f"file://{golden.root / 'snapshots'}"
        live_root = str(golden.root / "live")

        with Client(f"sqlite:///{golden.root / 'new.db'}", storage=storage, live_root=live_root) as new:
            refused = new.rebuild_all()
            assert list(refused.refused) == [STREAM]
            assert lost in refused.refused[STREAM]
            assert new.catalog.streams.all() == []
            done = new.rebuild_all(take_over_deployment=lost)
            assert [each.stream_id for each in done.streams] == [STREAM]
            assert done.refused == {}
            assert [each.snapshot_id for each in new.list_snapshots(STREAM)] == [kept.snapshot_id]
            assert new.preview_rewind(STREAM).plan.to_batch == 4

    def test_a_client_without_a_storage_says_what_to_give(self, client: Client) -> None:
        with pytest.raises(OptionError, match="No storage was given"):
            client.rebuild_all()
