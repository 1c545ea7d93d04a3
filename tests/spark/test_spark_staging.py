import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fsspec
import pytest
from live_files import ROCKSDB, LiveFiles, snapshot_zip

from dagster_ckpt.errors import CutOvertakenError
from dagster_ckpt.snapshot.reuse import Source
from dagster_ckpt.spark.checkpoint_dir import staging
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.staging import StagedCut, staged_cut


@pytest.fixture
def files(tmp_path: Path) -> LiveFiles:
    made = LiveFiles(tmp_path / "stream" / "live-0")
    made.batches(1)
    made.operator()
    made.put("state/0/0/1.delta", b"one")
    made.put("state/0/0/2.delta", b"two")
    return made


@pytest.fixture(params=["in memory", "open", "as links"], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "in memory":
        monkeypatch.setattr(staging, "HELD_IN_MEMORY_BYTES", 0)
    if request.param == "as links":
        monkeypatch.setattr(staging, "HELD_OPEN_FILES", 0)
    return str(request.param)


def held(staged: StagedCut) -> Sequence[Source]:
    return staged.stage(staged.files)


def contents(files: Sequence[Source]) -> dict[str, bytes]:
    return {file.path: file.read() for file in files}


def test_held_files_survive_a_purge(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        kept = held(staged)
        shutil.rmtree(files.root)
        found = contents(kept)

    assert found["state/0/0/2.delta"] == b"two"
    assert found["commits/1"].startswith(b"v1")


def test_many_held_files_are_links_and_cost_no_bytes(files: LiveFiles, how: str) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        held(staged)
        assert (files.root / "state/0/0/2.delta").stat().st_nlink == (2 if how == "as links" else 1)


def test_files_are_held_open_no_longer_than_the_cut(files: LiveFiles) -> None:
    def open_files() -> set[str]:
        return {os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()}

    with staged_cut(files.live, carry_in_flight=False) as staged:
        kept = held(staged)
        # What may be read twice begins at the beginning each time.
        assert contents(kept) == contents(kept)
    assert [name for name in open_files() if name.startswith(str(files.root))] == []


def test_a_file_of_two_names_is_held_for_both(files: LiveFiles, how: str) -> None:
    (files.root / "state/0/0/1.delta").unlink()
    os.link(files.root / "state/0/0/2.delta", files.root / "state/0/0/1.delta")
    with staged_cut(files.live, carry_in_flight=False) as staged:
        kept = held(staged)
        assert (files.root / "state/0/0/2.delta").stat().st_nlink == (3 if how == "as links" else 2)
        shutil.rmtree(files.root)
        found = contents(kept)

    assert found["state/0/0/1.delta"] == found["state/0/0/2.delta"] == b"two"


def test_what_is_not_read_is_not_held(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        (one,) = staged.stage([file for file in staged.files if file.path == "state/0/0/2.delta"])
        files.remove("state/0/0/1.delta")

        assert one.read() == b"two"


def test_held_files_do_not_change_when_spark_replaces_them(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        kept = held(staged)
        files.live.folder.write("state/0/0/2.delta", [b"replayed"])

        assert contents(kept)["state/0/0/2.delta"] == b"two"


def test_nothing_is_left_behind(files: LiveFiles) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        held(staged)

    assert [path.name for path in files.root.parent.iterdir()] == ["live-0"]


@pytest.mark.parametrize("change", [b"new", b"other", None])
def test_a_file_that_changed_since_the_cut_is_noticed(files: LiveFiles, change: bytes | None) -> None:
    with staged_cut(files.live, carry_in_flight=False) as staged:
        if change is None:
            files.remove("state/0/0/1.delta")
        else:
            files.live.folder.write("state/0/0/1.delta", [change])

        with pytest.raises(CutOvertakenError, match=r"1\.delta was (purged|replaced)"):
            held(staged)

    assert [path.name for path in files.root.parent.iterdir()] == ["live-0"]


def test_where_links_are_impossible_files_are_copied(files: LiveFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: object, target: object, **_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_links)
    with staged_cut(files.live, carry_in_flight=False) as staged:
        kept = held(staged)
        shutil.rmtree(files.root)

        assert contents(kept)["state/0/0/1.delta"] == b"one"


def test_what_a_killed_process_held_is_let_go_by_the_next(files: LiveFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import os, sys\n"
        "from dagster_ckpt.spark.checkpoint_dir import staging\n"
        "from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory\n"
        "from dagster_ckpt.spark.checkpoint_dir.staging import staged_cut\n"
        "staging.HELD_IN_MEMORY_BYTES = staging.HELD_OPEN_FILES = 0\n"
        "with staged_cut(LiveDirectory(sys.argv[1]), carry_in_flight=False) as staged:\n"
        "    staged.stage(staged.files)\n"
        "    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(files.root)], check=False)
    assert len(list(files.root.parent.iterdir())) == 2
    monkeypatch.setattr(staging, "HELD_IN_MEMORY_BYTES", 0)
    monkeypatch.setattr(staging, "HELD_OPEN_FILES", 0)

    with staged_cut(files.live, carry_in_flight=False) as one, staged_cut(files.live, carry_in_flight=False) as two:
        held(one)
        held(two)
        assert len(list(files.root.parent.iterdir())) == 3


def test_in_an_object_store_only_files_that_may_change_are_copied(tmp_path: Path) -> None:
    files = LiveFiles(tmp_path / "live-0")
    files.batches(1, provider=ROCKSDB)
    files.operator()
    files.put("state/0/0/1.zip", snapshot_zip(("000001-aa.sst", 3)))
    files.put("state/0/0/SSTs/000001-aa.sst", b"abc")
    files.put("state/0/0/2.changelog", b"log")
    memory = fsspec.filesystem("memory")
    memory.put(str(files.root), "/staging/live-0", recursive=True)
    live = LiveDirectory("memory://staging/live-0")

    with staged_cut(live, carry_in_flight=False) as staged:
        kept = held(staged)
        memory.rm("/staging/live-0/state/0/0/2.changelog")
        found = contents(kept)

    assert found["state/0/0/2.changelog"] == b"log"
    assert found["state/0/0/SSTs/000001-aa.sst"] == b"abc"
    assert {file.folder.url for file in kept if file.identity} == {"memory://staging/live-0"}
    live.delete()
    assert not live.exists()
