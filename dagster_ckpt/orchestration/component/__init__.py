"""Streams in YAML: `StreamsComponent`, for projects that declare their definitions with `dg`.

It creates exactly what `streaming_multi_asset` and `stream_definitions` create.
"""
