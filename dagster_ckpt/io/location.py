"""One spelling for each place, so that places can be compared."""

from __future__ import annotations

from dagster_ckpt.config.storage_path import StoragePath
from dagster_ckpt.errors import OptionError, StorageAccessError


def normalised(location: str) -> str:
    """A location as a URL with `//`, without doubled or trailing slashes; a path of this machine gets `file://`.

    Raises:
        StorageAccessError: It is no URL, a relative path, or names a user.
    """
    try:
        path = StoragePath.parse("location", f"file://{location}" if location.startswith("/") else location)
    except OptionError as error:
        raise StorageAccessError(str(error)) from error
    if path.user_info:
        # A location is kept in the catalog, and shown.
        raise StorageAccessError(
            f"The location of {path.url} names a user. Leave that out: user name and password are taken from the "
            "configured storage, where that is on the same host."
        )
    return path.url
