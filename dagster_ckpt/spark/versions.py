"""Versions of Spark's file formats; unsupported versions are rejected.

A newer Spark may write references to files that this package does not look for, so an unsupported
version is rejected before anything is copied.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from dagster_ckpt.errors import UnknownLayoutError

_VERSION = re.compile(r"v(\d+)")


def version_number(line: str) -> int | None:
    """The number in a version line such as `v2`; None for any other text."""
    match = _VERSION.fullmatch(line.strip())
    return int(match[1]) if match else None


def known_version(line: str, known: Collection[int], where: str, what: str) -> int | None:
    """Parse a version line.

    Args:
        line: The line, such as `v2`.
        known: The supported versions.
        where: Path of the file.
        what: What kind of file it is, for the message.

    Returns:
        The version number, or None if the line is not a version.

    Raises:
        UnknownLayoutError: The version is not supported.
    """
    number = version_number(line)
    if number is not None and number not in known:
        raise UnknownLayoutError(
            f"{where} is {what} of version v{number}, but the versions known are "
            f"{', '.join(f'v{version}' for version in sorted(known))}. Another version of Spark wrote it: upgrade "
            "dagster_ckpt to one that knows it. Nothing was copied."
        )
    return number
