"""Examine the files of the state stores, and Spark's metadata of the stateful operators."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from dagster_ckpt.errors import ChecksumDiffersError, IncompleteCutError, LiveDirectoryError, UnknownLayoutError
from dagster_ckpt.spark.checkpoint_dir.layout import (
    COMMITS,
    OFFSETS,
    STATE,
    LiveDirectory,
    NeededFile,
    batch_ids,
    store_directory,
)
from dagster_ckpt.spark.checkpoint_dir.operators import Operator, check_schemas, read_operators
from dagster_ckpt.spark.checkpoint_dir.state_files import CommittedState, files_of_store, state_files, store_places
from dagster_ckpt.spark.checkpoint_dir.state_store_formats import StoreDirectory, snapshot_files
from dagster_ckpt.spark.doctor.finding import Code, Finding, Subject, error, note, warning
from dagster_ckpt.values.safe_parsing import from_json, number_in, reading
from dagster_ckpt.values.storage_path import local_path


def examine_operator_notes(subject: Subject) -> Iterator[Finding]:
    if subject.commit is None:
        return
    numbers = [name for name in subject.folder.list(STATE) if number_in(name) is not None]
    yield from _unreadable(subject)
    for number in numbers:
        yield from _elsewhere(subject, number)


def _unreadable(subject: Subject) -> Iterator[Finding]:
    try:
        operators = read_operators(subject.folder, subject.commit or 0)
        commit = subject.commit_entry
        named = commit.state_ids if commit is not None else None
        subject.known.check_operators(subject.folder, [each.number for each in operators], named or ())
        check_schemas(subject.folder, subject.commit or 0)
    except (IncompleteCutError, FileNotFoundError) as trouble:
        path = subject.path_in(trouble)
        code = Code.SCHEMA_MISSING if _is_schema(path) else Code.OPERATOR_METADATA_MISSING
        yield error(Code.STATE_MISSING if path.count("/") == 1 else code, path, str(trouble))
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
        return
    for schema in named:
        if not _lies_in(schema, subject.live):
            yield error(
                Code.SCHEMA_PATH_ELSEWHERE,
                path,
                f"It names the state schema {schema}, which lies in another directory: a query started here "
                "reads that one, fails if it does not exist, and may write there.",
            )
            return


def _lies_in(schema: str, live: LiveDirectory) -> bool:
    root, path = live.local_path, local_path(schema)
    if root is None or path is None:
        # One store may have several schemes (s3, s3a).
        return schema.partition("://")[2].startswith(live.url.partition("://")[2].rstrip("/") + "/")
    return path.is_relative_to(root) or Path(path).resolve().is_relative_to(root.resolve())


_VERSIONED = re.compile(r"(\d+)(?:_[^.]+)?\.(?:delta|snapshot|zip|changelog)")


@dataclass(frozen=True)
class StateExamination:
    needed: tuple[NeededFile, ...]
    findings: tuple[Finding, ...]


def examine_state_files(subject: Subject) -> StateExamination:
    if subject.commit is None:
        return StateExamination((), ())
    committed, commit, operators = subject.offset_entry(subject.commit), subject.commit_entry, subject.operators
    if committed is None or commit is None or operators is None:
        return StateExamination((), ())
    needed: tuple[NeededFile, ...] = ()
    findings: list[Finding] = []
    state = CommittedState(subject.folder, "", operators, committed, commit)
    try:
        needed = tuple(state_files(state).files)
    except (LiveDirectoryError, FileNotFoundError) as trouble:
        findings = _each_store(subject, state) or [_finding(subject, trouble)]
    findings += _ahead(subject, operators)
    if subject.deep:
        names = {file.source for file in needed}
        findings += _dangling(subject, operators, names)
    return StateExamination(needed, tuple(findings))


def _each_store(subject: Subject, state: CommittedState) -> list[Finding]:
    """Examine each store, because the check of the whole state stops at the first damage."""
    try:
        places = store_places(state)
    except LiveDirectoryError as trouble:
        is_commit = isinstance(trouble, IncompleteCutError)
        code, log = (Code.COMMIT_UNREADABLE, COMMITS) if is_commit else (Code.OFFSET_UNREADABLE, OFFSETS)
        return [error(code, f"{log}/{state.commit.batch_id}", str(trouble))]
    findings = []
    for place in places:
        try:
            files_of_store(state, place)
        except (LiveDirectoryError, FileNotFoundError) as trouble:
            findings.append(_finding(subject, trouble))
    return findings


def _finding(subject: Subject, trouble: Exception) -> Finding:
    path, text = subject.path_in(trouble), str(trouble)
    if isinstance(trouble, UnknownLayoutError):
        return error(Code.UNKNOWN_VERSION, path, text)
    directory, _, name = path.rpartition("/")
    in_folder = directory.endswith(("/SSTs", "/logs"))
    if not path or name not in subject.folder.list(directory):
        return error(Code.SST_MISSING if in_folder else Code.STATE_FILE_MISSING, path, text)
    if in_folder:
        return error(Code.SST_WRONG_SIZE, path, text)
    if name.endswith(".crc") or isinstance(trouble, ChecksumDiffersError):
        return error(Code.CHECKSUM_DIFFERS, path, text)
    return error(Code.SNAPSHOT_UNREADABLE if name.endswith(".zip") else Code.STATE_FILE_DAMAGED, path, text)


def _stores(subject: Subject, operators: list[Operator]) -> Iterator[str]:
    for operator in operators:
        root = f"{STATE}/{operator.number}"
        for partition in (number for name in subject.folder.list(root) if (number := number_in(name)) is not None):
            yield from (store_directory(operator.number, partition, name) for name in operator.stores)


def _ahead(subject: Subject, operators: list[Operator]) -> Iterator[Finding]:
    newest: dict[str, int] = {}
    for store in _stores(subject, operators):
        versions = [int(match[1]) for name in subject.folder.list(store) if (match := _VERSIONED.fullmatch(name))]
        newest[store] = max(versions, default=0)
    # Read after the stores: offsets are written before state.
    allowed = max(batch_ids(subject.folder, OFFSETS), default=-1) + 1
    ahead = {store: version for store, version in newest.items() if version > allowed}
    if ahead:
        first, version = max(ahead.items(), key=lambda item: item[1])
        yield warning(
            Code.STATE_AHEAD,
            first,
            f"{len(ahead)} stores hold state up to version {version}, but the newest planned batch makes version "
            f"{allowed}: the directory was rewound, and these versions were left. Spark's maintenance counts what it "
            "keeps from the newest version there, and can delete the versions that the query now needs.",
        )


def _dangling(subject: Subject, operators: list[Operator], needed: set[str]) -> Iterator[Finding]:
    for path in _stores(subject, operators):
        store = StoreDirectory(subject.folder, path)
        for name in sorted(subject.folder.list(path)):
            where = f"{path}/{name}"
            if not name.endswith(".zip") or where in needed:
                continue
            try:
                snapshot_files(store, name)
            except LiveDirectoryError as trouble:
                if _is_unreadable(subject, where):
                    what = "It is an unreadable snapshot"
                else:
                    what = f"It is a snapshot whose files are missing ({subject.path_in(trouble)})"
                yield note(
                    Code.SNAPSHOT_DANGLING,
                    where,
                    f"{what}; harmless: the newest version does not need it. Going back to batches that do is "
                    "impossible.",
                )
            except FileNotFoundError:
                continue


def _is_unreadable(subject: Subject, path: str) -> bool:
    try:
        data = subject.folder.read(path)
        with reading(LiveDirectoryError), zipfile.ZipFile(BytesIO(data)) as archive:
            return "metadata" not in archive.namelist()
    except FileNotFoundError:
        return False
    except LiveDirectoryError:
        return True
