"""What operators cannot have is refused in one message, before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.stream import StreamingAsset


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
