"""From a streaming asset and the resources at hand to the `StreamingJob` that lifecycle works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dagster_ckpt.errors import JobNotFoundError
from dagster_ckpt.lifecycle.job import StreamingJob
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import StreamingAsset
from dagster_ckpt.storage import open_store


class StreamResources(Protocol):
    """The resources that every operation on a stream needs."""

    checkpoint_storage: CheckpointStorageResource
    state_backend: StateBackendResource
    checkpoint_catalog: CheckpointCatalogResource


def streaming_job(stream: StreamingAsset, resources: StreamResources | Any) -> StreamingJob:
    """Put a job together.

    A storage set in the asset's `CheckpointConfig` wins over the deployment's resource, as in Flink, and takes from
    it what it leaves unset.
    """
    deployment = resources.checkpoint_storage
    configured = stream.options.storage
    backend = resources.state_backend.backend()
    storage = deployment.storage() if configured is None else configured.configure(deployment.deployment())
    return StreamingJob(
        job_id=stream.job_id,
        name=stream.name,
        asset_key=stream.key.to_user_string(),
        catalog=resources.checkpoint_catalog.catalog(),
        store=open_store(storage, stream.job_id, transfer_threads=backend.transfer_threads),
        options=stream.options,
        restart=stream.restart,
        live_root=resources.state_backend.live_directory,
        code_version=stream.asset.code_versions_by_key.get(stream.key),
        backend=backend,
        executor_copy_bytes=deployment.executor_copy_bytes,
    )


def find_stream(streams: Sequence[StreamingAsset], job_id: str) -> StreamingAsset:
    """The stream of a job id, or of an asset key.

    Raises:
        JobNotFoundError: No streaming asset of this code location has it.
    """
    for stream in streams:
        if job_id in (stream.job_id, stream.key.to_user_string()):
            return stream
    known = ", ".join(sorted(stream.job_id for stream in streams)) or "none"
    raise JobNotFoundError(
        f"No streaming asset with job id {job_id!r} in this code location. It has: {known}. "
        "Give one of these as job_id in the launchpad."
    )
