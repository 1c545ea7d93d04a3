"""Normalise locations to one spelling each, so that they can be compared."""

from __future__ import annotations

from dagster_ckpt.config.storage_path import StoragePath
from dagster_ckpt.errors import OptionError, StorageAccessError


def normalised(location: str) -> str:
    """Normalise a location to a URL with `//` and without doubled or trailing slashes; a local path gets `file://`.

    Raises:
        StorageAccessError: It is not a URL, is a relative path, or contains user info.
    """
    try:
        path = StoragePath.parse("location", f"file://{location}" if location.startswith("/") else location)
    except OptionError as error:
        raise StorageAccessError(str(error)) from error
    if path.user_info:
        # Locations are stored in the catalog and shown.
        raise StorageAccessError(
            f"The location of {path.url} names a user. Leave that out: user name and password are taken from the "
            "configured storage, where that is on the same host."
        )
    return path.url
