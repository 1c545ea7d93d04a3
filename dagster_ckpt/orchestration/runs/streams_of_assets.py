"""Creates a `StreamHandle` from a streaming asset and the resources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from dagster_ckpt.errors import StreamNotFoundError
from dagster_ckpt.orchestration.assets.stream import Stream, StreamSpec
from dagster_ckpt.orchestration.resources.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    StateBackendResource,
)
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle


class StreamResources(Protocol):
    """The resources that every operation on a stream needs."""

    checkpoint_storage: CheckpointStorageResource
    state_backend: StateBackendResource
    checkpoint_catalog: CheckpointCatalogResource


def stream_handle(stream: Stream, resources: StreamResources | Any) -> StreamHandle:
    """Create the handle of a stream, for operators."""
    return open_stream(stream.spec, resources, name=stream.name, writes=stream.writes, code_version=stream.code_version)


def open_stream(
    spec: StreamSpec,
    resources: StreamResources | Any,
    *,
    name: str,
    writes: str,
    code_version: str | None,
) -> StreamHandle:
    """Create the handle of a stream.

    A storage set in the stream's `CheckpointConfig` overrides the deployment's resource, as in
    Flink, and inherits its unset options from it.

    Args:
        spec: The stream.
        resources: Its checkpoint storage, state backend and catalog.
        name: Name of its query in Spark.
        writes: The assets it writes, or its name outside assets.
        code_version: Version of the code that defines the query.
    """
    deployment = resources.checkpoint_storage
    configured = spec.options.storage
    backend = resources.state_backend.backend()
    storage = deployment.storage() if configured is None else configured.configure(deployment.deployment())
    return StreamHandle(
        stream_id=spec.stream_id,
        name=name,
        asset_key=writes,
        catalog=resources.checkpoint_catalog.catalog(),
        store=open_store(storage, spec.stream_id, transfer_threads=backend.transfer_threads),
        options=spec.options,
        restart=spec.restart,
        live_root=resources.state_backend.live_directory,
        code_version=code_version,
        backend=backend,
        executor_copy_bytes=deployment.executor_copy_bytes,
        stall_timeout_ms=spec.stall_timeout_ms,
    )


def find_stream(streams: Sequence[Stream], stream_id: str) -> Stream:
    """Find a stream by its stream id or the key of one of its assets.

    Raises:
        StreamNotFoundError: This code location has no such streaming asset.
    """
    for stream in streams:
        if stream.is_called(stream_id):
            return stream
    known = ", ".join(sorted(stream.stream_id for stream in streams)) or "none"
    raise StreamNotFoundError(
        f"No streaming asset with stream id {stream_id!r} in this code location. It has: {known}. "
        "Give one of these as stream_id in the launchpad."
    )
