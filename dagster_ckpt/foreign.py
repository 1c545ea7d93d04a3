"""Reading bytes that this process did not write: damaged, crafted, or of a program that nobody here knows.

Parsers fail on such bytes with whatever comes up: a zip that says it is encrypted is a `RuntimeError`, JSON nested
too deep a `RecursionError`, an unknown method a `NotImplementedError`. So each reader of foreign bytes stands in
`reading`, which turns all of it into the reader's own error, and unpacks by `inflated`, which is bounded.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from dagster_ckpt.errors import CkptError

# What parsers raise on input that is not what they expect. Not OSError: a storage that does not answer says nothing
# about the bytes. ValueError is also bad JSON, text that is no UTF-8, and a model that pydantic refuses.
_UNREADABLE = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    NotImplementedError,
    RuntimeError,
    EOFError,
    struct.error,
    zlib.error,
    zipfile.BadZipFile,
)
_SHOWN_CHARACTERS = 300
# Names in the batch logs are a Java `long`, as are lengths and places in files.
LARGEST_LONG = 2**63 - 1
# Packed text of any honest writer is a sixteenth of its length at the least: its digests and names do not repeat.
_INFLATION = 64
_ALWAYS_INFLATED_BYTES = 16 * 1024 * 1024
_SURROGATE = "\\ud"


@contextmanager
def reading(refuse: Callable[[str], CkptError]) -> Iterator[None]:
    """Turn what a parser raises on bytes that it cannot read into an error of this package.

    Args:
        refuse: Makes that error from what the parser said. Errors of this package pass as they are.
    """
    try:
        yield
    except CkptError:
        raise
    except _UNREADABLE as error:
        raise refuse(said(error)) from error


def said(error: Exception) -> str:
    """What a parser said, short and printable: it may quote the bytes that it could not read."""
    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        text = error.errors(include_input=False)[0]["msg"]
    elif isinstance(error, KeyError):
        text = f"{text} is missing"
    return text.encode("utf-8", "backslashreplace").decode()[:_SHOWN_CHARACTERS]


def from_json(text: str | bytes | bytearray) -> Any:
    """Read JSON.

    Raises:
        ValueError: It is none, is nested deeper than can be read, or holds half a character, which no file name, log
            or database takes.
    """
    # `json` itself would read half characters out of bytes.
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text)
        if _SURROGATE in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def number_in(name: str) -> int | None:
    """The number that a file name is, as Java's `toLong` reads it; None for any other name."""
    if not (name.isascii() and name.isdecimal()) or len(name) > 19:
        return None
    number = int(name)
    return number if number <= LARGEST_LONG else None


def inflation_limit(packed: int) -> int:
    """How long at most the plain text of so many packed bytes may be."""
    return _ALWAYS_INFLATED_BYTES + _INFLATION * packed


def inflated(packed: bytes | memoryview, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Unpack what was compressed by deflate, within `inflation_limit`.

    Args:
        packed: The packed bytes.
        wbits: zlib's name for the kind of header.

    Raises:
        ValueError: It would become longer than packed text of an honest writer does.
        EOFError: It breaks off.
        zlib.error: It is damaged.
    """
    limit = inflation_limit(len(packed))
    unpacker = zlib.decompressobj(wbits)
    plain = unpacker.decompress(packed, limit)
    if not unpacker.eof:
        if len(plain) >= limit:
            raise ValueError(f"its {len(packed)} bytes become more than {limit}, which no writer makes")
        raise EOFError("it breaks off")
    return plain
