"""URLs of storage directories, normalized like Flink's `Path`, and their fsspec arguments."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.values.redaction import user_info, without_secrets

# In these, renames are atomic, puts are not, and folders must be created. All others count as object stores.
_WITH_FOLDERS = frozenset({"arrow_hdfs", "hdfs", "local", "smb", "webhdfs"})


_LOCAL_SCHEMES = ("file://", "file:", "local://")
# Hadoop's URLs without an authority: `hdfs:/a`. One letter is a Windows drive.
_ONE_SLASH = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]+):/(?!/)")


def local_path(url: str) -> Path | None:
    """The path of `file:///a`, Hadoop's `file:/a` or a plain path; None for any other URL."""
    for scheme in _LOCAL_SCHEMES:
        if url.startswith(scheme):
            return Path("/" + url.removeprefix(scheme).lstrip("/"))
    return None if has_scheme(url) else Path(url).absolute()


def has_scheme(url: str) -> bool:
    return "://" in url or _ONE_SLASH.match(url) is not None


def with_authority(url: str) -> str:
    """Add the `//` that Hadoop leaves out: `hdfs:/data` is `hdfs:///data`."""
    return _ONE_SLASH.sub(r"\g<scheme>:///", url, count=1)


def has_folders(url: str) -> bool:
    return url.partition("://")[0] in _WITH_FOLDERS


def fsspec_arguments(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    # fsspec shares cached listings among threads: one from before a write may hide the written object.
    arguments = {**storage_options, "use_listings_cache": False}
    if not url.startswith(("s3://", "s3a://")):
        return arguments
    # Snapshots carry their own digests, and S3-compatible servers get these checksums wrong.
    config = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
    return {**arguments, "config_kwargs": {**config, **storage_options.get("config_kwargs", {})}}


def location_url(option: str, value: str) -> str:
    """The URL of a location: an absolute path means `file://`, a relative one is refused.

    Classes with PyFlink's names take URLs only, as Flink does.

    Example:
        >>> location_url("storage", "/data/checkpoints")
        'file:///data/checkpoints'
    """
    if not isinstance(value, str):
        raise OptionTypeError(
            f"{option} is {value!r} ({type(value).__name__}), but must be an absolute path or the URL of a directory."
        )
    _refuse_on_databricks(option, value)
    if value.startswith("/"):
        return f"file://{value}"
    scheme, colon, _ = value.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        here = posixpath.abspath(posixpath.expanduser(value or "checkpoints"))
        raise OptionError(
            f"{option} is {without_secrets(value)!r}, a relative path, which is a different directory in each "
            f"process. Give the absolute path, such as {here}, or a URL such as s3://bucket/checkpoints."
        )
    return value


# Databricks sets it in each process of a cluster.
_RUNTIME = "DATABRICKS_RUNTIME_VERSION"
_MOUNTS = ("/Volumes/", "/Workspace/", "/dbfs/")


def _refuse_on_databricks(option: str, value: str) -> None:
    path = value.removeprefix("file:").replace("///", "/", 1)
    is_mount = path.startswith(_MOUNTS) and _RUNTIME in os.environ
    if not is_mount and not value.startswith("dbfs:"):
        return
    why = (
        "a mount in which Python finds neither links nor writes in place, and Spark another path"
        if is_mount
        else "which Spark reads through its cluster, and Python only through the REST API"
    )
    raise OptionError(
        f"{option} is {without_secrets(value)!r}, {why}. Give the URL of the bucket or container, such as "
        "s3://bucket/checkpoints or abfss://container@account.dfs.core.windows.net/checkpoints, from an external "
        "location of Unity Catalog."
    )


# A single letter is a Windows drive, in Flink as well.
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+")
_ALLOWED = "the URL of a directory below the root, for example file:///data/checkpoints or s3://bucket/checkpoints"


@dataclass(frozen=True)
class StoragePath:
    """A directory, parsed from a URL.

    Attributes:
        path: Absolute, without a trailing slash; empty for the root of an authority.
    """

    scheme: str
    authority: str
    path: str
    user_info: str = field(default="", repr=False)

    @classmethod
    def parse(cls, option: str, value: object) -> StoragePath:
        """Parse a URL; repeated and trailing slashes are dropped, "." and ".." resolved.

        Refused are a bare path, which depends on the machine (as in Flink), and the root of a file system.
        """
        if not isinstance(value, str):
            raise OptionTypeError(f"{option} is {value!r} ({type(value).__name__}), but must be {_ALLOWED}.")
        given, value = value, without_secrets(value)
        public, credentials = user_info(given)
        scheme, colon, rest = public.partition(":")
        if not colon or not _SCHEME.fullmatch(scheme):
            raise OptionError(f"{option} is {value!r}, which has no scheme; it must be {_ALLOWED}.")
        authority = ""
        if rest.startswith("//"):
            authority, slash, below = rest[2:].partition("/")
            rest = slash + below
        if rest and not rest.startswith("/"):
            raise OptionError(f"{option} is {value!r}, a relative path; it must be {_ALLOWED}.")
        path = posixpath.normpath("/" + rest.lstrip("/")).rstrip("/")
        # The root of a bucket or name node is valid ("hdfs://checkpoints" in PyFlink).
        if not path and (not authority or scheme == "file"):
            raise OptionError(f"{option} is {value!r}, the root directory; it must be {_ALLOWED}.")
        return cls(scheme, authority, path, credentials)

    @property
    def url(self) -> str:
        """The URL for fsspec, always with "//". A local path has no host, as in Flink."""
        authority = "" if self.scheme == "file" else self.authority
        return f"{self.scheme}://{authority}{self.path}"

    @property
    def url_to_open(self) -> str:
        """The URL with user name and password, which is never shown or stored."""
        scheme, separator, rest = self.url.partition("://")
        return f"{scheme}{separator}{self.user_info}@{rest}" if self.user_info else self.url

    def __str__(self) -> str:
        """Return what PyFlink's getters return: "file:/data" for file:///data."""
        return f"{self.scheme}:{'//' + self.authority if self.authority else ''}{self.path}"
