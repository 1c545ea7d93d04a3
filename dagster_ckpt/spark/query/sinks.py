"""The sinks of a query as its progress names them, and what each does with a batch it gets twice."""

from __future__ import annotations

import re

_FILE_SINK = re.compile(r"FileSink\[(?P<path>.+)\]")
_PLACES = (
    _FILE_SINK,
    re.compile(r"DeltaSink\[(?P<path>.+)\]"),
    re.compile(r"IcebergWrite\(table=(?P<path>[^,)]+).*\)"),
)
# Sinks that remember the batches they committed, Delta by query id and batch id, Iceberg by query id and epoch: no
# test with a real table shows that they pass over a repeated one.
_UNPROVEN = (re.compile(r"DeltaSink\[.+\]"), re.compile(r"IcebergWrite\(.+\)"))


def file_sink_path(description: str) -> str | None:
    """Folder a file sink writes to, or None for a sink of another kind.

    Args:
        description: `sink.description` of the query's progress, such as `FileSink[file:/data/out]`.
    """
    match = _FILE_SINK.fullmatch(description)
    return match["path"] if match else None


def sink_place(description: str) -> str | None:
    """Folder or table a sink writes to, or None where its name does not say.

    Args:
        description: `sink.description` of the query's progress.
    """
    matches = (pattern.fullmatch(description) for pattern in _PLACES)
    return next((match["path"] for match in matches if match is not None), None)


def can_replay_a_batch(description: str) -> bool:
    """Whether a sink takes the very same batch twice without a trace, as a test with the real sink shows.

    False also for sinks that nothing is known of, such as `foreachBatch`.

    Args:
        description: `sink.description` of the query's progress.
    """
    return _FILE_SINK.fullmatch(description) is not None


def is_unproven(description: str) -> bool:
    """Whether a sink remembers batches by its documentation only.

    Args:
        description: `sink.description` of the query's progress.
    """
    return any(pattern.fullmatch(description) for pattern in _UNPROVEN)
