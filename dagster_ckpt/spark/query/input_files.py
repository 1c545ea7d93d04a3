"""Looks for files that a file source has read, in the file systems of a session or of this process."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.location import open_file_io
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.storage_path import local_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# From so many files of one folder on, the folder is listed.
_LISTED_FROM = 20
# One file in the text of a listing.
_STATUS = re.compile(r"path=([^;]*);(?:(?!path=).)*?modification_time=(\d+)", re.DOTALL)


def existing_files(
    uris: Sequence[str], session: SparkSession | None = None, *, reachable_scheme: str = "file"
) -> dict[str, int | None] | None:
    """Those of some files that exist, with their modification times in ms since the epoch; None if that is unknown.

    Args:
        uris: URIs as the log of a file source has them.
        session: A session with the file systems of the source; None looks with those of this process.
        reachable_scheme: Without a session: the scheme of a place that this process can read.

    Returns:
        None if that cannot be found out.

    Raises:
        StorageAccessError: The session cannot reach the files.
    """
    by_folder: dict[str, list[str]] = defaultdict(list)
    for uri in uris:
        by_folder[uri.rpartition("/")[0]].append(uri)
    jvm: Any = getattr(session, "_jvm", None)
    existing: dict[str, int | None] = {}
    for folder, files in by_folder.items():
        if jvm is not None and session is not None:
            existing |= _in_hadoop(jvm, session, folder, files)
            continue
        found = _found_here(folder, files) if folder.partition(":")[0] in ("file", reachable_scheme) else None
        if found is None:
            return None
        existing |= found
    return existing


def _found_here(folder: str, files: Iterable[str]) -> dict[str, int | None] | None:
    place = unquote(folder)
    path = local_path(place)
    if path is not None and not path.is_dir():
        # It may be on another machine.
        return None
    existing: dict[str, int | None] = {}
    try:
        entries = open_file_io(place).list(hidden=True)
        if path is None and not entries and not open_file_io("/".join(place.split("/")[:3])).list(hidden=True):
            # This process asks another store of that kind, which has no such bucket.
            return None
        for each in files:
            entry = entries.get(unquote(each.rpartition("/")[2]))
            if entry is not None:
                with suppress(FileNotFoundError):
                    existing[each] = entry.status().modified_at_ms
    except (CkptError, OSError, ValueError):
        return None
    return existing


def _in_hadoop(jvm: Any, session: SparkSession, folder: str, files: Sequence[str]) -> dict[str, int | None]:
    existing: dict[str, int | None] = {}
    try:
        place = _path(jvm, folder)
        system = place.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        listed = _listed(jvm, system, place) if len(files) >= _LISTED_FROM else {}
        for each in files:
            name, path = unquote(each.rpartition("/")[2]), _path(jvm, each)
            if name in listed:
                existing[each] = listed[name]
            elif system.exists(path):
                existing[each] = int(system.getFileStatus(path).getModificationTime())
    except Exception as error:  # py4j raises what the file system raises
        raise StorageAccessError(
            f"{unquote(folder)} does not say which files it has: {without_secrets(str(error))[:300]}"
        ) from error
    return existing


def _listed(jvm: Any, system: Any, place: Any) -> dict[str, int]:
    if not system.exists(place):
        return {}
    # In one call, whatever the number of files.
    text = str(jvm.scala.runtime.ScalaRunTime.stringOf(system.listStatus(place)))
    return {path.rpartition("/")[2]: int(modified) for path, modified in _STATUS.findall(text)}


def _path(jvm: Any, uri: str) -> Any:
    return jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
