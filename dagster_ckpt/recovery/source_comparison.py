"""Compares the sources of a query to start with those that its offsets belong to. Pure: knows neither Spark nor files.

Where a path or a subscription changed, what was read decides: a source goes on if it still reads the files or topics
that its log and its offset name, because Spark then takes nothing of them for new.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from dagster_ckpt.spark.query.kafka_source import TopicOffsets, matches
from dagster_ckpt.spark.query.sources import (
    CLUSTER,
    DELTA,
    FILE,
    ICEBERG,
    KAFKA,
    PATH,
    PATTERN,
    TABLE,
    TABLE_ID,
    TOPIC_ID,
    TOPICS,
    SourceIdentity,
)

_NOTHING = "nothing"


@dataclass(frozen=True)
class ReadSource:
    """What is known of a source that was read.

    Attributes:
        identity: Its recorded identity; None if none was recorded.
        kind: The kind of source that its offset shows; None if the offset does not show it.
        has_read: Whether it has an offset.
        files: The files that its log names last.
        topics: The topics in its offset.
        table_id: The id of the table in its offset, if the offset has one.
    """

    identity: SourceIdentity | None = None
    kind: str | None = None
    has_read: bool = True
    files: Sequence[str] = ()
    topics: Sequence[str] = ()
    table_id: str | None = None

    def __str__(self) -> str:
        """For messages."""
        if self.identity is not None:
            return str(self.identity)
        where = sorted({folder_of(path) for path in self.files}) or sorted(self.topics)
        return " ".join([self.kind or "unknown", *([", ".join(where[:3])] if where else [])])


@dataclass(frozen=True)
class SourceDifference:
    """One source that differs.

    Attributes:
        source: Its name or position.
        was: What was read.
        now: What would be read.
        why: What that means; empty if a source was only added or taken away.
        is_refused: Whether the query cannot go on with it.
    """

    source: str
    was: str
    now: str
    why: str
    is_refused: bool = True

    def __str__(self) -> str:
        """As a line of a table."""
        return f"source {self.source}: was {self.was}, is {self.now}{f' ({self.why})' if self.why else ''}"


def source_differences(
    was: Mapping[str, ReadSource], now: Mapping[str, SourceIdentity]
) -> tuple[SourceDifference, ...]:
    """How sources differ from those that were read; empty if the query can go on with each of them.

    Args:
        was: The sources that were read, by name or position.
        now: The sources of the query to start, likewise.
    """
    found: list[SourceDifference] = []
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key), now.get(key)
        if before is None or after is None:
            # Spark can add a source that has a name.
            is_new_name = before is None and after is not None and after.name is not None
            described = _NOTHING if before is None else str(before), _NOTHING if after is None else str(after)
            found.append(SourceDifference(key, *described, "", is_refused=not is_new_name))
            continue
        found += [
            SourceDifference(key, str(before), str(after), why, is_refused) for why, is_refused in _in(before, after)
        ]
    return tuple(found)


def _in(was: ReadSource, now: SourceIdentity) -> Iterator[tuple[str, bool]]:
    before = was.identity
    kind = before.kind if before is not None else was.kind
    if kind is not None and kind != now.kind:
        yield "another kind of source", True
        return
    refused = {FILE: _files, KAFKA: _kafka, DELTA: _table, ICEBERG: _table}.get(now.kind, _other)(was, now)
    if refused is not None:
        yield refused, True
    elif before is not None:
        changed = [
            f"{name} {_shown(before, name)} -> {_shown(now, name)}"
            for name in sorted({*before.options, *now.options, PATH, "format", TABLE, TOPICS, PATTERN})
            if _shown(before, name) != _shown(now, name)
        ]
        if changed:
            yield ", ".join(changed), False


def _shown(identity: SourceIdentity, name: str) -> str:
    return identity.options.get(name) or identity.identity.get(name) or "default"


def _files(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity.get(PATH) if was.identity is not None else None
    path = now.identity.get(PATH)
    if path is None or before == path or not was.has_read:
        return None
    if not was.files:
        return None if before is None else "another path"
    elsewhere = [each for each in was.files if not reads(path, each)]
    if not elsewhere:
        return None
    return f"it does not read {elsewhere[0]}, which was read: the rest would be missing, or read again"


def _kafka(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity if was.identity is not None else {}
    known = [each for each in (before.get(TOPICS) or "").split(",") if each]
    read = sorted({*was.topics, *known} if not was.topics else {*was.topics})
    named, pattern = (now.identity.get(TOPICS) or "").split(","), now.identity.get(PATTERN)
    left = [each for each in read if each not in named and not (pattern and matches(pattern, each))]
    if left:
        return f"it does not read topic {', '.join(left)} any more"
    ids = {name for name in before if name.startswith(TOPIC_ID) and name in now.identity}
    made_again = sorted(name.removeprefix(TOPIC_ID) for name in ids if before[name] != now.identity[name])
    if made_again:
        return f"topic {', '.join(made_again)} was deleted and created again, or is that of another cluster"
    clusters = before.get(CLUSTER), now.identity.get(CLUSTER)
    if not ids and None not in clusters and clusters[0] != clusters[1]:
        return f"another cluster: its id was {clusters[0]}, and is {clusters[1]}"
    return None


def _table(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity if was.identity is not None else {}
    ids = was.table_id or before.get(TABLE_ID), now.identity.get(TABLE_ID)
    if None not in ids:
        return None if ids[0] == ids[1] else f"another table: its id was {ids[0]}, and is {ids[1]}"
    names = [(before.get(name), now.identity.get(name)) for name in (PATH, TABLE)]
    return "another table" if any(None not in pair and pair[0] != pair[1] for pair in names) else None


def _other(was: ReadSource, now: SourceIdentity) -> str | None:
    before = was.identity.identity if was.identity is not None else {}
    return "another table" if before.get(TABLE) != now.identity.get(TABLE) and before else None


def reads(path: str, file: str) -> bool:
    """Whether a file source with a path reads a file of its log.

    Args:
        path: An absolute path or pattern, with its scheme.
        file: The URI of the file.
    """
    pattern = re.compile(_as_expression(plain_path(path)) + "(/.*)?")
    return pattern.fullmatch(uri_path(file)) is not None


def uri_path(uri: str) -> str:
    """The path of a URI as Hadoop writes a path: `file:/data/a b`, not `file:///data/a%20b`."""
    return plain_path(unquote(uri))


def plain_path(path: str) -> str:
    """A path with one notation of a local scheme, and without a slash at its end."""
    return re.sub(r"^file:/+", "file:/", path).rstrip("/")


def folder_of(uri: str) -> str:
    """The folder of a file, from its URI."""
    return uri_path(uri).rpartition("/")[0]


# Of Hadoop's patterns (`GlobPattern`).
_WILD = {"*": "[^/]*", "?": "[^/]", "{": "(?:", "}": ")", ",": "|"}


def _as_expression(path: str) -> str:
    """A regular expression for a pattern of paths, as Hadoop reads it."""
    found, depth, index = "", 0, 0
    while index < len(path):
        char = path[index]
        if char == "\\" and index + 1 < len(path):
            index += 1
            found += re.escape(path[index])
        elif char == "[" and "]" in path[index:]:
            end = path.index("]", index)
            inside = path[index + 1 : end]
            found += f"[{'^' if inside[:1] in ('!', '^') else ''}{inside.lstrip('!^')}]"
            index = end
        elif char in _WILD and (char != "," or depth) and (char != "}" or depth):
            depth += {"{": 1, "}": -1}.get(char, 0)
            found += _WILD[char]
        else:
            found += re.escape(char)
        index += 1
    return found if not depth else re.escape(path)


def topics_in(offset: TopicOffsets | None) -> tuple[str, ...]:
    """The topics in the offset of a Kafka source."""
    return tuple(sorted(offset or ()))
