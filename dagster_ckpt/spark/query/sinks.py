"""Sink names in a query's progress, and how each sink handles a repeated batch."""

from __future__ import annotations

import re

_FILE_SINK = re.compile(r"FileSink\[(?P<path>.+)\]")
_PLACES = (
    _FILE_SINK,
    re.compile(r"DeltaSink\[(?P<path>.+)\]"),
    re.compile(r"IcebergWrite\(table=(?P<path>[^,)]+).*\)"),
)
# Sinks that remember committed batches (Delta by query id and batch id, Iceberg by query id and
# epoch), but for which no test with a real table shows that they skip a repeated one.
_UNPROVEN = (re.compile(r"DeltaSink\[.+\]"), re.compile(r"IcebergWrite\(.+\)"))


def file_sink_path(description: str) -> str | None:
    """Folder of a file sink, or None for another kind of sink.

    Args:
        description: `sink.description` of the query's progress, such as `FileSink[file:/data/out]`.
    """
    match = _FILE_SINK.fullmatch(description)
    return match["path"] if match else None


def sink_place(description: str) -> str | None:
    """Folder or table of a sink, or None if its name does not contain it.

    Args:
        description: `sink.description` of the query's progress.
    """
    matches = (pattern.fullmatch(description) for pattern in _PLACES)
    return next((match["path"] for match in matches if match is not None), None)


def can_replay_a_batch(description: str) -> bool:
    """Whether a sink handles the same batch twice idempotently, as a test with the real sink shows.

    False also for unknown sinks, such as `foreachBatch`.

    Args:
        description: `sink.description` of the query's progress.
    """
    return _FILE_SINK.fullmatch(description) is not None


def is_unproven(description: str) -> bool:
    """Whether a sink is idempotent only according to its documentation.

    Args:
        description: `sink.description` of the query's progress.
    """
    return any(pattern.fullmatch(description) for pattern in _UNPROVEN)
