"""Compare file sinks with the checkpoint: a sink that is ahead silently loses rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dagster_ckpt.errors import LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.io.file_io import FileIO
from dagster_ckpt.sinks.file_sink_log import LOG
from dagster_ckpt.spark.checkpoint_dir.file_source import COMPACT, entry_id
from dagster_ckpt.spark.checkpoint_dir.layout import COMMITS, OFFSETS, batch_ids
from dagster_ckpt.spark.checkpoint_dir.logs import parse_log_lines
from dagster_ckpt.spark.doctor.finding import Code, Finding, error, note, warning
from dagster_ckpt.spark.doctor.subject import Subject

# A file whose name happens to be a number could make a very large gap.
_MAX_REPORTED_GAPS = 1_000


def examine_file_sink(subject: Subject, folder: FileIO) -> Iterator[Finding]:
    """Compare the log of a file sink with the checkpoint."""
    # Commits, sink, offsets: the reverse of the order in which a running query writes them, so
    # later reads may be newer.
    committed = max(batch_ids(subject.folder, COMMITS), default=-1)
    names: dict[int, str] = {}
    for name in folder.list(LOG):
        number = entry_id(name)
        if number is not None:
            names[number] = name if name.endswith(COMPACT) else names.get(number, name)
    planned = max(batch_ids(subject.folder, OFFSETS), default=-1)
    last = max(names, default=-1)
    where = f"{folder.url}/{LOG}"
    if last > planned:
        yield error(
            Code.SINK_LOG_AHEAD,
            where,
            f"The sink has batches up to {last}, but the checkpoint has planned only {planned}: Spark passes "
            "over every batch "
            f"up to {last} without a word, and where it is cut differently the second time its rows are lost.",
        )
    has_ids = subject.commit_entry is not None and bool(subject.commit_entry.state_ids)
    # Read the commits again at the end: a running query may have committed this batch, or is about
    # to.
    if has_ids and last == planned == committed + 1 > max(batch_ids(subject.folder, COMMITS), default=-1):
        yield note(
            Code.SINK_HAS_BATCH_IN_FLIGHT,
            f"{where}/{names[last]}",
            f"The sink has batch {last}, which is not committed, and state is in checkpoint format v2. Unless a query "
            "runs there, Spark would pass over the batch without running it and fail, at every start: assertion "
            "failed: CheckpointInfo length: 0.",
        )
    if last < committed:
        yield warning(
            Code.SINK_LOG_BEHIND,
            where,
            f"Batch {committed} is committed, but the sink has batches only up to {last}: rows were lost, or "
            "the output "
            "folder was exchanged or rolled back by itself.",
        )
    first = max((number for number, name in names.items() if name.endswith(COMPACT)), default=min(names, default=0))
    missing = (number for number in range(first, last + 1) if number not in names)
    for number in sorted(
        {*islice(missing, _MAX_REPORTED_GAPS), *(number for number in names if first <= number <= last)}
    ):
        if number not in names:
            yield error(
                Code.SINK_LOG_GAP,
                f"{where}/{number}",
                f"The sink's log has entries up to {last}, but not this one: readers and the next compaction "
                "fail, and no "
                "snapshot can be taken.",
            )
            continue
        entry = f"{LOG}/{names[number]}"
        try:
            parse_log_lines(folder.read(entry), f"{folder.url}/{entry}")
        except UnknownLayoutError as trouble:
            yield error(Code.UNKNOWN_VERSION, f"{folder.url}/{entry}", str(trouble))
        except LiveDirectoryError as trouble:
            yield error(Code.SINK_LOG_UNREADABLE, f"{folder.url}/{entry}", str(trouble))
        except FileNotFoundError:
            # Compacted since it was listed.
            continue
