"""Convert file system exceptions into `StorageAccessError`, whose message says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from dagster_ckpt.config.redaction import cause_to_show, without_secrets
from dagster_ckpt.errors import CkptError, StorageAccessError


@contextmanager
def accessing(what: str, where: str) -> Iterator[None]:
    """Raise failures as StorageAccessError.

    Args:
        what: The verb, such as "write".
        where: URL of what is accessed.
    """
    try:
        yield
    except CkptError:
        raise
    # Drivers raise their own exception types (botocore, gcsfs, ...), which have no common base
    # class.
    except Exception as error:  # noqa: BLE001 - raised again below
        raise StorageAccessError(
            f"Cannot {what} {without_secrets(where)}: {type(error).__name__}: {without_secrets(str(error))}. "
            "Check that the path is right, that this process "
            f"has the right to {what} there, and that credentials and endpoint are set. Snapshots already stored are "
            "as "
            "they were."
        ) from cause_to_show(error)


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Raise failures as StorageAccessError, except that a missing object stays FileNotFoundError."""
    missing: FileNotFoundError | None = None
    with accessing("read", where):
        try:
            yield
        except FileNotFoundError as error:
            missing = error
    if missing is not None:
        raise missing


class Guarded:
    """A byte stream that raises failures as StorageAccessError, so that a full disk is reported with its location.

    Args:
        stream: The stream to wrap.
        where: Its URL.
    """

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = stream
        self._where = where

    def write(self, data: bytes) -> int:
        """Write all of the data; an unbuffered file may take it in parts."""
        with accessing("write", self._where):
            done = 0
            while done < len(data):
                done += self._stream.write(memoryview(data)[done:] if done else data)
            return done

    def writelines(self, pieces: Iterable[bytes]) -> None:
        """Write several pieces, one after the other."""
        with accessing("write", self._where):
            self._stream.writelines(pieces)

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes."""
        with accessing("read", self._where):
            return self._stream.read(size)

    def seek(self, offset: int) -> int:
        """Move to a position."""
        with accessing("read", self._where):
            return self._stream.seek(offset)
