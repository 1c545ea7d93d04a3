"""Whose directory is it: the file `metadata`."""

from __future__ import annotations

from collections.abc import Iterator

from dagster_ckpt.errors import LiveDirectoryError
from dagster_ckpt.spark.doctor.finding import Code, Finding, error
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.spark.layout import METADATA
from dagster_ckpt.spark.logs import parse_query_id


def examine_identity(subject: Subject) -> Iterator[Finding]:
    """Look at the query id."""
    try:
        query_id = parse_query_id(subject.folder.read(METADATA), f"{subject.live.url}/{METADATA}")
    except FileNotFoundError:
        if subject.commits or subject.offsets:
            yield error(
                Code.METADATA_MISSING,
                METADATA,
                "It is missing: Spark refuses to start (STREAMING_CHECKPOINT_MISSING_METADATA_FILE), since a "
                "new query id "
                "would make sinks that remember the old one write rows twice.",
            )
        return
    except LiveDirectoryError as trouble:
        yield error(Code.METADATA_UNREADABLE, METADATA, str(trouble))
        return
    if subject.expected_query_id is not None and query_id != subject.expected_query_id:
        yield error(
            Code.QUERY_ID_DIFFERS,
            METADATA,
            f"The directory belongs to query {query_id}, but the job's query is {subject.expected_query_id}: "
            "another query "
            "wrote here, or the directory was exchanged.",
        )
