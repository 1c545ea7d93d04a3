"""Failures of storage as errors of this package: the only place that translates them."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import IO, Self

from dagster_ckpt.errors import CkptError, StorageAccessError
from dagster_ckpt.values.redaction import cause_to_show, without_secrets

# For these a path that does not exist is an answer that callers handle.
_MAY_BE_MISSING = frozenset({"read", "list", "flush"})


class accessing:  # noqa: N801 - used as a statement: `with accessing("read", url):`
    """Raise failures as StorageAccessError.

    To read, list or flush a path that does not exist raises FileNotFoundError instead.

    Args:
        verb: What is done, such as "write".
        where: URL of what is accessed.
        only: The exceptions to translate. Drivers raise their own types (botocore, gcsfs, ...),
            which have no common base class; a local disk raises OSError only, so that errors of
            callers pass through.
    """

    __slots__ = ("_only", "_verb", "_where")

    def __init__(self, verb: str, where: str, *, only: type[Exception] = Exception) -> None:
        self._verb = verb
        self._where = where
        self._only = only

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, self._only) and not isinstance(error, CkptError):
            translated = explained(self._verb, self._where, error)
            raise translated from (None if isinstance(translated, FileNotFoundError) else cause_to_show(error))


def explained(verb: str, where: str, error: Exception) -> Exception:
    """The exception to raise: FileNotFoundError where the path does not exist, else StorageAccessError."""
    if verb in _MAY_BE_MISSING and isinstance(error, FileNotFoundError | NotADirectoryError):
        return FileNotFoundError(without_secrets(where))
    return StorageAccessError(
        f"Cannot {verb} {without_secrets(where)}: {type(error).__name__}: {without_secrets(str(error))}. Check that "
        f"the path is correct, that this process is allowed to {verb} there, and that credentials and endpoint are "
        "set."
    )


class Guarded:
    """A byte stream that raises failures as StorageAccessError, so that a full disk is reported with its location.

    Args:
        stream: The stream to wrap.
        where: Its URL.
    """

    def __init__(self, stream: IO[bytes], where: str) -> None:
        self._stream = stream
        self._where = where

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stream."""
        self._stream.close()

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

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to a position."""
        with accessing("read", self._where):
            return self._stream.seek(offset, whence)

    def tell(self) -> int:
        """The position."""
        return self._stream.tell()
