"""Streams in YAML: `StreamsComponent`, for projects that declare their definitions with `dg`.

`query.py` is the query in YAML, `job.py` one stream, `component.py` all of them with their resources. A
component makes what `streaming_multi_asset` and `stream_definitions` make, and nothing else.
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
