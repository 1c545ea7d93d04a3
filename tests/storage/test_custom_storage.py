"""Storages of a user's own: the example of docs/custom-storage.md, and what becomes of factories."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dagster_ckpt.config.checkpoint_storage import CustomCheckpointStorage, DeploymentStorage
from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.io.custom import CustomFileIO, StoredObject
from dagster_ckpt.io.memory import MemoryFileIO
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.testing.trial_snapshots import FILES

ROOT = Path(__file__).parents[2]
HERE = __name__


def test_the_example_of_the_documentation_passes_the_contract(tmp_path: Path) -> None:
    page = (ROOT / "docs/custom-storage.md").read_text()
    for name, code in re.findall(r"```python\n# (\w+\.py)\n(.*?)```", page, re.DOTALL):
        (tmp_path / name).write_text(code)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(tmp_path),
            "test_blob_table.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^(\d+) passed", done.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= 25


def test_the_contract_is_not_imported_with_the_package() -> None:
    code = "import sys, dagster_ckpt.testing, dagster_ckpt.snapshot.opening; sys.exit('pytest' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=120)


class Shelf(MemoryFileIO):
    """A place that is asked for some of what the deployment says."""

    def __init__(
        self, *, stream_id: str, label: str, savepoint_path: str = "nowhere", write_buffer_size: int = 1
    ) -> None:
        super().__init__(f"shelf://{label}")
        self.asked = (stream_id, label, savepoint_path, write_buffer_size)


MADE: list[Shelf] = []


def make_shelf(*, stream_id: str, label: str, savepoint_path: str = "nowhere", write_buffer_size: int = 1) -> Shelf:
    MADE.append(
        Shelf(stream_id=stream_id, label=label, savepoint_path=savepoint_path, write_buffer_size=write_buffer_size)
    )
    return MADE[-1]


def test_what_the_settings_leave_out_and_the_factory_asks_for_comes_from_the_deployment() -> None:
    deployment = DeploymentStorage(checkpoint_path="file:///c", savepoint_path="file:///s", write_buffer_size=7)
    given = CustomCheckpointStorage(f"{HERE}:make_shelf", {"label": "a", "write_buffer_size": 9})
    configured = pickle.loads(pickle.dumps(given.configure(deployment)))
    open_store(configured, "stream")
    assert MADE[-1].asked == ("stream", "a", "file:///s", 9)
    open_store(given, "stream")
    assert MADE[-1].asked == ("stream", "a", "nowhere", 9)


def test_savepoints_go_where_the_deployment_says_or_beside_the_checkpoints(tmp_path: Path, stream_of) -> None:
    given = CustomCheckpointStorage(f"{HERE}:make_shelf", {"label": "b"})
    stream = stream_of(open_store(given, "stream"))
    assert stream.checkpoint(1, FILES) == "shelf://b/stream/chk-1"
    assert re.match("shelf://b/savepoint-", stream.savepoint(1, FILES))
    stream = stream_of(open_store(given.configure(DeploymentStorage(savepoint_path=f"file://{tmp_path}")), "stream"))
    savepoint = stream.savepoint(1, FILES)
    assert savepoint.startswith(f"file://{tmp_path}/savepoint-")
    assert stream.restored(savepoint) == FILES


def test_the_threshold_of_the_deployment_holds_there_too(stream_of) -> None:
    given = CustomCheckpointStorage(f"{HERE}:make_shelf", {"label": "c"})
    stream = stream_of(open_store(given.configure(DeploymentStorage(file_state_size_threshold=300)), "stream"))
    location = stream.checkpoint(1, {"below": b"b" * 299, "at": b"a" * 300})
    where = {entry.path: entry.object for entry in stream.store.manifest(location).files}
    assert where["below"] is None
    assert str(where["at"]).startswith("../shared/")


class NoPlace(CustomFileIO):
    """One whose service is away."""

    def __init__(self, *, stream_id: str, url: str = "away://service") -> None:
        self.url = url

    def put(self, name, data) -> None:
        raise TimeoutError("the service is away")

    def get(self, name):
        raise TimeoutError("the service is away")

    def remove(self, name) -> None:
        raise TimeoutError("the service is away")

    def objects(self, prefix) -> list[StoredObject]:
        raise TimeoutError("the service is away")


def test_what_the_place_raises_is_told_with_the_name_of_the_object(stream_of) -> None:
    stream = stream_of(open_store(CustomCheckpointStorage(f"{HERE}:NoPlace"), "stream"))
    with pytest.raises(StorageAccessError, match=r"Cannot write away://service/stream/probe.*the service is away"):
        stream.store.check_access()
    with pytest.raises(StorageAccessError, match=r"Cannot list away://service/stream.*the service is away"):
        stream.store.checkpoints()
    with pytest.raises(StorageAccessError, match=r"Cannot write away://service/stream/shared/1-.*the service is away"):
        stream.checkpoint(1, FILES)


def test_a_place_whose_url_is_no_url_is_refused() -> None:
    with pytest.raises(OptionError, match="is 'away://service//x/'; write it as 'away://service/x'"):
        open_store(CustomCheckpointStorage(f"{HERE}:NoPlace", {"url": "away://service//x/"}), "stream")


def test_a_place_that_lacks_a_verb_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"neither a FileIO nor a SnapshotStore \(it has no check_access"):
        open_store(CustomCheckpointStorage("builtins:dict"), "stream")
