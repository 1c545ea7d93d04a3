"""Deleting images and what crashes left, without touching a byte that another image needs.

An image is deleted in steps that can be cut off anywhere (docs/image-format.md, section 5): its `_metadata` is set
aside as `_deleting`, so that nobody finds the image any more but what it referred to stays known; its objects go;
`_deleting` goes last.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from dagster_ckpt.errors import ImageCorruptError, ImageNotFoundError
from dagster_ckpt.image import METADATA_NAME, ObjectSpace, object_name, read_metadata

SHARED = "shared"
DELETING_NAME = "_deleting"
# First object of a savepoint and deleted when it is whole: tells a crashed savepoint from a copy somebody is making.
INCOMPLETE_NAME = "_incomplete"
_CHECKPOINT = re.compile(r"chk-(\d+)")
_log = logging.getLogger(__name__)


def checkpoint_directories(space: ObjectSpace) -> list[str]:
    """Directories of the checkpoints in a job's space, broken ones too, oldest first."""
    return [name for name in _numbered(space) if space.size(f"{name}/{METADATA_NAME}") is not None]


def delete_image(space: ObjectSpace, directory: str, protected: Iterable[str]) -> None:
    """Delete an image, or go on where an earlier deletion was cut off; one that is gone is no error.

    Shared objects stay where an image that may need them cannot be read: what they hold cannot be brought back.

    Args:
        space: Where the image is, with all that may share its objects.
        directory: Its directory.
        protected: Directories of images whose objects must stay, listed or not.

    Raises:
        StorageAccessError: Something could not be read or deleted; another call goes on from there.
    """
    if space.size(f"{directory}/{METADATA_NAME}") is not None:
        space.publish(f"{directory}/{DELETING_NAME}", space.read(f"{directory}/{METADATA_NAME}"))
        space.delete(f"{directory}/{METADATA_NAME}")
    elif space.size(f"{directory}/{DELETING_NAME}") is None:
        return
    try:
        objects = _referred(space, directory, DELETING_NAME)
    except ImageCorruptError as error:
        _log.warning("What %s/%s shared stays until it is swept: %s", space.url, directory, error)
        objects = frozenset()
    for name in sorted(_disposable(space, objects, directory, protected)):
        space.delete(name)
    for name in sorted(space.list(directory)):
        if _is_ours(name) and name != DELETING_NAME:
            space.delete(f"{directory}/{name}")
    space.delete(f"{directory}/{DELETING_NAME}")


def sweep_job(space: ObjectSpace, *, before_ms: int, protected: Iterable[str]) -> int:
    """Delete what crashed checkpoints and deletions left in a job's space; returns how many objects.

    Args:
        space: The job's space.
        before_ms: Only what was last changed before this time, ms since the epoch.
        protected: Directories of images whose objects must stay.
    """
    # Listed before the images are: an object of an image that is published meanwhile counts as used.
    candidates = {f"{SHARED}/{name}" for name, changed_ms in space.list(SHARED).items() if 0 < changed_ms < before_ms}
    swept = 0
    for directory in _numbered(space):
        found = space.list(directory)
        if METADATA_NAME in found or any(changed_ms >= before_ms for changed_ms in found.values()):
            continue
        if DELETING_NAME in found:
            delete_image(space, directory, protected)
            continue
        swept += _delete_all(space, [f"{directory}/{name}" for name in found if _is_ours(name)])
    used = _used(space, checkpoint_directories(space), protected) if candidates else frozenset()
    if used is None:
        return swept
    return swept + _delete_all(space, candidates - used)


def sweep_savepoints(space: ObjectSpace, job_id: str, *, before_ms: int) -> int:
    """Delete what crashed savepoints of a job left; returns how many objects.

    Only directories that still carry the mark of an unfinished savepoint are looked at: a savepoint belongs to a
    person, who may be copying one.
    """
    swept = 0
    for directory, changed_ms in space.list("").items():
        if changed_ms or not directory.startswith("savepoint-"):
            continue
        found = space.list(directory)
        if INCOMPLETE_NAME not in found or any(changed >= before_ms for changed in found.values()):
            continue
        if space.read(f"{directory}/{INCOMPLETE_NAME}") != job_id.encode():
            continue
        if METADATA_NAME not in found:
            swept += _delete_all(space, [f"{directory}/{name}" for name in found if name.endswith((".pack", ".tmp"))])
        space.delete(f"{directory}/{INCOMPLETE_NAME}")
    return swept


def _numbered(space: ObjectSpace) -> list[str]:
    numbers = [int(match[1]) for name in space.list("") if (match := _CHECKPOINT.fullmatch(name))]
    return [f"chk-{number}" for number in sorted(numbers)]


def _disposable(
    space: ObjectSpace, objects: frozenset[str], directory: str, protected: Iterable[str]
) -> frozenset[str]:
    shared = frozenset(name for name in objects if name.startswith(f"{SHARED}/"))
    if not shared:
        return shared
    others = [name for name in checkpoint_directories(space) if name != directory]
    used = _used(space, others, [name for name in protected if name != directory])
    return frozenset() if used is None else shared - used


def _used(space: ObjectSpace, listed: Iterable[str], protected: Iterable[str]) -> frozenset[str] | None:
    """Objects that images refer to; None where that is not known of one of them."""
    used: set[str] = set()
    wanted = set(protected)
    for directory in sorted({*listed} | wanted):
        try:
            used |= _referred_at_all(space, directory)
        except ImageNotFoundError:
            # One that was listed a moment ago has been deleted. One that is protected should be there.
            if directory not in wanted:
                continue
            _log.warning("Shared objects in %s stay: the protected %s is not there.", space.url, directory)
            return None
        except ImageCorruptError as error:
            _log.warning("Shared objects in %s stay, because they may be needed: %s", space.url, error)
            return None
    return frozenset(used)


def _referred_at_all(space: ObjectSpace, directory: str) -> frozenset[str]:
    try:
        return _referred(space, directory, METADATA_NAME)
    except ImageNotFoundError:
        return _referred(space, directory, DELETING_NAME)


def _referred(space: ObjectSpace, directory: str, name: str) -> frozenset[str]:
    manifest = read_metadata(space, directory, name).manifest
    return frozenset(object_name(directory, reference) for reference in manifest.objects)


def _is_ours(name: str) -> bool:
    """Whether an image's directory has such a name from us; what a person put there stays."""
    return name in (METADATA_NAME, DELETING_NAME, INCOMPLETE_NAME) or name.endswith((".pack", ".tmp"))


def _delete_all(space: ObjectSpace, names: Iterable[str]) -> int:
    gone = sorted(names)
    for name in gone:
        space.delete(name)
    return len(gone)
