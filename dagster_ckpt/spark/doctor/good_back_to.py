"""How far back a live directory is still whole."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.cut import Cut, cut
from dagster_ckpt.spark.doctor.contents import examine_content
from dagster_ckpt.spark.doctor.finding import Code, Severity
from dagster_ckpt.spark.doctor.source_logs import examine_source_logs
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.spark.file_sink import SINKS_FOLDER
from dagster_ckpt.spark.layout import LiveDirectory
from dagster_ckpt.spark.logs import parse_log_lines
from dagster_ckpt.spark.needed import NeededFile

# Wrong about the place, not about the bytes: a fresh directory has neither.
_ONLY_IN_PLACE = {Code.HADOOP_CHECKSUM_STALE}


def good_back_to(
    live: LiveDirectory, *, sinks: Sequence[str] = (), deep: bool = True, damaged: Set[str] = frozenset()
) -> int | None:
    """The newest committed batch after which everything that a resume needs is there, or None.

    Of the newest batch an image can be taken; to an earlier one, `start_from=batch-<n>` goes back, which replays
    exactly the batch after it, so that one's plan has to be whole too.

    Args:
        live: The directory; a query may be running in it.
        sinks: The query's sinks, whose logs are needed as well.
        deep: Also read the needed files, and count damaged ones as missing.
        damaged: Files that are known to be damaged.
    """
    known = dict.fromkeys(damaged, True)
    newest = Subject.of(live)
    for batch in sorted(newest.commits, reverse=True):
        carry = batch != newest.commit
        seen = newest.up_to(batch, planned=carry)
        try:
            taken = cut(live, carry_in_flight=carry, sinks=sinks, attempts=1, at_batch=batch)
            if any(examine_source_logs(seen)) or _sinks_are_damaged(taken):
                continue
        except (LiveDirectoryError, FileNotFoundError):
            continue
        if not deep or not any(_is_damaged(file, known) for file in taken.needed):
            return batch
    return None


def _sinks_are_damaged(taken: Cut) -> bool:
    """Whether a sink's log lost the batch, or an entry up to it cannot be read."""
    reached = [sink.get("last_batch") for sink in taken.properties["sinks"]]
    if any(last is not None and last < taken.batch_id for last in reached):
        return True
    try:
        for file in taken.needed:
            if file.path.startswith(f"{SINKS_FOLDER}/"):
                parse_log_lines(file.folder.read(file.source), file.source)
    except LiveDirectoryError:
        return True
    return False


def _is_damaged(file: NeededFile, known: dict[str, bool]) -> bool:
    if file.path not in known:
        try:
            findings = list(examine_content(file.folder, file.source))
        except FileNotFoundError:
            return True
        known[file.path] = any(
            finding.severity is Severity.ERROR and finding.code not in _ONLY_IN_PLACE for finding in findings
        )
    return known[file.path]
