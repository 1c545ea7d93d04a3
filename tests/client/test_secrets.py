"""Nothing secret in catalog, snapshots, events, messages and descriptions: each place has its own planted secret."""

from __future__ import annotations

import stat
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.utils import infer_storage_options

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.desired_states import PreflightRecord
from dagster_ckpt.catalog.records import ExecutionStatus, RequestKind
from dagster_ckpt.client.connection import checked_target
from dagster_ckpt.client.launching import DriverLaunch, launch_driver
from dagster_ckpt.config.checkpoint_storage import (
    CustomCheckpointStorage,
    DeploymentStorage,
    FileSystemCheckpointStorage,
)
from dagster_ckpt.config.state_backend import CustomStateBackend
from dagster_ckpt.errors import OptionError, RequestFailedError, StorageAccessError
from dagster_ckpt.io.file_io import accessing
from dagster_ckpt.orchestration.metadata import snapshot_metadata
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle
from dagster_ckpt.stream.start_from import StartFrom
from tests.support.planted_secrets import Planted, files_below, raised_by
from tests.support.retention_shelf import STREAM, Shelf
from tests.support.verbs import trigger_savepoint

PLANTED = Planted()
plant = PLANTED.plant


def catalog_dump(root: Path) -> dict[str, str | bytes]:
    return {name: content for name, content in files_below(root).items() if name.startswith("catalog.db")}


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql+psycopg://u:{plant('password')}@127.0.0.1:1/db",
        f"postgresql+psycopg://127.0.0.1:1/db?user=u&password={plant('query')}",
        f"postgresql+psycopg://127.0.0.1:1/db?user=u&sslpassword={plant('ssl')}",
        f"postgresql+psycopg://u:ab@{plant('at')}@127.0.0.1:1/db",
        f"postgresql+psycopg://u:ab/{plant('slash')}@127.0.0.1:1/db",
        f"postgresql+psycopg://u:a?{plant('question')}@127.0.0.1:1/db",
        f"postgresql+psycopg://u:a#{plant('hash')}@127.0.0.1:1/db",
        f"postgresql+psycopg://u:{plant('port')}@h:port/db",
        f"postgresql+nodriver://u:{plant('driver')}@h/db",
        f"mysql://u:{plant('mysql')}@h/db",
        f"mysql://h/db?password={plant('mysqlquery')}",
        f"host=h user=u password={plant('libpq')}",
        f" postgresql+psycopg://u:{plant('space')}@h/db",
    ],
)
def test_a_catalog_that_cannot_be_opened_says_nothing_of_its_password(url: str) -> None:
    PLANTED.assert_in_none({"error": raised_by(lambda: Catalog(url))})


def test_an_at_sign_in_the_password_is_named_as_the_mistake() -> None:
    with pytest.raises(Exception, match="write it as %40"):
        Catalog("postgresql+psycopg://u:ab@cd@127.0.0.1:1/db")


class Guarded(MemoryFileSystem):
    """A file system in memory that wants a user, as sftp does."""

    protocol = "guarded"
    store: ClassVar[dict[str, Any]] = {}
    password = plant("storage")
    cacheable = False

    def __init__(self, username: str | None = None, password: str | None = None, **how: Any) -> None:
        super().__init__(**how)
        if (username, password) != ("user", self.password):
            raise PermissionError(f"cannot log in to guarded://{username}:{password}@host")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        found = infer_storage_options(path)
        return {name: found[name] for name in ("username", "password") if name in found}


fsspec.register_implementation("guarded", Guarded, clobber=True)


