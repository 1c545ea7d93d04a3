"""Every error this package raises on purpose.

Each message says what was found, where, and what to do next. All derive from
`CkptError`; where a built-in exception has the same meaning the class derives from it
too, so `except ValueError` and `except FileNotFoundError` keep working.
"""


class CkptError(Exception):
    """Base class of every error raised by dagster_ckpt."""


class OptionError(CkptError, ValueError):
    """An option has a value outside its allowed range."""


class OptionTypeError(CkptError, TypeError):
    """An option was given a value of the wrong type."""


class JavaNotFoundError(CkptError, OSError):
    """No Java runtime that Spark can use is on this machine."""


class StorageAccessError(CkptError, OSError):
    """A storage path cannot be reached, read or written."""


class SnapshotNotFoundError(CkptError, FileNotFoundError):
    """No checkpoint or savepoint is where one was looked for."""


class SnapshotHeldError(CkptError):
    """A snapshot is not deleted, because something or somebody needs it.

    Args:
        message: What holds it.
        passes: Whether only readers hold it, so that trying again soon will do.
    """

    def __init__(self, message: str, *, passes: bool = False) -> None:
        super().__init__(message)
        self.passes = passes


class SnapshotCorruptError(CkptError):
    """A snapshot is there but cannot be trusted: truncated, altered, or with data missing."""


class SnapshotTooLargeError(CkptError):
    """A snapshot is larger than the storage accepts."""


class LiveDirectoryError(CkptError):
    """Spark's live checkpoint directory is missing, empty or inconsistent."""


class RecoveryExhaustedError(LiveDirectoryError):
    """Every point that a stream could be recovered from has failed: a person has to decide."""


class UnknownLayoutError(LiveDirectoryError):
    """A live directory holds a file in a version that this package does not know; nothing of it was copied."""


class NothingCommittedError(LiveDirectoryError):
    """The query has not committed a batch yet, so there is nothing to take a snapshot of."""


class IncompleteCutError(LiveDirectoryError):
    """Something that a restore would need is not in the live directory, so no snapshot was taken."""


class CutOvertakenError(IncompleteCutError):
    """Spark purged or replaced a file after a cut was taken and before it was read; a new cut succeeds."""


class RestoreError(CkptError):
    """A snapshot could not be turned into a live directory."""


class StateBackendChangeError(CkptError, ValueError):
    """A query's state was begun with another state backend, which the wanted one cannot read."""


class PlanChangedError(CkptError, ValueError):
    """The code about to run keeps other state than what is there, and nobody said that this is meant."""


class StatePartitionsError(CkptError, ValueError):
    """A query's state is kept in another number of partitions than is wanted, and Spark does not change it."""


class StreamFailedError(CkptError):
    """A stream failed, and its restart strategy gave up."""


class QueryStopError(CkptError):
    """A streaming query was told to stop and still runs."""


class QueryStalledError(CkptError):
    """A query made no batch and did not rest for longer than its stream allows; a new process may do better."""


class SinkRollbackError(RestoreError):
    """A sink could not be brought back to the batch that is being restored."""


class RowsAtRiskError(RestoreError):
    """A start would go back to a batch where a sink could lose rows, and nobody accepted that."""


class StateAtRiskError(RestoreError):
    """A start would give up state, and nobody confirmed that."""


class RestartWithdrawnError(CkptError):
    """A start or restart was launched, and was taken back before it began, or the stream was cancelled or suspended."""


class SharedSinkError(CkptError):
    """A query would write to, or a clean-up delete in, a folder whose log is another query's or stands elsewhere."""


class CatalogError(CkptError):
    """The checkpoint catalog cannot be used: unreachable, or of another schema version."""


class StreamNotFoundError(CkptError, LookupError):
    """The catalog knows no stream of this id."""


class LeaseHeldError(CkptError):
    """Another execution holds the stream's lease: a stream has one writer at a time."""


class LeaseLostError(CkptError):
    """This execution's lease passed to another one, so its query was stopped."""


class StartStoppedError(CkptError):
    """A start was cancelled, suspended or interrupted before its query was started; the next start goes on."""


class RequestFailedError(CkptError):
    """A checkpoint, savepoint or stop that was asked for did not succeed."""


class RequestTimeoutError(CkptError, TimeoutError):
    """The running execution did not answer a request in time; the request was withdrawn."""


class SnapshotAbortedError(CkptError):
    """A snapshot was given up while it was written; what was written of it is removed."""
