"""What is known of fsspec's file systems, for images and live directories alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Here a put is not atomic but a rename is, and folders have to be made. Everything else is taken for an object store.
_WITH_FOLDERS = frozenset({"arrow_hdfs", "ftp", "hdfs", "local", "sftp", "smb", "ssh", "webhdfs"})


def has_folders(url: str) -> bool:
    """Whether a URL is of a file system with real folders, and not of an object store."""
    return url.partition("://")[0] in _WITH_FOLDERS


def fsspec_arguments(url: str, storage_options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a file system, with what we need where the user says nothing.

    Args:
        url: A URL of it.
        storage_options: What the user says.
    """
    if not url.startswith(("s3://", "s3a://")):
        return dict(storage_options)
    # Images carry digests of their own, and servers that are not Amazon's get these checksums wrong.
    config = dict.fromkeys(("request_checksum_calculation", "response_checksum_validation"), "when_required")
    return {**storage_options, "config_kwargs": {**config, **storage_options.get("config_kwargs", {})}}