def test_the_user_of_a_storage_opens_it_and_is_in_no_snapshot_no_record_and_no_description(tmp_path: Path) -> None:
    storage = FileSystemCheckpointStorage(f"guarded://user:{Guarded.password}@host/snapshots", 64).configure(
        # What the deployment adds does not lose it.
        DeploymentStorage(savepoint_path="guarded://host/savepoints")
    )
    shelf = Shelf.at(tmp_path, storage=storage)
    snapshot = shelf.checkpoint()
    savepoint = trigger_savepoint(shelf.stream, origin="a test")

    assert snapshot.location == f"guarded://host/snapshots/{STREAM}/chk-1"
    # It is found again by what is kept.
    assert shelf.stream.store.manifest(snapshot.location).header.snapshot_id == snapshot.snapshot_id
    assert shelf.stream.store.manifest(str(savepoint.location)).header.snapshot_id == savepoint.snapshot_id
    stored = {name: file.getvalue() for name, file in Guarded.store.items()}
    assert stored
    wrong = FileSystemCheckpointStorage(f"guarded://user:{plant('wrong')}@host/snapshots")
    PLANTED.assert_in_none(
        {
            "names": str(list(stored)),
            **stored,
            **catalog_dump(tmp_path),
            "storage": repr(storage) + str(storage.describe()),
            "stream": repr(shelf.stream) + repr(snapshot) + repr(savepoint) + repr(storage.get_checkpoint_path()),
            "metadata": repr(snapshot_metadata(snapshot)),
            "no such snapshot": raised_by(lambda: shelf.stream.store.manifest(f"{snapshot.location}9")),
            "wrong password": raised_by(lambda: open_store(wrong, STREAM).check_access()),
        }
    )
    shelf.stream.catalog.close()


@pytest.mark.parametrize("scheme", ["sftp", "ftp", "smb", "webhdfs", "http"])
def test_a_storage_that_cannot_be_reached_says_nothing_of_its_user(scheme: str) -> None:
    url = f"{scheme}://user:{plant(scheme)}@127.0.0.1:1/share/snapshots"
    storage = FileSystemCheckpointStorage(url)
    PLANTED.assert_in_none(
        {
            "description": repr(storage) + str(storage.describe()) + str(storage.get_checkpoint_path()),
            "error": raised_by(lambda: open_store(storage, STREAM).check_access()),
        }
    )


@pytest.mark.parametrize(
    "name_it",
    [
        StartFrom,
        partial(checked_target, None),
        lambda url: open_store(FileSystemCheckpointStorage("memory://h/snapshots"), STREAM).manifest(url),
        lambda url: StreamHandle(STREAM, STREAM, STREAM, None, None, None, None, url),  # type: ignore[arg-type]
    ],
)
def test_a_location_that_names_a_user_is_refused(name_it: Callable[[str], Any]) -> None:
    url = f"sftp://u:{plant('location')}@h/snapshots/chk-1"
    with pytest.raises((OptionError, StorageAccessError), match="contains a user name"):
        name_it(url)
    PLANTED.assert_in_none({"error": raised_by(lambda: name_it(url))})


def test_what_a_driver_of_a_file_system_says_is_told_without_its_secrets() -> None:
    def fails() -> None:
        with accessing("read", f"s3://bucket/x?password={plant('where')}"):
            raise OSError(f"GET https://s3/x?X-Amz-Signature={plant('presigned')} failed")

    PLANTED.assert_in_none({"error": raised_by(fails)})


def launch(*words: str, root: Path, **how: Any) -> DriverLaunch:
    return DriverLaunch(words, log_directory=str(root / "logs"), **how)


