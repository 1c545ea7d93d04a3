"""What operators cannot have is refused in one message, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.catalog.records import IS_LAUNCHED, LAUNCH, StartCause
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset
from tests.support.as_writer import as_writer
from tests.support.retention_shelf import HOLDER, Shelf


@pytest.fixture
def definitions(orders: StreamingAsset, tmp_path: Path) -> dg.Definitions:
    return dg.Definitions.merge(
        stream_definitions(orders),
        dg.Definitions(
            resources={
                "pyspark": dg.ResourceDefinition.none_resource(),
                "checkpoint_storage": CheckpointStorageResource(path=f"file://{tmp_path}/checkpoints"),
                "state_backend": StateBackendResource(live_directory=f"{tmp_path}/live"),
                "checkpoint_catalog": CheckpointCatalogResource(url=f"sqlite:///{tmp_path / 'new.db'}"),
            }
        ),
    )


def refusal(definitions: dg.Definitions, instance: dg.DagsterInstance, op: str, config: dict[str, Any]) -> dg.Failure:
    job = definitions.resolve_job_def(f"{op}_job")
    with pytest.raises(dg.Failure) as raised:
        job.execute_in_process({"ops": {op: {"config": config}}}, instance=instance)
    return raised.value


@pytest.mark.parametrize(
    ("stream_id", "reason"),
    [
        ("orders", "has no stream 'orders'"),
    ],
)
def test_a_savepoint_of_a_stream_that_does_not_exist_or_was_never_started(
    instance: dg.DagsterInstance, definitions: dg.Definitions, stream_id: str, reason: str
) -> None:
    refused = refusal(definitions, instance, "trigger_savepoint", {"stream_id": stream_id})

    assert reason in str(refused.description)
    assert not refused.allow_retries


def test_a_rollback_without_an_upgrade_is_that_of_the_launched_drivers(
    instance: dg.DagsterInstance, definitions: dg.Definitions, tmp_path: Path
) -> None:
    catalog = Shelf.at(tmp_path / "shelf", catalog_url=f"sqlite:///{tmp_path / 'new.db'}").stream.catalog
    for version in ("1", "2"):
        executions, id_ = as_writer(catalog, "orders").executions, f"of {version}"
        executions.start(id_, run_id=id_, cause=StartCause.MANUAL, holder=HOLDER, code_version=version)
        executions.running(id_, live_directory=f"{tmp_path}/live", recovery={IS_LAUNCHED: True})
        catalog.executions.note(id_, {LAUNCH: {"command": ["spark-submit", f"orders-{version}.py"]}})

    refused = refusal(definitions, instance, "roll_back_upgrade", {"stream_id": "orders"})

    assert "no snapshot of code version 1 (launched by spark-submit orders-1.py) is left" in str(refused.description)
