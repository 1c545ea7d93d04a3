"""Which failures make a start examine the point that it began from. Pure.

A failure is only a suspicion: `examination.py` decides by reading. Its words, which may be those of the user's code,
are never evidence of damage.
"""

from __future__ import annotations

import re

from dagster_ckpt.errors import (
    CkptError,
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

_OF_A_POINT = (SnapshotCorruptError, SnapshotNotFoundError, LiveDirectoryError, RestoreError)
_OF_SOMETHING_ELSE = (
    *(CutOvertakenError, NothingCommittedError, RecoveryExhaustedError, UnknownLayoutError),
    *(RowsAtRiskError, SinkRollbackError, StateAtRiskError),
)
# The process or its JVM was ended. Nothing was said of any file, and nobody may be left to wait for an examination.
_ENDED = re.compile(r"(InterruptedException|ClosedByInterrupt|Py4JNetworkError|SparkContext was shut down)")


def is_suspicious(error: Exception) -> bool:
    """Whether a failed start may have failed because of the point that it began from.

    An error of this package says which it is; any other was raised by Spark or by the user's code.
    """
    if isinstance(error, CkptError):
        return isinstance(error, _OF_A_POINT) and not isinstance(error, _OF_SOMETHING_ELSE)
    return is_suspicious_end(str(error))


def is_suspicious_end(reason: str) -> bool:
    """Whether a query may have failed because of its live directory: always, unless it was interrupted.

    Args:
        reason: The exception that ended it, as text.
    """
    return _ENDED.search(reason) is None