def test_a_command_is_kept_and_shown_without_its_secrets(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    says = f"cannot reach jdbc:postgresql://u:{plant('log')}@h/db"
    conf = ("--conf", f"spark.hadoop.fs.s3a.secret.key={plant('conf')}", "--password", plant("option"))
    how = launch(
        *(sys.executable, "-c", f"raise SystemExit({says!r})", *conf),
        root=tmp_path,
        environment={"AWS_SECRET_ACCESS_KEY": plant("environment")},
    )
    request = shelf.stream.catalog.requests.submit(STREAM, RequestKind.START, arguments={}, origin="a test")

    driver = launch_driver(shelf.stream, how, request, run_id="run")

    deadline = time.monotonic() + 60
    while driver.failure() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    no_such = launch("no-such-program", *conf, root=tmp_path)
    PLANTED.assert_in_none(
        {
            "description": repr(how),
            "handle": repr(driver.record),
            "failure": str(driver.failure()),
            "no such program": raised_by(lambda: launch_driver(shelf.stream, no_such, request, run_id="run")),
            "braces": raised_by(lambda: launch("x", "{oops}", *conf, root=tmp_path)),
            "no list": raised_by(lambda: DriverLaunch(f"x --password {plant('text')}", log_directory="/x")),
            **catalog_dump(tmp_path),
        }
    )
    assert "spark.hadoop.fs.s3a.secret.key=***" in driver.record.command
    with pytest.raises(RequestFailedError, match="no-such-program"):
        launch_driver(shelf.stream, no_such, request, run_id="run")
    log = Path(driver.record.log)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700
    shelf.stream.catalog.close()


def test_whatever_ends_up_as_a_reason_in_the_catalog_is_kept_without_its_secrets(tmp_path: Path) -> None:
    shelf = Shelf.at(tmp_path)
    catalog = shelf.stream.catalog

    def reason(name: str) -> str:
        return f"ValueError: cannot connect to jdbc:postgresql://u:{plant(name)}@h/db, password={plant(name)}"

    request = catalog.requests.submit(STREAM, RequestKind.START, arguments={}, origin="a test")
    catalog.requests.fail_start(request.request_id, reason("request"))
    snapshot = shelf.checkpoint()
    catalog.snapshots.verified(snapshot.snapshot_id, reason("verified"))
    catalog.executions.end_unheld("first", ExecutionStatus.FAILED, reason("execution"))
    catalog.executions.record_terminal_failure("first", reason("gaveup"))
    row = catalog.desired_states.ensure(STREAM, origin="a test")
    catalog.desired_states.advance(row, upgrade=None, alert=reason("alert"), request_id=None)
    catalog.desired_states.note_preflight(STREAM, PreflightRecord("2", False, reason("preflight"), None, 1))

    ended = catalog.executions.get("first")
    assert ended.reason == "ValueError: cannot connect to jdbc:postgresql://***@h/db, password=***"
    events = catalog.events.after(0)
    assert any(event.payload.get("reason") == ended.reason for event in events)
    PLANTED.assert_in_none({"events": repr(events), **catalog_dump(tmp_path)})
    catalog.close()


def test_settings_of_backends_and_storages_are_shown_by_name() -> None:
    backend = CustomStateBackend("a.B", {"spark.sql.streaming.stateStore.redis.password": plant("backend")})
    options = {"key": "k", "secret": plant("s3")}
    storage = FileSystemCheckpointStorage("s3://bucket/x", storage_options=options)
    custom = CustomCheckpointStorage("builtins:int", {"password": plant("factory")})
    PLANTED.assert_in_none(
        {
            "backend": repr(backend) + str(backend.describe()),
            "storage": repr(storage) + str(storage.describe()),
            "custom": repr(custom) + str(custom.describe()),
            "factory": raised_by(lambda: open_store(custom, STREAM)),
            "path": raised_by(lambda: FileSystemCheckpointStorage(f"//u:{plant('path')}@h")),
        }
    )
    assert backend.spark_settings()["spark.sql.streaming.stateStore.redis.password"] in PLANTED.secrets


def test_the_file_of_a_catalog_is_for_its_owner_and_its_folder_is_made(tmp_path: Path) -> None:
    """Known defect 10: the folder that `dg scaffold` names does not exist."""
    file = tmp_path / "streams/deep/catalog.db"
    catalog = Catalog(f"sqlite:///{file}")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in file.parent.iterdir()}
    catalog.close()
    assert set(modes.values()) == {0o600}, modes
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "Create its folder" in raised_by(lambda: Catalog(f"sqlite:///{tmp_path}/file/catalog.db"))
