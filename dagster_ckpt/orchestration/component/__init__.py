"""Streams in YAML: `StreamsComponent`, for projects that declare their definitions with `dg`.

`query.py` defines the query, `stream.py` one stream, and `component.py` all streams with their resources. It creates
exactly what `streaming_multi_asset` and `stream_definitions` create.
"""
