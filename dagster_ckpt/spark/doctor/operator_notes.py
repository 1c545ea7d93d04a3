"""What Spark notes about stateful operators: their metadata, their schemas, and where these are said to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dagster_ckpt.errors import IncompleteCutError, LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.foreign import from_json, number_in, reading
from dagster_ckpt.spark.doctor.finding import Code, Finding, error
from dagster_ckpt.spark.doctor.subject import Subject
from dagster_ckpt.spark.folder import local_path
from dagster_ckpt.spark.layout import STATE, LiveDirectory, batch_ids
from dagster_ckpt.spark.operators import read_operators


def examine_operator_notes(subject: Subject) -> Iterator[Finding]:
    """Look at the notes on every operator."""
    if subject.commit is None:
        return
    numbers = [name for name in subject.folder.list(STATE) if number_in(name) is not None]
    yield from _unreadable(subject)
    for number in numbers:
        yield from _elsewhere(subject, number)


def _unreadable(subject: Subject) -> Iterator[Finding]:
    try:
        read_operators(subject.folder, subject.commit or 0)
    except (IncompleteCutError, FileNotFoundError) as trouble:
        path = subject.path_in(trouble)
        code = Code.SCHEMA_MISSING if _is_schema(path) else Code.OPERATOR_METADATA_MISSING
        yield error(code, path, str(trouble))
    except UnknownLayoutError as trouble:
        yield error(Code.UNKNOWN_VERSION, subject.path_in(trouble), str(trouble))
    except LiveDirectoryError as trouble:
        path = subject.path_in(trouble)
        code = Code.SCHEMA_UNREADABLE if _is_schema(path) else Code.OPERATOR_METADATA_UNREADABLE
        yield error(code, path, str(trouble))


def _is_schema(path: str) -> bool:
    return path.endswith("/schema") or "/_stateSchema/" in path


def _newest_metadata(subject: Subject, number: str) -> str | None:
    v2 = f"{STATE}/{number}/_metadata/v2"
    batches = batch_ids(subject.folder, v2)
    return f"{v2}/{max(batches)}" if batches else None


def _elsewhere(subject: Subject, number: str) -> Iterator[Finding]:
    path = _newest_metadata(subject, number)
    if path is None:
        return
    try:
        text = subject.folder.read(path).decode("utf-8", "replace").partition("\n")[2]
        with reading(LiveDirectoryError):
            stores = from_json(text)["stateStoreInfo"]
            named = [str(schema) for store in stores for schema in store.get("stateSchemaFilePaths", [])]
    except (FileNotFoundError, LiveDirectoryError):
        # Told above.
        return
    for schema in named:
        if not _lies_in(schema, subject.live):
            yield error(
                Code.SCHEMA_PATH_ELSEWHERE,
                path,
                f"It names the state schema {schema}, which lies in another directory: a query started here "
                "reads that one, "
                "fails if it is gone, and may write there.",
            )
            return


def _lies_in(schema: str, live: LiveDirectory) -> bool:
    root, path = live.local_path, local_path(schema)
    if root is None or path is None:
        # One store has several schemes (s3, s3a), so they do not count.
        return schema.partition("://")[2].startswith(live.url.partition("://")[2].rstrip("/") + "/")
    return path.is_relative_to(root) or Path(path).resolve().is_relative_to(root.resolve())
