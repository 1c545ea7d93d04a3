"""All exceptions that this package raises on purpose.

Each message says what was found, where, and what to do.
"""


class CkptError(Exception):
    """Base class of every error raised by dagster_ckpt."""


class OptionError(CkptError, ValueError):
    """The value of an option is out of range."""


class OptionTypeError(CkptError, TypeError):
    """The value of an option has the wrong type."""


class JavaNotFoundError(CkptError, OSError):
    """No Java runtime that Spark supports was found on this machine."""


class SparkNotFoundError(CkptError, ImportError):
    """PySpark cannot be imported; this package does not install it."""


class UnsupportedSparkError(CkptError):
    """This version of Spark is not supported, or lacks a requested feature."""


class StorageAccessError(CkptError, OSError):
    """A storage path cannot be reached, read or written."""


class SnapshotNotFoundError(CkptError, FileNotFoundError):
    """No checkpoint or savepoint exists at the given location."""


class SnapshotHeldError(CkptError):
    """A snapshot was not deleted because it is still in use.

    `passes`: only readers use it, so a later retry can succeed.
    """

    def __init__(self, message: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


class SnapshotCorruptError(CkptError):
    """A snapshot is truncated, modified, or refers to missing data."""


class SnapshotTooLargeError(CkptError):
    """A snapshot exceeds the size limit of its storage."""


class LiveDirectoryError(CkptError):
    """Spark's live checkpoint directory is missing, empty or inconsistent."""


class RecoveryExhaustedError(LiveDirectoryError):
    """Recovery failed from every recovery point; manual action is required."""


class UnknownLayoutError(LiveDirectoryError):
    """The live directory contains a file in an unsupported format version."""


class NothingCommittedError(LiveDirectoryError):
    """The query has not committed a batch yet, so no snapshot can be taken."""


class IncompleteCutError(LiveDirectoryError):
    """The live directory lacks a file that a restore would need, so no snapshot was taken."""


class DamagedCutError(IncompleteCutError):
    """A file of the live directory does not match its checksum."""


class ChecksumDiffersError(IncompleteCutError):
    """A file of the live directory does not have the length that Spark's checksum file records."""


class CutOvertakenError(IncompleteCutError):
    """Spark purged or replaced a file between the cut and the copy; a retry succeeds."""


class RestoreError(CkptError):
    """A snapshot could not be restored into a live directory."""


class StateRewriteError(CkptError, ValueError):
    """State cannot be rewritten as requested, or a rewrite lost rows; the stream is unchanged."""


class StateBackendChangeError(CkptError, ValueError):
    """The query's state was written by another state backend, and the start may not convert it."""


class PlanChangedError(CkptError, ValueError):
    """The new code declares different state from what is stored, and the start does not allow that."""


class SourceChangedError(CkptError, ValueError):
    """The query reads other sources than those of its offsets, or in another order."""


class StatePartitionsError(CkptError, ValueError):
    """The query's state has another number of partitions, and the start may not rewrite it."""


class StreamFailedError(CkptError):
    """A stream failed and its restart strategy allows no further restart."""


class QueryStopError(CkptError):
    """A streaming query did not stop within the time limit."""


class QueryStalledError(CkptError):
    """A query made no progress for its stall timeout, or its JVM did not answer.

    A restart in a new process may help.
    """


class SinkRollbackError(RestoreError):
    """A sink could not be rolled back to the batch that is being restored."""


class RowsAtRiskError(RestoreError):
    """The start would go back to a batch after which a sink could lose rows, and this was not confirmed."""


class InputGoneError(RowsAtRiskError):
    """The start would read input again that its sources no longer have, and this was not confirmed.

    `gone` describes that input.
    """

    def __init__(self, message: str, gone: str = "") -> None:
        super().__init__(message)
        self.gone = gone


class StateAtRiskError(RestoreError):
    """The start would discard state, and this was not confirmed."""


class RestartWithdrawnError(CkptError):
    """The start or restart was withdrawn before it began, or the stream was canceled or suspended."""


class SharedSinkError(CkptError):
    """A query would write to, or a clean-up delete from, a folder whose sink log belongs to another query."""


class CatalogError(CkptError):
    """The checkpoint catalog cannot be used: it is unreachable or has another schema version."""


class StreamNotFoundError(CkptError, LookupError):
    """The catalog has no stream with this id."""


class LeaseHeldError(CkptError):
    """Another execution holds the stream's lease."""


class LeaseLostError(CkptError):
    """Another execution took over this execution's lease, so its query was stopped."""


class StartStoppedError(CkptError):
    """A start was canceled, suspended or interrupted before its query started; the next one continues there."""


class RequestFailedError(CkptError):
    """A requested checkpoint, savepoint or stop failed."""


class RequestTimeoutError(CkptError, TimeoutError):
    """The running execution did not answer a request in time; the request was withdrawn."""


class SnapshotAbortedError(CkptError):
    """A snapshot was aborted while it was being written, and its partial data was removed."""
