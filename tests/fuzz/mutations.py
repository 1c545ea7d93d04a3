"""Damage and malice, at random: bytes, text and JSON values that no honest writer makes."""

from __future__ import annotations

import json
import random
import re
from typing import Any

TOKENS = (
    *(b"null", b"true", b"-1", b"0", b"1e400", b"NaN", b"9" * 23, b'""', b"[]", b"{}", b'"x"', b"\xff\xfe", b"\0"),
    *(b"v2\n", b"v3\n", b"v" + b"9" * 20 + b"\n", b"vx\n", b"{" * 3000, b"[" * 3000, b'{"a":' * 2000, b"\n", b"\r\n"),
    *(b'"logOffset"', b"\xed\xa0\x80", b"\\ud800", b":", b",", b"\xd9\xa3"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 1.5, 1e308, -0.0, 2**31, 2**63, 2**64, 10**18, 10**30, 10**400),
    *("", ".", "..", "../x", "/etc/passwd", "a/../b", "a//b", "a/", "\0", "a\0b", "\ud800", "\udfff/x", "e\u0301", "A"),
    *("../shared/x", "../shared/../x", "../../shared/x", "_metadata", "_deleting", "CON", "x" * 300, "x/" * 2500 + "x"),
    *([], {}, [1], {"a": 1}, [[[]]], "\n", "metadata", "metadata/x", "offsets", "commits/4", "sinks/0/1", "sinks/x/1"),
    *("sinks/0", "sinks/0/a/b", "sinks/" + "9" * 30 + "/0", "state", "C:\\x", "~root", "$HOME", "%00", "null", "NaN"),
)
_SCALAR = re.compile(rb'-?\d+|true|false|null|"[^"]*"')


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """The same bytes with a few changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        _change(rng, changed)
    return bytes(changed)


def mutated_text(rng: random.Random, data: bytes) -> bytes:
    """The same text with a few of its words replaced by others."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        words = list(_SCALAR.finditer(data))
        if words and rng.random() < 0.6:
            word = rng.choice(words)
            data = data[: word.start()] + rng.choice(TOKENS) + data[word.end() :]
        else:
            at = rng.randrange(len(data) + 1)
            data = data[:at] + rng.choice(TOKENS) + data[at + rng.choice((0, 0, 1, 8)) :]
    return data


def mutated_value(rng: random.Random, value: Any) -> Any:
    """The same JSON value with one change somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key, changed = rng.choice(list(value)), dict(value)
        kind = rng.random()
        if kind < 0.08:
            del changed[key]
        elif kind < 0.12:
            changed[rng.choice(("x", "", f"{key}2", "\ud800"))] = rng.choice(VALUES)
        else:
            changed[key] = mutated_value(rng, changed[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.85:
        at, items = rng.randrange(len(value)), list(value)
        kind = rng.random()
        if kind < 0.06:
            del items[at]
        elif kind < 0.12:
            items.insert(at, rng.choice(items))
        elif kind < 0.15:
            items.append(rng.choice(VALUES))
        else:
            items[at] = mutated_value(rng, items[at])
        return items
    if type(value) is int and rng.random() < 0.5:
        return rng.choice((value + 1, value - 1, -value, value * 2, 0, 2**63, 10**18, value + rng.randrange(100)))
    return rng.choice(VALUES)


def dumped(rng: random.Random, value: Any) -> bytes:
    """JSON, now and then of characters that UTF-8 does not have."""
    return json.dumps(value, ensure_ascii=rng.random() < 0.3, separators=(",", ":")).encode("utf-8", "surrogatepass")


def _change(rng: random.Random, data: bytearray) -> None:
    if len(data) < 4:
        data += b"abcd"
    at = rng.randrange(len(data))
    match rng.randrange(7):
        case 0:
            data[at] ^= 1 << rng.randrange(8)
        case 1:
            data[at] = rng.choice((0, 127, 128, 255))
        case 2:
            del data[at : at + rng.choice((1, 2, 8, 100))]
        case 3:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        case 4:
            del data[at:]
        case 5:
            other, length = rng.randrange(len(data)), rng.randrange(1, 64)
            data[at : at + length] = data[other : other + length]
        case _:
            data[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80"))
