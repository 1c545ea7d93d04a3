"""Failures of code, sources, sinks and environment, none of which says anything about the state of a stream."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.operators import CODES, Code, lay

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What Spark and Hadoop say of damaged files; here a person's code says it.
WORDS = (
    "[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred during loading state. SQLSTATE: 58030",
    "[CANNOT_LOAD_STATE_STORE.CANNOT_READ_DELTA_FILE_NOT_EXISTS] Error reading delta file 4.delta: does not exist",
    "[CANNOT_LOAD_STATE_STORE.UNEXPECTED_FILE_SIZE] Copied 5.zip: expected 812 bytes, found 406 bytes",
    "[MALFORMED_LOG_FILE] Log file /live/offsets/7 was malformed: failed to read correct log version",
    "[BATCH_METADATA_NOT_FOUND] Unable to find batch /out/_spark_metadata/3.compact. SQLSTATE: 42K03",
    "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs detected for 7",
    "[STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY] the state directory is empty or missing",
    "[STREAMING_CHECKPOINT_MISSING_METADATA_FILE] Checkpoint location is missing metadata file",
    "[CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED] checksum of state/0/0/5.changelog differs",
    "[INVALID_CHANGE_LOG_READER_VERSION] The change log reader version cannot be 9",
    "[STATE_STORE_INVALID_VALUE_SCHEMA_EVOLUTION] value schema of state/0/0/_metadata/schema",
    "java.lang.IllegalArgumentException: requirement failed at FileStreamSource.getBatch",
    "java.lang.AssertionError: assertion failed: There are [2] sources in the checkpoint offsets and now there are [1]",
    "java.lang.IllegalStateException: batch 5 doesn't exist",
    "java.io.EOFException: Stream ended prematurely",
    "java.io.IOException: Stream is corrupted",
    "net.jpountz.lz4.LZ4Exception: Error decoding offset 9 of input buffer",
    "org.apache.hadoop.fs.ChecksumException: Checksum error: file:/live/offsets/7 at 0 exp: 12 got: 34",
    "java.util.zip.ZipException: zip END header not found",
    "org.rocksdb.RocksDBException: Corruption: Bad table magic number: expected 986351839790",
    "java.nio.charset.MalformedInputException: Input length = 1",
    "com.fasterxml.jackson.core.io.JsonEOFException: Unexpected end-of-input",
    "java.io.FileNotFoundException: File file:/live/sources/0/4 does not exist",
    "java.nio.file.NoSuchFileException: /live/state/0/1/5.changelog",
    "java.lang.NumberFormatException: Error at index 1 in: 4?df; Invalid UUID string",
    "java.lang.NegativeArraySizeException: -7",
    "java.lang.OutOfMemoryError: Java heap space",
    "java.net.SocketTimeoutException: Read timed out",
)
FRAMES = """
\tat org.apache.spark.sql.execution.streaming.runtime.FileStreamSource.getBatch(FileStreamSource.scala:271)
\tat org.apache.spark.sql.execution.streaming.checkpointing.HDFSMetadataLog.applyFnToBatchByStream(Log.scala)
\tat org.apache.spark.sql.execution.streaming.checkpointing.OffsetSeqLog.deserialize(OffsetSeqLog.scala:40)
\tat org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider.loadMap(Store.scala)
\tat org.apache.spark.sql.execution.streaming.runtime.StreamExecution.<init>(StreamExecution.scala:188)
Caused by: java.lang.IllegalArgumentException: requirement failed
\tat org.apache.spark.sql.execution.streaming.checkpointing.CommitLog.readCommitMetadata(CommitLog.scala:60)"""
EXCEPTIONS = (
    *(AssertionError, AttributeError, BufferError, ChildProcessError, ConnectionResetError, EOFError, FileExistsError),
    *(FileNotFoundError, IndexError, IsADirectoryError, KeyError, LookupError, MemoryError, ModuleNotFoundError),
    *(NotADirectoryError, NotImplementedError, OSError, OverflowError, PermissionError, RecursionError, RuntimeError),
    *(StopIteration, SyntaxError, SystemError, TimeoutError, TypeError, UnicodeError, ValueError, ZeroDivisionError),
)
# Each fails in a task for a row that every file has.
EXPRESSIONS = {
    "division by zero": "id div 0",
    "remainder by zero": "id % 0",
    "cast of text": "CAST(concat(id, 'x') AS INT)",
    "cast to a date": "CAST(concat('2026-13-', id) AS DATE)",
    "cast to a boolean": "CAST(concat('perhaps', id) AS BOOLEAN)",
    "overflow": "9223372036854775807 + abs(id) + 1",
    "overflow of a cast": "CAST(9223372036854775807 - abs(id) AS INT)",
    "multiplication": "9223372036854775807 * (abs(id) + 2)",
    "negation": "-(CAST(-9223372036854775808 AS BIGINT) + id - id)",
    "array index": "array(1, 2)[CAST(abs(id) AS INT) + 10]",
    "element of an array": "element_at(array(1, 2), CAST(abs(id) AS INT) + 9)",
    "element 0": "element_at(array(1, 2), CAST(id - id AS INT))",
    "timestamp": "CAST(concat('25:61', id) AS TIMESTAMP)",
    "decimal": "CAST(1e30 + id AS DECIMAL(5, 2))",
    "assertion": "assert_true(id < -1000)",
    "the same key twice": "map_from_arrays(array(1, 1), array(id, id))",
    "address": "parse_url(concat('inva lid ', id), 'HOST')",
    "bytes": "to_binary(concat('zz', id), 'hex')",
    "number": "to_number(concat('x', id), '99')",
    "a sequence": "sequence(id, id + 10, -1)",
    "JSON": "from_json(concat('{', id), 'a int', map('mode', 'FAILFAST'))",
    "an interval": "make_interval(CAST(2147483647 + id - id AS INT), 2147483647)",
}
# Each cannot even be planned.
PLANS = {
    "a column that does not exist": "missing_column",
    "a function that does not exist": "no_such_function(id)",
    "a wrong type": "explode(id)",
    "a field of a number": "id.field",
    "words that are no SQL": "SELECT FROM",
    "a class that does not exist": "java_method('com.example.Missing', 'call')",
    "a method that does not exist": "java_method('java.util.UUID', 'missing')",
}
WRONG_OPTIONS = {
    "maxFilesPerTrigger": "0",
    "maxFileAge": "soon",
    "cleanSource": "nonsense",
    "latestFirst": "perhaps",
    "multiLine": "perhaps",
}
FORMATS = ("delta", "iceberg", "kafka", "com.example.MissingSource", "hudi", "kinesis", "pulsar", "rate.nothing")


@dataclass
class Failure:
    """A failure that a stream is given.

    Attributes:
        name: What fails.
        code: The program's code: the sources that it reads.
        columns: An expression that each row is given first.
        source_format: What its first source is read with, instead of JSON.
        options: More options of its sources.
        schema: The schema of its sources.
        save: Called with each batch, in place of the sink.
        around: Holds while the program runs.
    """

    name: str
    code: Code = CODES["right"]
    columns: str | None = None
    source_format: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    schema: str | None = None
    save: Callable[[DataFrame], None] | None = None
    around: Callable[[Path], Any] | None = None


def _raising(error: BaseException) -> Callable[[DataFrame], None]:
    def save(_: DataFrame) -> None:
        raise error

    return save


def _raising_after(error: BaseException) -> Callable[[DataFrame], None]:
    def save(rows: DataFrame) -> None:
        # The state is loaded and committed, or the rows were written, and then it fails.
        rows.collect()
        raise error

    return save


def _caused() -> Callable[[DataFrame], None]:
    def save(_: DataFrame) -> None:
        try:
            Path("/live/offsets/5").read_text()
        except OSError as error:
            raise RuntimeError("state store is corrupt") from error

    return save


def failures() -> Iterator[Failure]:
    """All of them, no two alike."""
    for number, word in enumerate(WORDS):
        name = word[:60]
        yield Failure(f"the sink says {name}", save=_raising(RuntimeError(word)))
        yield Failure(f"the sink says with a trace {name}", save=_raising_after(RuntimeError(word + FRAMES)))
        text = (word + (FRAMES if number % 2 else "")).replace("'", "").replace("\t", "    ")
        yield Failure(f"a task says {name}", columns=f"raise_error('{text}')")
    for error in EXCEPTIONS:
        yield Failure(f"the sink raises {error.__name__}", save=_raising(error("state/0/0/5.delta")))
        yield Failure(f"the sink raises {error.__name__} late", save=_raising_after(error("state/0/0/5.delta")))
    yield Failure("the sink raises with a cause", save=_caused())
    for name, expression in {**EXPRESSIONS, **PLANS}.items():
        yield Failure(name, columns=expression)
    for each in FORMATS:
        yield Failure(f"no source {each}", source_format=each)
    for code in CODES.values():
        if code.version != "right":
            yield Failure(f"code: {code.version}", code=code)
    for left, right in (("other", "other"), ("left", "left"), ("right", "right"), ("left/0000.json", "right")):
        yield Failure(f"reads {left} and {right}", code=Code("other folders", left, right))
    for schema in ("id string, at string, more string NOT NULL", "id array<long>, at long", "other long"):
        yield Failure(f"schema {schema}", schema=schema)
    for option, value in WRONG_OPTIONS.items():
        yield Failure(f"option {option}={value}", options={option: value})
    for side, content in itertools.product(("left", "right"), (b"{", b"\x00" * 64, b'{"id": "text"}', b"\xff\xfe\xfd")):
        yield Failure(f"a file of {side} is {content[:8]!r}", around=_corrupt_input(side, content))
    yield Failure("the inputs are away", around=_away("left"))
    yield Failure("the other inputs are away", around=_away("right"))


def _corrupt_input(side: str, content: bytes) -> Callable[[Path], Any]:
    @contextmanager
    def around(root: Path) -> Iterator[None]:
        newest = max((root / "in" / side).glob("[0-9]*.json"))
        kept, laid_at = newest.read_bytes(), newest.stat().st_mtime
        newest.write_bytes(content)
        # A file of today would make all the others too old for the source (`maxFileAge`).
        os.utime(newest, (laid_at, laid_at))
        try:
            yield
        finally:
            lay(root, side, int(newest.stem))
            assert newest.read_bytes() == kept

    return around


def _away(side: str) -> Callable[[Path], Any]:
    @contextmanager
    def around(root: Path) -> Iterator[None]:
        folder = root / "in" / side
        folder.rename(root / "away")
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()
            (root / "away").rename(folder)

    return around
