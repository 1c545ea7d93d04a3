"""One spelling for each place, so that places can be compared."""

from __future__ import annotations

from dagster_ckpt.errors import OptionError, StorageAccessError
from dagster_ckpt.options.storage_path import StoragePath


def normalised(location: str) -> str:
    """A location as a URL with `//`, without doubled or trailing slashes; a path of this machine gets `file://`.

    Raises:
        StorageAccessError: It is no URL, or a relative path.
    """
    try:
        return StoragePath.parse("location", f"file://{location}" if location.startswith("/") else location).url
    except OptionError as error:
        raise StorageAccessError(str(error)) from error
