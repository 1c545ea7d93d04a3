"""Classifies failures that mean the state a query was started on is damaged, so that an older point may work. Pure.

Spark's messages are known from real damage to real live directories:
`tests/recovery/damages.yaml`. A transient problem, such as an unavailable storage, is never
damage, wherever it occurs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dagster_ckpt.errors import (
    CutOvertakenError,
    LiveDirectoryError,
    NothingCommittedError,
    RecoveryExhaustedError,
    RestoreError,
    RowsAtRiskError,
    SinkRollbackError,
    SnapshotCorruptError,
    SnapshotNotFoundError,
    StateAtRiskError,
    UnknownLayoutError,
)
from dagster_ckpt.spark.query.query import trace_of

_OF_A_POINT = (SnapshotCorruptError, SnapshotNotFoundError, LiveDirectoryError, RestoreError)
_OF_SOMETHING_ELSE = (
    *(CutOvertakenError, NothingCommittedError, RecoveryExhaustedError, UnknownLayoutError),
    *(RowsAtRiskError, SinkRollbackError, StateAtRiskError),
)
# Spark's error conditions for a damaged live directory or file sink log.
_CONDITION = re.compile(
    r"\[(CANNOT_LOAD_STATE_STORE|MALFORMED_LOG_FILE|BATCH_METADATA_NOT_FOUND|CONCURRENT_STREAM_LOG_UPDATE"
    r"|STREAMING_STATEFUL_OPERATOR_MISSING_STATE_DIRECTORY|STREAMING_CHECKPOINT_MISSING_METADATA_FILE"
    r"|CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED|INVALID_CHANGE_LOG_READER_VERSION|STATE_STORE_INVALID_[A-Z_]+)"
    r"(\.[A-Z_]+)?\]"
)
# Frames in which Spark reads a log or metadata file. A failure there without a condition means an
# unreadable file.
_READS_A_LOG = re.compile(
    r"(OffsetSeqLog\.deserialize|CommitLog\S*\.(readCommitMetadata|deserialize)|CompactibleFileStreamLog\.deserialize"
    r"|HDFSMetadataLog\.\S*(getExistingBatch|applyFnToBatch)|StreamMetadata\$\.read|SchemaReader|OperatorStateMetadata"
    r"|MetadataVersionUtil|StreamingQueryCheckpointMetadata|FileStreamSource\.getBatch)"
)
_NO_QUERY_ID = re.compile(r"(Invalid UUID string|NumberFormatException)[\s\S]*StreamExecution\.<init>")
_READING = re.compile(
    r"(MalformedInputException|JsonEOFException|JsonParseException|JsonMappingException|MappingException"
    r"|UTFDataFormatException|EOFException|IllegalStateException|IllegalArgumentException|NumberFormatException"
    r"|AssertionError|ChecksumException|FileNotFoundException|NoSuchFileException)"
)
_MAY_PASS = re.compile(
    r"(java\.net\.|SocketTimeout|TimeoutException|UnknownHost|AccessDenied|AccessControlException|Permission denied"
    r"|No space left|Too many open files|InterruptedException|ClosedByInterrupt|OutOfMemoryError|UNRELEASED_THREAD"
    r"|SlowDown|Service Unavailable|Connection (reset|refused|closed)|ExecutorLost|Py4JNetworkError)"
)
_CORRUPT = re.compile(
    r"(ZipException|EOFException|corrupt|checksum|Bad table magic|UNEXPECTED_FILE_SIZE|does not exist|FileNotFound"
    r"|NoSuchFile|CANNOT_READ_|LZ4Exception|MalformedInput|Unexpected end|NegativeArraySize|IndexOutOfBounds)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Damage:
    """What is wrong with a point that a query was started on.

    Attributes:
        error: Class of the error, the same for the same problem.
        detail: What was found, for a message.
        is_certain: Whether a retry cannot succeed.
    """

    error: str
    detail: str
    is_certain: bool


def damage_of(error: Exception) -> Damage | None:
    """The damage that a failed start reveals in the point it started from; None if it reveals none."""
    if isinstance(error, _OF_SOMETHING_ELSE):
        return None
    if isinstance(error, _OF_A_POINT):
        return Damage(type(error).__name__, str(error), is_certain=True)
    return damage_in(trace_of(error))


def damage_in(trace: str) -> Damage | None:
    """The damage that a query's failure reveals in the state it was started on; None if it reveals none.

    Args:
        trace: The exception as printed by Spark's JVM, with causes and frames.
    """
    if _MAY_PASS.search(trace):
        return None
    messages = "; ".join(
        dict.fromkeys(line.strip() for line in trace.splitlines() if line.strip() and _is_message(line))
    )
    detail = messages[:1_000] or trace[:1_000]
    condition = _CONDITION.search(trace)
    if condition is not None:
        is_certain = condition[1] != "CONCURRENT_STREAM_LOG_UPDATE" and (
            condition[1] != "CANNOT_LOAD_STATE_STORE" or _CORRUPT.search(trace) is not None
        )
        return Damage(condition[1], detail, is_certain)
    if _NO_QUERY_ID.search(trace) or (_READS_A_LOG.search(trace) and _READING.search(trace)):
        return Damage("UNREADABLE_LOG", detail, is_certain=True)
    return None


def _is_message(line: str) -> bool:
    return not line.lstrip().startswith(("at ", "...", "at ["))
