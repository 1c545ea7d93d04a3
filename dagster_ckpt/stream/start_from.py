"""Starting points: the values of `start_from`, parsed in one place."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from dagster_ckpt.config.state_backend import MAX_PARALLELISM
from dagster_ckpt.errors import OptionError
from dagster_ckpt.stream.source_offsets import SourceOffsets
from dagster_ckpt.values.modes import RecoveryClaimMode
from dagster_ckpt.values.redaction import refuse_user_info
from dagster_ckpt.values.validation import WholeNumber


class StartPoint(Enum):
    """The kinds of starting point."""

    LATEST = "latest"
    LATEST_CHECKPOINT = "latest-checkpoint"
    LATEST_SAVEPOINT = "latest-savepoint"
    PREFERRED_SAVEPOINT = "preferred-savepoint"
    EMPTY = "empty"
    BATCH = "batch"
    NAMED = "named"


STATE_PARTITIONS = WholeNumber("state_partitions", minimum=1, maximum=MAX_PARALLELISM.maximum)
_BATCH = re.compile(r"batch-(\d+)", re.IGNORECASE)
_CHECKPOINT = re.compile(r"chk-\d+", re.IGNORECASE)
_SNAPSHOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# Other operations use these words for every snapshot, and for the live directory.
_RESERVED = frozenset({"all", "live"})
LONGEST_LABEL = 128


def checked_label(label: str | None) -> str | None:
    """Validate a label for a snapshot: `start_from` must be able to find the snapshot by it, unambiguously.

    Args:
        label: The label, or None.

    Raises:
        OptionError: It is blank, too long, not printable, or means another starting point.
    """
    if label is None:
        return None
    why = _why_no_label(label)
    if why is not None:
        raise OptionError(
            f"{label[:LONGEST_LABEL]!r} cannot be the label of a snapshot: {why}. Give a name such as "
            "before-release-42."
        )
    return label


def _why_no_label(label: str) -> str | None:
    if not label.strip():
        return "it is blank"
    if label != label.strip():
        return "it begins or ends with a blank, which start_from leaves out"
    if len(label) > LONGEST_LABEL:
        return f"it has {len(label)} characters, but at most {LONGEST_LABEL} are allowed"
    if not label.isprintable():
        return "it has characters that cannot be printed"
    if is_location(label):
        return "it looks like a location"
    if _point(label)[0] is not StartPoint.NAMED or label.lower() in _RESERVED:
        return "it is a keyword of start_from"
    if _CHECKPOINT.fullmatch(label) or _SNAPSHOT_ID.fullmatch(label):
        return "it looks like the number or the id of a snapshot"
    return None


def is_location(reference: str) -> bool:
    """Whether a reference names a snapshot by its location."""
    return reference.startswith("/") or "://" in reference


@dataclass(frozen=True)
class StartFrom:
    """A starting point.

    Attributes:
        point: The kind.
        reference: For NAMED: a snapshot id, `chk-<n>`, a savepoint's label, or a location. For BATCH:
            its number.
        new_query_id: Continue under a new query id: sinks that remember query ids then write the
            rewound batches again instead of skipping them. For a start from a snapshot or a batch.
        accept_loss: Start even if a sink would lose rows.
        claim_mode: Who owns the snapshot that the stream starts from.
        accept_plan_change: Start even if the code needs different state from what is stored.
        discard_state: Confirms that an empty start may discard all existing state.
        no_safety_savepoint: Do not take a savepoint of the current state before a rewind.
        source_offsets: Where Kafka sources continue instead of where they stopped; see `SourceOffsets`.
        state_partitions: Rewrite the state to this number of partitions; None keeps the number.
    """

    point: StartPoint = StartPoint.LATEST
    reference: str | None = None
    new_query_id: bool = False
    accept_loss: bool = False
    claim_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM
    accept_plan_change: bool = False
    discard_state: bool = False
    no_safety_savepoint: bool = False
    source_offsets: str = ""
    state_partitions: int | None = None

    @staticmethod
    def parse(
        start_from: str,
        *,
        new_query_id: bool = False,
        accept_loss: bool = False,
        claim_mode: RecoveryClaimMode | str = RecoveryClaimMode.NO_CLAIM,
        accept_plan_change: bool = False,
        discard_state: bool = False,
        no_safety_savepoint: bool = False,
        source_offsets: str = "",
        state_partitions: int | None = None,
    ) -> StartFrom:
        """Parse a starting point from a run configuration or a command line.

        Args:
            start_from: "latest" (continue where the query stopped: the live directory, else the newest
                snapshot), "latest-checkpoint", "latest-savepoint", "preferred-savepoint", "empty" (discard
                all state), "batch-<n>" (back to a batch that Spark still retains), or the name of a
                snapshot.
            new_query_id: Continue under a new query id.
            accept_loss: Start even if a sink would lose rows.
            claim_mode: Who owns the snapshot that the stream starts from.
            accept_plan_change: Start even if the code needs different state from what is stored.
            discard_state: Confirms that an empty start may discard all existing state.
            no_safety_savepoint: Do not take a savepoint of the current state before a rewind.
            source_offsets: Where Kafka sources continue, as JSON: `{"orders": {"0": 124}}`, or
                `{"orders": "2026-11-23T07:00:00Z"}` for the first record that is not older. Records between
                are skipped, or read again. For a start from a snapshot or a batch.
            state_partitions: Rewrite the state to this number of partitions, 1 to 32768; None keeps the
                number.

        Raises:
            OptionError: start_from is empty, new_query_id is combined with latest or empty, a snapshot is
                claimed by a start that names none, the claim mode is not supported, discard_state is
                set for a start that is not empty, or state_partitions is out of range or set for one
                that is empty.
        """
        word = start_from.strip()
        if not word:
            raise OptionError(
                "start_from is empty. Give one of latest, latest-checkpoint, latest-savepoint, "
                "preferred-savepoint, empty, batch-<n>, or the id, number (chk-7), label or location of a snapshot."
            )
        refuse_user_info("start_from", word)
        point, reference = _point(word)
        if new_query_id and point in (StartPoint.LATEST, StartPoint.EMPTY):
            raise OptionError(
                f"new_query_id is for a start from a snapshot or a batch, but start_from is {word!r}: latest "
                "continues the same query, and empty always starts a new one. Leave it out."
            )
        claim = RecoveryClaimMode(claim_mode)
        if claim is RecoveryClaimMode.CLAIM and point in (StartPoint.LATEST, StartPoint.EMPTY, StartPoint.BATCH):
            raise OptionError(
                f"claim_mode CLAIM is for a start from a snapshot, but start_from is {word!r}, which names none. Name "
                "the snapshot that the stream should own, or leave claim_mode out."
            )
        if discard_state and point is not StartPoint.EMPTY:
            raise OptionError(
                f"discard_state confirms an empty start, but start_from is {word!r}, which keeps state. Leave it out, "
                "or start from empty."
            )
        if source_offsets and point in (StartPoint.LATEST, StartPoint.EMPTY):
            raise OptionError(
                f"source_offsets is for a start from a snapshot or a batch, but start_from is {word!r}. Name the "
                "newest batch (batch-<n>) to keep the state and continue elsewhere in the source."
            )
        if state_partitions is not None:
            STATE_PARTITIONS.checked(state_partitions)
            if point is StartPoint.EMPTY:
                raise OptionError(
                    "state_partitions rewrites existing state, but start_from is 'empty', which keeps none. Leave it "
                    "out, and set spark.sql.shuffle.partitions for the new state."
                )
        return StartFrom(
            point,
            reference,
            new_query_id,
            accept_loss,
            claim,
            accept_plan_change,
            discard_state,
            no_safety_savepoint,
            str(SourceOffsets.parse(source_offsets)) if source_offsets else "",
            state_partitions,
        )

    @property
    def chosen_offsets(self) -> SourceOffsets | None:
        """Where Kafka sources continue; None: where they stopped."""
        return SourceOffsets.parse(self.source_offsets) if self.source_offsets else None

    @property
    def batch_id(self) -> int | None:
        """The batch to go back to, for BATCH."""
        return int(self.reference or 0) if self.point is StartPoint.BATCH else None

    def __str__(self) -> str:
        if self.point is StartPoint.BATCH:
            return f"batch-{self.reference}"
        return self.reference or self.point.value


def _point(word: str) -> tuple[StartPoint, str | None]:
    batch = _BATCH.fullmatch(word)
    if batch is not None:
        return StartPoint.BATCH, str(int(batch[1]))
    for point in StartPoint:
        if point not in (StartPoint.NAMED, StartPoint.BATCH) and word.lower() == point.value:
            return point, None
    return StartPoint.NAMED, word
