"""Parse untrusted bytes: data that may be damaged, malicious, or written by another program.

Parsers raise many exception types, such as `RecursionError` for nested JSON, so readers run inside `reading`.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dagster_ckpt.errors import CkptError

# What parsers raise. Not OSError: a storage that does not respond says nothing about the bytes.
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
# Four times what our text needs: it never shrinks below 1/16, because digests and names do not repeat.
_INFLATION = 64
_ALWAYS_INFLATED_BYTES = 16 * 1024 * 1024
_SURROGATE = "\\ud"


@contextmanager
def reading(refuse: Callable[[str], CkptError]) -> Iterator[None]:
    """Convert what a parser raises into `refuse(message)`; errors of this package pass."""
    try:
        yield
    except CkptError:
        raise
    except _UNREADABLE as error:
        raise refuse(parser_message(error)) from error


def parser_message(error: Exception) -> str:
    """Return a parser's message, shortened and printable: it may quote the unreadable bytes."""
    # Slow to import.
    from pydantic_core import ValidationError  # noqa: PLC0415

    text = str(error) or type(error).__name__
    if isinstance(error, ValidationError):
        text = error.errors(include_input=False)[0]["msg"]
    elif isinstance(error, KeyError):
        text = f"{text} is missing"
    return text.encode("utf-8", "backslashreplace").decode()[:_SHOWN_CHARACTERS]


def from_json(text: str | bytes | bytearray) -> Any:
    """Parse JSON; ValueError also for deep nesting and unpaired surrogates."""
    # `json` accepts unpaired surrogates in bytes.
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text)
        if _SURROGATE in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    return value


def number_in(name: str) -> int | None:
    """Parse a number as Java's `toLong` does, but without a sign; None for any other name."""
    if not (name.isascii() and name.isdecimal()) or len(name) > 19:
        return None
    number = int(name)
    return number if number <= LARGEST_LONG else None


def inflation_limit(packed: int) -> int:
    return _ALWAYS_INFLATED_BYTES + _INFLATION * packed


def inflated(packed: bytes | memoryview, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress deflate data.

    Raises:
        ValueError: The output exceeds `inflation_limit`.
        EOFError: The data is truncated.
        zlib.error: The data is damaged.
    """
    limit = inflation_limit(len(packed))
    unpacker = zlib.decompressobj(wbits)
    plain = unpacker.decompress(packed, limit)
    if not unpacker.eof:
        if len(plain) >= limit:
            raise ValueError(
                f"its {len(packed)} compressed bytes expand to more than {limit}, which no writer produces"
            )
        raise EOFError("it is truncated")
    return plain
