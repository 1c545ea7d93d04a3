"""Paths in the log of a file sink: Spark writes them absolute, so a folder that was moved lists files of its old place.

The same file has several spellings: with and without a scheme's slashes, through a symbolic link, by another driver.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote, unquote

from dagster_ckpt.errors import RestoreError
from dagster_ckpt.io.location import lies_in
from dagster_ckpt.values.storage_path import local_path

# Characters that Hadoop leaves unescaped in the path of a URI.
_SAFE = "/=:@!$&'()*+,;~"


def url_of(folder: str, name: str) -> str:
    """How Spark writes a file of a folder in its log."""
    root = local_path(folder)
    place = f"file://{quote(str(root), safe=_SAFE)}" if root is not None else folder.rstrip("/")
    return f"{place}/{quote(name, safe=_SAFE)}"


def name_below(folder: str, where: str) -> str:
    """Path of a listed file relative to its folder.

    Raises:
        RestoreError: It lies outside of the folder.
    """
    root, file = local_path(folder), local_path(unquote(where))
    if root is not None and file is not None and file.is_relative_to(root):
        return file.relative_to(root).as_posix()
    prefix = f"{folder.rstrip('/')}/"
    if root is None and unquote(where).startswith(prefix):
        return unquote(where).removeprefix(prefix)
    raise RestoreError(
        f"The log of {folder} lists {where}, which is outside of that folder. If the folder was moved or copied, "
        "`dagster-ckpt relocate-output` lets its log list the files that are there."
    )


def below(folder: str) -> Callable[[str], bool]:
    """Whether a listed file lies in a folder, in any spelling. Each folder of files is looked at once."""
    known: dict[str, bool] = {}

    def check(where: str) -> bool:
        parent = where.rpartition("/")[0]
        if parent not in known:
            known[parent] = lies_in(unquote(parent), folder)
        return known[parent]

    return check
