"""Streams in YAML: `StreamsComponent`, for projects that declare their definitions with `dg`.

`query.py` defines the query, `stream.py` one stream, and `component.py` all streams with their resources. It creates
exactly what `streaming_multi_asset` and `stream_definitions` create.
"""

from dagster_ckpt.orchestration.component.component import StreamResources, StreamsComponent
from dagster_ckpt.orchestration.component.query import Sink, Source, Transform, Trigger
from dagster_ckpt.orchestration.component.stream import StreamDeclaration

__all__ = [
    "Sink",
    "Source",
    "StreamDeclaration",
    "StreamResources",
    "StreamsComponent",
    "Transform",
    "Trigger",
]
