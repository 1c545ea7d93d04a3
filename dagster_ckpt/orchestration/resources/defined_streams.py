"""The streams of a code location, opened with their definitions and the resources of the deployment."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.orchestration.assets.stream import Stream, StreamSpec, find_stream
from dagster_ckpt.orchestration.resources.resources import DeploymentResources
from dagster_ckpt.snapshot.opening import open_store
from dagster_ckpt.stream.handle import StreamHandle


def stream_handle(stream: Stream, resources: DeploymentResources) -> StreamHandle:
    """The handle of a stream, for operators."""
    return open_stream(stream.spec, resources, name=stream.name, writes=stream.writes, code_version=stream.code_version)


def open_stream(
    spec: StreamSpec,
    resources: DeploymentResources,
    *,
    name: str,
    writes: str,
    code_version: str | None,
) -> StreamHandle:
    """The handle of a stream; `name` is that of its query in Spark.

    A storage in the stream's `CheckpointConfig` overrides the resource, as in Flink, and inherits its other options.
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
        on_backend_change=resources.state_backend.on_change,
        executor_copy_bytes=deployment.executor_copy_bytes,
        stall_timeout_ms=spec.stall_timeout_ms,
        storage=storage,
    )


class DefinedStreams:
    """A client's streams, with the settings of their definitions."""

    def __init__(self, streams: Sequence[Stream], resources: DeploymentResources) -> None:
        self._streams = streams
        self._resources = resources
        self.catalog: Catalog = resources.checkpoint_catalog.catalog()

    def id_of(self, stream: str) -> str:
        """The id of a stream, from its id or an asset key."""
        return find_stream(self._streams, stream).stream_id

    def on_storage(self) -> list[str]:
        """All streams of the code location."""
        return [stream.stream_id for stream in self._streams]

    def open(self, stream: str, *, new_like: str | None = None) -> StreamHandle:
        """Open a stream, even one that was never started."""
        del new_like  # its own definition has every setting
        return stream_handle(find_stream(self._streams, stream), self._resources)
