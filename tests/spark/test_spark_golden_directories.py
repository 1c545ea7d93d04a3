"""Live directories that each version of Spark wrote (tests/golden) are read by this one.

Every directory is inspected, examined, adopted (which takes a snapshot), verified and exported. Spark continues a slice
of them in the main suite, and all of them in `make test-upgrades`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dagster_ckpt import Client
from dagster_ckpt.spark.checkpoint_dir.inspect import LiveStatus, describe_checkpoint, inspect_live_directory
from dagster_ckpt.spark.checkpoint_dir.layout import LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.checkpoint_dir.restore import clone
from dagster_ckpt.spark.doctor.diagnosis import diagnose
from dagster_ckpt.spark.doctor.finding import Code
from dagster_ckpt.spark.versions import RELEASES, installed_release
from tests.golden.live_directories import GOLDEN, QUERIES, ROWS, WRITTEN, lay_input, run, unpacked

MINORS = [release.minor for release in RELEASES]
# Bytes of all archives in the repository.
MOST = 200_000
EXPECTED = json.loads(ROWS.read_text())
# The main suite continues these of the oldest Spark and of its own.
SLICE = ("pairs-heap", "windows-rocksdb")


def written(minor: str) -> list[str]:
    """The queries that a version of Spark can run."""
    (release,) = (each for each in RELEASES if each.minor == minor)
    return [name for name, query in QUERIES.items() if query.needed <= release.features]


CASES = [(minor, name) for minor in MINORS for name in written(minor)]


@pytest.fixture(scope="module")
def archives() -> Iterator[dict[str, Path]]:
    with ExitStack() as stack:
        yield {minor: stack.enter_context(unpacked(minor)) for minor in MINORS}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("adopting")
    places = {name: f"file://{folder}/{name}" for name in ("storage", "live_root")}
    with Client(catalog=f"sqlite:///{folder}/catalog.db", **places) as client:
        yield client


def adopted(client: Client, live: Path, folder: Path) -> LiveDirectory:
    """A new directory, exported from the snapshot that adopting an old one has taken."""
    stream = folder.name
    adoption = client.adopt(stream, checkpoint_location=str(live))
    assert adoption.diagnosis.findings == ()
    assert adoption.snapshot is not None
    assert adoption.snapshot.batch_id == WRITTEN - 1
    (checked,) = client.verify(stream, "latest")
    assert checked.problems == ()
    client.export(stream, to=str(folder / "exported"))
    return LiveDirectory(str(folder / "exported"))


def test_the_archives_are_small_and_whole(archives: dict[str, Path]) -> None:
    assert sum((GOLDEN / f"spark-{minor}.tar.xz").stat().st_size for minor in MINORS) < MOST
    for minor, folder in archives.items():
        assert sorted(path.name for path in folder.iterdir()) == sorted(written(minor))


@pytest.mark.core
@pytest.mark.parametrize(("minor", "name"), CASES)
def test_it_is_inspected_examined_adopted_and_exported(
    client: Client, archives: dict[str, Path], tmp_path: Path, minor: str, name: str
) -> None:
    live = LiveDirectory(str(archives[minor] / name))

    state = inspect_live_directory(live)
    diagnosis = diagnose(live)
    exported = adopted(client, archives[minor] / name, tmp_path)

    assert (state.status, state.batch_id) == (LiveStatus.GOOD, WRITTEN - 1)
    assert (diagnosis.findings, diagnosis.good_back_to) == ((), WRITTEN - 1)
    assert inspect_live_directory(exported).status is LiveStatus.GOOD
    found = {path: exported.folder.read(path) for path, _ in exported.folder.find()}
    # Operators name the place of their state schema.
    same = {path: data for path, data in found.items() if b"/_stateSchema/" not in data}
    assert same == {path: live.folder.read(path) for path in same}


@pytest.mark.parametrize(("minor", "name"), CASES)
def test_it_says_which_spark_wrote_it(archives: dict[str, Path], minor: str, name: str) -> None:
    described = describe_checkpoint(LiveDirectory(str(archives[minor] / name)))

    oldest = described.written_by.removeprefix("Spark ").split()[0]
    assert described.written_by.endswith("or older" if minor == "3.5" else "or later")
    assert MINORS.index(oldest) <= MINORS.index(minor)
    assert MINORS.index(described.oldest_spark.removeprefix("Spark ")) <= MINORS.index(minor)


@pytest.mark.parametrize("name", written("3.5"))
def test_the_schemas_of_spark_3_5_allow_nulls_afterwards_and_stay_as_they_are_otherwise(
    archives: dict[str, Path], tmp_path: Path, name: str
) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    clone(LiveDirectory(str(archives["3.5"] / name)), live, carry_state=False)
    schemas = {path: path.read_bytes() for path in (tmp_path / "live").rglob("schema")}
    assert schemas

    changed = widen_schemas(live.folder, WRITTEN - 1, nullcontext)

    assert bool(changed) == any(NOT_NULL in schema for schema in schemas.values())
    for path, before in schemas.items():
        assert bare(path.read_bytes()) == bare(before)
        assert NOT_NULL not in path.read_bytes()
    assert diagnose(live).findings == ()
    assert widen_schemas(live.folder, WRITTEN - 1, nullcontext) == []


@pytest.mark.parametrize("word", [b'"nullable"', b'"fields"', b'"type":"struct"', b'"name"'])
def test_a_schema_of_spark_3_5_without_what_spark_requires_is_damaged(
    archives: dict[str, Path], tmp_path: Path, word: bytes
) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    clone(LiveDirectory(str(archives["3.5"] / "pairs-heap")), live, carry_state=False)
    schema = min((tmp_path / "live").rglob("schema"))
    schema.write_bytes(schema.read_bytes().replace(word, word[:2] + b"~" + word[3:], 1))

    assert Code.SCHEMA_UNREADABLE in {finding.code for finding in diagnose(live).findings}


def test_the_schemas_of_later_versions_are_left_as_they_are(archives: dict[str, Path]) -> None:
    for minor, name in CASES:
        if minor != "3.5":
            assert widen_schemas(LiveDirectory(str(archives[minor] / name)).folder, WRITTEN - 1, nullcontext) == []


NOT_NULL = b'"nullable":false'


def bare(schema: bytes) -> bytes:
    """Without what may change: whether a column may be null, and with it the length of the text."""
    return re.sub(rb"..(?=\{\"type\":\"struct\",)", b"", schema.replace(NOT_NULL, b'"nullable":true'), flags=re.DOTALL)


def _slice(minor: str, name: str) -> bool:
    return name in SLICE and minor in ("3.5", installed_release().minor)


@pytest.mark.thorough(but="3.5-windows-rocksdb")
@pytest.mark.spark
@pytest.mark.parametrize(
    ("minor", "name"),
    [
        pytest.param(minor, name, marks=() if _slice(minor, name) else (pytest.mark.upgrades,))
        for minor, name in CASES
        if MINORS.index(minor) <= MINORS.index(installed_release().minor)
    ],
)
def test_spark_continues_it_to_the_rows_of_the_uninterrupted_run(
    spark: SparkSession, archives: dict[str, Path], tmp_path: Path, minor: str, name: str
) -> None:
    live = LiveDirectory(str(tmp_path / "live"))
    clone(LiveDirectory(str(archives[minor] / name)), live, carry_state=False)
    widen_schemas(live.folder, WRITTEN - 1, nullcontext)

    rows = run(spark, QUERIES[name], live, lay_input(tmp_path / "input"))

    assert rows == {batch: expected for batch, expected in EXPECTED[name].items() if int(batch) >= WRITTEN}
