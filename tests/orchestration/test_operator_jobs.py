"""An operator who names a stream that is not there is told so, in one sentence."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from dagster_ckpt.orchestration.assets.stream import StreamingAsset
from dagster_ckpt.orchestration.assets.stream_definitions import stream_definitions
from dagster_ckpt.orchestration.resources.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)


@pytest.mark.parametrize(
    ("stream_id", "told"),
    [
        ("nope", "No streaming asset with stream id 'nope' in this code location. It has: orders."),
        ("orders", "knows no stream 'orders'"),
    ],
)
def test_a_savepoint_of_a_stream_that_does_not_exist_or_was_never_started(
    instance: dg.DagsterInstance, orders: StreamingAsset, tmp_path: Path, stream_id: str, told: str
) -> None:
    definitions = dg.Definitions.merge(
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
    job = definitions.resolve_job_def("trigger_savepoint_job")

    with pytest.raises(dg.Failure) as raised:
        job.execute_in_process({"ops": {"trigger_savepoint": {"config": {"stream_id": stream_id}}}}, instance=instance)

    assert told in str(raised.value.description)
    assert not raised.value.allow_retries
