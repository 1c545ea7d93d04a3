"""Looks for files that a file source has read, in the file systems of a session or of this process."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from dagster_ckpt.config.redaction import without_secrets
from dagster_ckpt.config.storage_path import local_path
from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.io.location import open_file_io

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# From so many files of one folder on, the folder is listed.
_LISTED_FROM = 20


def missing_files(
    uris: Sequence[str], session: SparkSession | None = None, *, reachable_scheme: str = "file"
) -> list[str] | None:
    """Those of some files that no longer exist.

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
    missing: list[str] = []
    for folder, files in by_folder.items():
        if jvm is not None and session is not None:
            missing += _missing_in_hadoop(jvm, session, folder, files)
            continue
        found = _missing_here(folder, files) if folder.partition(":")[0] in ("file", reachable_scheme) else None
        if found is None:
            return None
        missing += found
    return missing


def _missing_here(folder: str, files: Iterable[str]) -> list[str] | None:
    place = unquote(folder)
    path = local_path(place)
    if path is not None and not path.is_dir():
        # It may be on another machine.
        return None
    try:
        names = open_file_io(place).list(hidden=True)
    except (CkptError, OSError, ValueError):
        return None
    return [each for each in files if unquote(each.rpartition("/")[2]) not in names]


def _missing_in_hadoop(jvm: Any, session: SparkSession, folder: str, files: Sequence[str]) -> list[str]:
    try:
        place = _path(jvm, folder)
        system = place.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        listed = _listed(jvm, system, place) if len(files) >= _LISTED_FROM else set()
        exists: Callable[[str], bool] = lambda uri: bool(system.exists(_path(jvm, uri)))  # noqa: E731
        return [each for each in files if unquote(each.rpartition("/")[2]) not in listed and not exists(each)]
    except Exception as error:  # py4j raises what the file system raises
        raise StorageAccessError(
            f"{unquote(folder)} does not say which files it has: {without_secrets(str(error))[:300]}"
        ) from error


def _listed(jvm: Any, system: Any, place: Any) -> set[str]:
    if not system.exists(place):
        return set()
    # In one call, whatever the number of files.
    text = str(jvm.scala.runtime.ScalaRunTime.stringOf(system.listStatus(place)))
    return {found.rpartition("/")[2] for found in re.findall(r"path=([^;]*);", text)}


def _path(jvm: Any, uri: str) -> Any:
    return jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
