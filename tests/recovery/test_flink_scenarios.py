"""Flink's scenarios of stores, subsumption, retention and claim: each on every storage and every catalog."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from scenario_script import Scenario
from sqlalchemy import create_engine, make_url, text

from dagster_ckpt.config.checkpoint_storage import (
    CheckpointStorage,
    FileSystemCheckpointStorage,
    JobManagerCheckpointStorage,
)
from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.modes import TerminalState
from tests.support.retention_shelf import Shelf

HERE = Path(__file__).parent
CASES = yaml.safe_load((HERE / "scenarios.yaml").read_text(encoding="utf-8"))
STEPPED = [case for case in CASES if "steps" in case]
[MATRIX] = [case["matrix"] for case in CASES if "matrix" in case]
ENDS = [(cleanup, state) for cleanup in MATRIX for state in MATRIX[cleanup]]
STORAGES = ["file", "memory", "s3", "jobmanager"]
# Every storage and every catalog; they do not know of each other, so not every pair.
PLACES = [*((storage, "sqlite") for storage in STORAGES), ("file", "postgresql")]
STATED = {"holds", "whole", "broken", "deleting", "recovers", "in_storage", "bytes_left"}


@pytest.fixture
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStorage:
    name = uuid.uuid4().hex
    if request.param == "jobmanager":
        return JobManagerCheckpointStorage(savepoint_path=f"file://{tmp_path}/savepoints")
    options: dict[str, Any] = {}
    if request.param == "s3":
        import s3fs

        options = request.getfixturevalue("s3_options")
        s3fs.S3FileSystem(**options).mkdir(name)
    root = {"file": f"file://{tmp_path}", "memory": f"memory://{name}", "s3": f"s3://{name}"}[request.param]
    return FileSystemCheckpointStorage(f"{root}/c", 64, savepoint_path=f"{root}/s", storage_options=options)


@pytest.fixture(scope="module")
def postgres_catalog(postgres: str) -> str:
    server, name = make_url(postgres), f"scenarios_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine.dispose()
    return server.set(database=name).render_as_string(hide_password=False)


@pytest.fixture
def catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'catalog.db'}"
    url: str = request.getfixturevalue("postgres_catalog")
    engine = create_engine(url)
    with engine.begin() as connection:
        # A new schema is far cheaper than a new database.
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return url


@pytest.fixture
def opened() -> Iterator[list[Scenario]]:
    scenarios: list[Scenario] = []
    yield scenarios
    for scenario in scenarios:
        scenario.shelf.stream.catalog.close()


@pytest.mark.thorough(but="*-file-sqlite")
@pytest.mark.parametrize(("storage", "catalog_url"), PLACES, indirect=True, ids=["-".join(place) for place in PLACES])
@pytest.mark.parametrize("case", STEPPED, ids=lambda case: f"{case['scenario']}: {case['says']}")
def test_scenario(
    case: dict[str, Any], storage: CheckpointStorage, catalog_url: str, tmp_path: Path, opened: list[Scenario]
) -> None:
    shelf = Shelf.at(tmp_path, num_retained=case.get("num_retained", 9), storage=storage, catalog_url=catalog_url)
    if case.get("count_savepoints", False):
        shelf.stream = replace(shelf.stream, options=replace(shelf.stream.options, count_savepoints=True))
    scenario = Scenario(shelf, case.get("prefer_checkpoint", False))
    opened.append(scenario)
    for step in case["steps"]:
        if isinstance(step, str):
            scenario.does(step)
            continue
        state = scenario.state()
        assert {key: state[key] for key in step} == step
        assert state["strangers"] == 0
        if "whole" not in step:
            assert set(state["holds"]) <= set(state["whole"])


@pytest.mark.thorough(but=("*-gone-file", "DELETE_ON_CANCELLATION-CANCELED-there-s3"))
@pytest.mark.parametrize("storage", STORAGES, indirect=True)
@pytest.mark.parametrize("bytes_are", ["there", "gone"])
@pytest.mark.parametrize("case", ENDS, ids="-".join)
def test_retention_at_the_end(
    case: tuple[str, str], bytes_are: str, storage: CheckpointStorage, tmp_path: Path, opened: list[Scenario]
) -> None:
    cleanup, state = case
    scenario = Scenario(Shelf.at(tmp_path, storage=storage))
    opened.append(scenario)
    for line in ("cp1", "cp2 on cp1", "sp1"):
        scenario.does(line)
    if bytes_are == "gone":
        scenario.does("cp1 is deleted by its owner")

    scenario.does(f"end {state} {cleanup}")

    kept = ["cp1", "cp2"] if MATRIX[cleanup][state] == "keep" else []
    assert scenario.state()["holds"] == [*kept, "sp1"]
    assert scenario.state()["deleting"] == []
    whole = [name for name in kept if bytes_are == "there" or name == "cp2"]
    assert scenario.state()["whole"] == [*whole, "sp1"]


@pytest.mark.parametrize("case", [case for case in CASES if "rejects" in case], ids=lambda case: case["says"])
def test_what_cannot_be_is_refused(case: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=case["rejects"]):
        Shelf.at(tmp_path, num_retained=case["num_retained"])


def test_the_matrix_is_complete() -> None:
    assert all(set(MATRIX[cleanup]) == set(TerminalState.__members__) for cleanup in MATRIX)
    assert len(MATRIX) == 3


def test_no_step_states_a_word_that_nobody_reads() -> None:
    said = {key for case in STEPPED for step in case["steps"] if isinstance(step, dict) for key in step}
    assert said <= STATED
