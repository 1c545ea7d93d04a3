"""Each class of files of a live directory, altered in each way: the doctor finds it, or a resume does not need it.

On what Spark 3.5 to 4.3 wrote, with the digests of the newest snapshot at hand as a stream has them. No JVM.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3

from dagster_ckpt.snapshot.entries import FileEntry
from dagster_ckpt.spark.checkpoint_dir.cut import cut
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import KnownQuery
from dagster_ckpt.spark.doctor.contents import KnownSnapshot
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.doctor.finding import Severity
from tests.golden.live_directories import unpacked
from tests.support.thorough import either

VERSIONS = ["3.5", "4.0", "4.1", "4.2", "4.3"]
MUTATIONS: dict[str, Callable[[bytes], bytes | None]] = {
    "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0xFF]) + data[len(data) // 2 + 1 :],
    "cut": lambda data: data[: len(data) // 2],
    "zeroed": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "deleted": lambda data: None,
}


def class_of(path: str) -> str:
    """`state/0/1/7_<uuid>.changelog` becomes `state/#/#/#.changelog`."""
    name = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "", path)
    return re.sub(r"\d+", "#", name)


def known_of(live: LiveDirectory) -> tuple[KnownQuery, KnownSnapshot]:
    """What a stream that took a snapshot just now would know."""
    taken = cut(live, carry_in_flight=True)
    entries = [
        FileEntry(blake3(file.read()).hexdigest(), file.path, file.size, file.identity, None, None, 0)
        for file in taken.needed
    ]
    return KnownQuery.of(None, taken.properties), KnownSnapshot("file:///snapshots/chk-1", taken.batch_id, entries)


def samples(live: LiveDirectory, root: Path) -> Iterator[tuple[str, bool]]:
    """The oldest and the newest file of each class, and whether a resume needs it."""
    needed = {file.path for file in cut(live, carry_in_flight=True).needed}
    classes: dict[tuple[str, bool], list[str]] = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file() and path.stat().st_size):
        name = path.relative_to(root).as_posix()
        classes.setdefault((class_of(name), name in needed), []).append(name)
    for (_, is_needed), names in classes.items():
        for name in either(quick={names[-1]}, thorough={names[0], names[-1]}):
            yield name, is_needed


def is_harmless(live: LiveDirectory, name: str, how: str) -> bool:
    """Whether a resume does without a needed file."""
    if name.endswith(".crc"):
        # Spark verifies nothing without it, and reads algorithm, value and size of it.
        return how in ("deleted", "flipped")
    if how != "deleted":
        return False
    # The same version can be built from other files. Without the last commit, the planned batch runs again.
    taken = cut(live, carry_in_flight=True)
    return name not in {file.path for file in taken.needed} or taken.in_flight is not None


# Those between are read by `make test-state`.
OF_MAKE_TEST = ("3.5", "4.1", "4.3")


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=() if each in OF_MAKE_TEST else pytest.mark.state) for each in VERSIONS],
)
def golden(request: pytest.FixtureRequest) -> Iterator[Path]:
    with unpacked(request.param) as live:
        yield live


@pytest.mark.thorough(but="4.1")
def test_each_mutation_of_each_class_of_files_is_found_or_is_of_a_file_that_no_resume_needs(golden: Path) -> None:
    missed, alarms, tried = [], [], 0
    for root in sorted(golden.iterdir()):
        live = LiveDirectory(str(root))
        known, snapshot = known_of(live)
        assert diagnose(live, snapshot=snapshot, known=known).can_resume, root
        for name, is_needed in samples(live, root):
            path, data = root / name, (root / name).read_bytes()
            for how, mutation in MUTATIONS.items():
                mutated = mutation(data)
                path.unlink() if mutated is None else path.write_bytes(mutated)
                tried += 1
                found = diagnose(live, snapshot=snapshot, known=known, looks_back=False)
                is_told = any(item.path == name and item.severity is not Severity.NOTE for item in found.findings)
                if is_needed and found.can_resume and not is_told and not is_harmless(live, name, how):
                    missed.append((root.name, name, how))
                # Spark reads its checksum file of a needed one, though no snapshot needs it.
                if not is_needed and not found.can_resume and not name.endswith(".crc"):
                    alarms.append((root.name, name, how))
                path.write_bytes(data)
    assert tried > either(quick=150, thorough=300)
    assert missed == []
    assert alarms == []


FOLDERS = ["", "/{operator}", "/{operator}/0", "/{operator}/{last}"]


@pytest.mark.thorough(but="4.1-*")
@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_no_folder_of_the_state_can_vanish_unnoticed(golden: Path, how: str) -> None:
    """Also by the check of a start, and by a cut, which would make a snapshot without state."""
    missed = []
    for root in sorted(golden.iterdir()):
        live, saved = LiveDirectory(str(root)), golden.parent / "saved"
        known, _ = known_of(live)
        for operator in sorted(path.name for path in (root / "state").iterdir()):
            last = max(path.name for path in (root / "state" / operator).iterdir() if path.name.isdecimal())
            for folder in FOLDERS:
                where = root / f"state{folder.format(operator=operator, last=last)}"
                shutil.copytree(where, saved)
                shutil.rmtree(where)
                if how == "emptied":
                    where.mkdir()
                found = inspect_live_directory(live, known)
                # Of a directory of plain Spark nothing else is known; a folder that is gone says nothing.
                is_told = inspect_live_directory(live).status is LiveStatus.BROKEN or (how, folder) == ("deleted", "")
                if found.status is not LiveStatus.BROKEN or diagnose(live, known=known).can_resume or not is_told:
                    missed.append((root.name, str(where.relative_to(root)), how))
                shutil.rmtree(where, ignore_errors=True)
                shutil.copytree(saved, where)
                shutil.rmtree(saved)
        assert diagnose(live, known=known).can_resume
    assert missed == []
