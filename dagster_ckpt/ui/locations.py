"""Which locations of snapshots the page opens: those of the stream's own storage, for those who are signed in.

A preview opens the location that it is given. Without this, anybody who reaches the page, or a web site that a
browser on this machine visits, could make the server fetch addresses of its network, or read local files.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from dagster_ckpt.client import Client, StartFrom, is_location, lies_in
from dagster_ckpt.errors import OptionError
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.storage_path import StoragePath, location_url


def refuse_location(client: Client, stream_id: str, start: StartFrom, *, may_act: bool) -> None:
    """Refuse a location, unless the browser is signed in and it is in the storage of the stream. Opens nothing."""
    reference = start.reference or ""
    if not is_location(reference):
        return
    if not may_act:
        raise OptionError(
            "A location is opened only in a browser that is signed in (dagster-ckpt ui --actions prints the address). "
            "Nothing was opened. Name the snapshot by its id, number (chk-7) or label."
        )
    folder = reference.rstrip("/").removesuffix("/_metadata")
    if any(each.location == folder for each in client.list_snapshots(stream_id)):
        return
    folders = client.snapshot_folders(stream_id)
    if not is_inside(folder, folders):
        raise OptionError(
            f"{without_secrets(reference)} is not opened: this page opens only what lies in the configured storage of "
            f"the stream, {' and '.join(folders) or 'which has no folder'}. To start from a snapshot elsewhere, use "
            "dagster-ckpt restart --from on the command line."
        )


def is_inside(location: str, folders: Iterable[str]) -> bool:
    """Whether a location lies in one of some folders, however it is spelled; a symbolic link leads out of it."""
    decoded = location
    while (once := unquote(decoded)) != decoded:
        decoded = once
    parts = decoded.replace("\\", "/").split("/")
    # "::" chains file systems of fsspec, such as simplecache::http://...
    if "::" in decoded or ".." in parts or any(mark in decoded for mark in "?#") or not decoded.isprintable():
        return False
    try:
        place = StoragePath.parse("location", location_url("location", location))
    except OptionError:
        return False
    # By its spelling first: nothing else is looked at, and a network disk is not mounted.
    below = [folder for folder in folders if place.url.startswith(f"{folder.rstrip('/')}/")]
    return not place.user_info and any(lies_in(place.url, folder) for folder in below)
