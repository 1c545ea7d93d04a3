"""The options of a start, which every interface takes from `StartFrom`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum, StrEnum
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

from dagster_ckpt.config.state_backend import MAX_PARALLELISM
from dagster_ckpt.errors import CkptError, OptionError
from dagster_ckpt.values.modes import RecoveryClaimMode
from dagster_ckpt.values.redaction import refuse_user_info
from dagster_ckpt.values.safe_parsing import from_json
from dagster_ckpt.values.validation import WholeNumber, conform_fields

_EXAMPLE = "such as '0=1,1=new:earliest': source 0 continues the former source 1, source 1 is new"
_KEY = re.compile(r"[\w-]+")
_NEW, _FORMER = "new", "former"


class Beginning(StrEnum):
    """Where a new source begins to read.

    AS_CODE: Where the options of the source say, such as Kafka's `startingOffsets`.
    EARLIEST: At the oldest record that it has.
    LATEST: After the newest record that it has when the start looks.
    """

    AS_CODE = "as the options of the source say"
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class SourceMapping:
    """Which source of a query continues which source of its state, by names or else numbers.

    `continued` maps sources of the query to those of the state; `new` read what none has read before.
    """

    continued: Mapping[str, str] = field(default_factory=dict)
    new: Mapping[str, Beginning] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> SourceMapping:
        continued: dict[str, str] = {}
        new: dict[str, Beginning] = {}
        for each in text.split(","):
            source, equals, value = (part.strip() for part in each.partition("="))
            if not equals or not _KEY.fullmatch(source):
                raise _unreadable(text, f"{each.strip()!r} is not of the form source=former source")
            if source in continued or source in new:
                raise _unreadable(text, f"it names source {source} twice")
            word, _, where = value.partition(":")
            if word == _FORMER and where:
                # So that a former source can be called `new`.
                word, value, where = "", where, ""
            if word == _NEW:
                new[source] = _beginning(text, where)
            elif where or not _KEY.fullmatch(value):
                raise _unreadable(text, f"{value!r} is neither a former source nor new, new:earliest or new:latest")
            elif value in continued.values():
                raise _unreadable(text, f"two sources continue the former source {value}")
            else:
                continued[source] = value
        return SourceMapping(continued, new)

    @property
    def sources(self) -> tuple[str, ...]:
        return (*self.continued, *self.new)

    def __str__(self) -> str:
        kept = [
            f"{source}={_FORMER}:{former}" if former == _NEW else f"{source}={former}"
            for source, former in self.continued.items()
        ]
        added = [
            f"{source}={_NEW}" + (f":{where.value}" if where is not Beginning.AS_CODE else "")
            for source, where in self.new.items()
        ]
        return ",".join(sorted([*kept, *added], key=_order))


def _order(entry: str) -> tuple[int, str]:
    source = entry.partition("=")[0]
    return (int(source) if source.isdecimal() else -1, source)


def _beginning(text: str, where: str) -> Beginning:
    if not where:
        return Beginning.AS_CODE
    if where in (Beginning.EARLIEST.value, Beginning.LATEST.value):
        return Beginning(where)
    raise _unreadable(text, f"a new source cannot begin at {where!r}, only at earliest or latest, or with plain new")


def _unreadable(text: str, why: str) -> OptionError:
    return OptionError(f"map_sources is {text!r}: {why}. Give a list, {_EXAMPLE}.")


class StartPoint(Enum):
    LATEST = "latest"
    LATEST_CHECKPOINT = "latest-checkpoint"
    LATEST_SAVEPOINT = "latest-savepoint"
    PREFERRED_SAVEPOINT = "preferred-savepoint"
    EMPTY = "empty"
    BATCH = "batch"
    NAMED = "named"


_STATE_PARTITIONS = WholeNumber("state_partitions", minimum=1, maximum=MAX_PARALLELISM.maximum)
_VERIFY_BATCHES = WholeNumber("verify_batches", minimum=0)
_BATCH = re.compile(r"batch-(\d+)", re.IGNORECASE)
_CHECKPOINT = re.compile(r"chk-\d+", re.IGNORECASE)
_SNAPSHOT_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# Other operations use these words for every snapshot, and for the live directory.
_RESERVED = frozenset({"all", "live"})
LONGEST_LABEL = 128


def checked_label(label: str | None) -> str | None:
    """Refuse a label by which `start_from` could not find exactly this snapshot."""
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
        return "it has surrounding whitespace, which start_from strips"
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
    return reference.startswith("/") or "://" in reference


class Described(NamedTuple):
    """How interfaces show an option; `confirms`: it only permits what a start otherwise refuses."""

    description: str
    confirms: bool = False


@dataclass(frozen=True)
class StartFrom:
    """Where a start resumes, and what it may do.

    Example:
        >>> StartFrom("before-release-42", accept_loss=True).point
        <StartPoint.NAMED: 'named'>
    """

    start_from: Annotated[
        str,
        Described(
            description="latest (live directory, else the newest snapshot), latest-checkpoint, latest-savepoint, "
            "preferred-savepoint, empty (discard all state), batch-<n> (rewind to a batch that Spark still retains), "
            "or the id, number (chk-7), label or location of a snapshot."
        ),
    ] = "latest"
    _: KW_ONLY
    new_query_id: Annotated[
        bool,
        Described(
            description="With a rewind: continue as a new query, so that sinks which remember query ids (Delta, "
            "Iceberg) write the rewound batches again instead of skipping them."
        ),
    ] = False
    accept_loss: Annotated[
        bool,
        Described(
            description="Start even if the rewind could lose rows in a sink. Without it such a start is refused, and "
            "the message names the sink and the reason. A preview shows it beforehand.",
            confirms=True,
        ),
    ] = False
    claim_mode: Annotated[
        RecoveryClaimMode,
        Described(
            description="Ownership of the snapshot that the stream starts from. NO_CLAIM: the stream never deletes it. "
            "CLAIM: the stream takes ownership and deletes it like any of its checkpoints. Flink's LEGACY is not "
            "supported."
        ),
    ] = RecoveryClaimMode.NO_CLAIM
    accept_undone: Annotated[
        str,
        Described(
            description="Why streams downstream may keep what they have read of the rows that this undoes. Without it, "
            "each goes back at its next start, to its newest snapshot that has read none of them, where each of its "
            "rows then is there once."
        ),
    ] = ""
    accept_plan_change: Annotated[
        bool,
        Described(
            description="Start even if the code needs state of another layout: other keys, types, values, windows, "
            "operators or watermarks. Without it such a start is refused, and the message lists the differences.",
            confirms=True,
        ),
    ] = False
    discard_state: Annotated[
        bool,
        Described(
            description="With an empty start: confirm that all state of the stream is discarded. Without it such a "
            "start is refused, and the message lists what would be discarded.",
            confirms=True,
        ),
    ] = False
    no_safety_savepoint: Annotated[
        bool,
        Described(
            description="Do not take a savepoint before a rewind. By default one labeled before-rewind-<n> is taken, "
            "from which you can undo the rewind; release it to return it to the stream's retention.",
            confirms=True,
        ),
    ] = False
    source_offsets: Annotated[
        str,
        Described(
            description='Where Kafka sources continue, as JSON: {"orders": {"0": 124}} skips to a record, and '
            '{"orders": "2026-11-23T07:00:00Z"} to the first record that is not older. Only with a snapshot or '
            "batch-<n>."
        ),
    ] = ""
    map_sources: Annotated[
        str,
        Described(
            description="Continue with other sources than those of the state: for each source of the query, by number "
            "or name, the former source whose position it continues, or new, new:earliest or new:latest, such as "
            "0=1,1=new:earliest. Former sources that are not named are dropped."
        ),
    ] = ""
    migrate_state: Annotated[
        bool,
        Described(
            description="Let changed code continue with the state that still means something to it: the state of each "
            "operator is kept, migrated, begun without rows, or dropped. Where that cannot be derived, the start is "
            "refused. Before Spark 4.2: `dagster-ckpt rewriter install`.",
            confirms=True,
        ),
    ] = False
    bootstrap_state: Annotated[
        bool,
        Described(
            description="Let changed code continue with state that is built from all input that the stream has read "
            "so far, in one batch without output. Refused if input is gone. Before Spark 4.2: `dagster-ckpt rewriter "
            "install`.",
            confirms=True,
        ),
    ] = False
    verify_batches: Annotated[
        int,
        Described(
            description="Run this number of the newest batches again with the new code, without output, and compare "
            "output and state with what the stream made of them, before the running query is stopped. A difference "
            "refuses the start, and the query runs on."
        ),
    ] = 0
    state_partitions: Annotated[
        int | None,
        Described(
            description="Rewrite the state to this number of partitions, 1 to 32768, before the query starts. "
            "Otherwise Spark keeps the number of the first batch. Before Spark 4.2: `dagster-ckpt rewriter install`."
        ),
    ] = None

    def __post_init__(self) -> None:
        conform_fields(self)
        object.__setattr__(self, "start_from", _normalized(self.start_from))
        word, point = self.start_from, self.point
        if self.new_query_id and point in (StartPoint.LATEST, StartPoint.EMPTY):
            raise OptionError(
                f"new_query_id is for a start from a snapshot or a batch, but start_from is {word!r}: latest "
                "continues the same query, and empty always starts a new one. Leave it out."
            )
        if self.claim_mode is RecoveryClaimMode.CLAIM and point in (
            StartPoint.LATEST,
            StartPoint.EMPTY,
            StartPoint.BATCH,
        ):
            raise OptionError(
                f"claim_mode CLAIM is for a start from a snapshot, but start_from is {word!r}, which names none. Name "
                "the snapshot that the stream should own, or leave claim_mode out."
            )
        if self.discard_state and point is not StartPoint.EMPTY:
            raise OptionError(
                f"discard_state confirms an empty start, but start_from is {word!r}, which keeps state. Leave it out, "
                "or start from empty."
            )
        if self.source_offsets:
            if point in (StartPoint.LATEST, StartPoint.EMPTY):
                raise OptionError(
                    f"source_offsets is for a start from a snapshot or a batch, but start_from is {word!r}. Name the "
                    "newest batch (batch-<n>) to keep the state and continue elsewhere in the source."
                )
            object.__setattr__(self, "source_offsets", str(SourceOffsets.parse(self.source_offsets)))
        if self.map_sources:
            if point is StartPoint.EMPTY:
                raise OptionError(
                    "map_sources maps sources to those of existing state, but start_from is 'empty', which keeps none. "
                    "Leave it out."
                )
            object.__setattr__(self, "map_sources", str(SourceMapping.parse(self.map_sources)))
        if self.migrate_state or self.bootstrap_state:
            self._check_migration()
        _VERIFY_BATCHES.checked(self.verify_batches)
        if self.verify_batches and (point is not StartPoint.LATEST or self.map_sources):
            other = "map_sources is given" if self.map_sources else f"start_from is {word!r}"
            raise OptionError(
                f"verify_batches compares this code with what the stream has done, but {other}, so it does something "
                "else. Leave one out."
            )
        if self.state_partitions is not None:
            _STATE_PARTITIONS.checked(self.state_partitions)
            if point is StartPoint.EMPTY:
                raise OptionError(
                    "state_partitions rewrites existing state, but start_from is 'empty', which keeps none. Leave it "
                    "out, and set spark.sql.shuffle.partitions for the new state."
                )

    def _check_migration(self) -> None:
        name = "migrate_state" if self.migrate_state else "bootstrap_state"
        others = (
            "bootstrap_state",
            "map_sources",
            "source_offsets",
            "state_partitions",
            "accept_plan_change",
            "verify_batches",
        )
        other = next((each for each in others if each != name and getattr(self, each)), None)
        if other is not None:
            raise OptionError(f"{name} and {other} are for two starts, one after the other. Leave one out.")
        if self.point is StartPoint.EMPTY:
            raise OptionError(
                f"{name} is for existing state, but start_from is 'empty', which keeps none. Leave it out."
            )

    @classmethod
    def of(cls, start_from: str | StartFrom) -> StartFrom:
        return start_from if isinstance(start_from, StartFrom) else cls(start_from)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StartFrom:
        """Read the options of a record; other keys and None are ignored."""
        names = {field.name for field in fields(cls)}
        given = {name: value for name, value in record.items() if name in names and value is not None}
        import msgspec  # noqa: PLC0415 - the help of a command needs only the options

        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, CkptError):
                raise error.__cause__ from None
            raise OptionError(f"The options of the start cannot be read: {error}. Correct or omit it.") from error

    def as_record(self) -> dict[str, str | bool | int]:
        """Return `start_from` and the options that are set, for `from_record`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return set_options({name: value.value if isinstance(value, Enum) else value for name, value in values.items()})

    @property
    def point(self) -> StartPoint:
        return _point(self.start_from)[0]

    @property
    def reference(self) -> str | None:
        """For NAMED: a snapshot's id, `chk-<n>`, label or location. For BATCH: its number."""
        return _point(self.start_from)[1]

    @property
    def chosen_offsets(self) -> SourceOffsets | None:
        """Chosen positions in Kafka topics; None: sources continue where they stopped."""
        return SourceOffsets.parse(self.source_offsets) if self.source_offsets else None

    @property
    def chooses_its_point(self) -> bool:
        """Whether the start takes the next point if one is damaged, or its input is gone."""
        return self.point is StartPoint.LATEST and not self.map_sources and not self.changes_state

    @property
    def changes_state(self) -> bool:
        return self.migrate_state or self.bootstrap_state

    @property
    def of_state(self) -> StartFrom:
        """Return a start from the latest state, rewritten or migrated likewise."""
        names = ("migrate_state", "bootstrap_state", "state_partitions")
        return StartFrom(**{name: getattr(self, name) for name in names})

    @property
    def source_mapping(self) -> SourceMapping | None:
        """The option `map_sources`; None: the sources are those of the state."""
        return SourceMapping.parse(self.map_sources) if self.map_sources else None

    @property
    def batch_id(self) -> int | None:
        return int(self.reference or 0) if self.point is StartPoint.BATCH else None

    def __str__(self) -> str:
        return self.start_from


def set_options(record: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a record that differ from their defaults, unchecked, and `start_from`."""
    defaults = {field.name: field.default for field in fields(StartFrom)}
    options = {name: record.get(name, default) for name, default in defaults.items()}
    return {name: value for name, value in options.items() if name == "start_from" or value != defaults[name]}


class StartOption(NamedTuple):
    name: str
    kind: type[Any]
    default: Any
    description: str
    confirms: bool


def start_options() -> list[StartOption]:
    hints = get_type_hints(StartFrom, include_extras=True)
    return [_option(field.name, field.default, *get_args(hints[field.name])) for field in fields(StartFrom)]


def _option(name: str, default: Any, annotation: Any, meta: Described) -> StartOption:
    kind = next(each for each in (*get_args(annotation), annotation) if each is not type(None))
    return StartOption(name, kind, default, *meta)


def _normalized(start_from: str) -> str:
    word = start_from.strip()
    if not word:
        raise OptionError(
            "start_from is empty. Give one of latest, latest-checkpoint, latest-savepoint, "
            "preferred-savepoint, empty, batch-<n>, or the id, number (chk-7), label or location of a snapshot."
        )
    refuse_user_info("start_from", word)
    point, reference = _point(word)
    return f"batch-{reference}" if point is StartPoint.BATCH else reference or point.value


def _point(word: str) -> tuple[StartPoint, str | None]:
    batch = _BATCH.fullmatch(word)
    if batch is not None:
        return StartPoint.BATCH, str(int(batch[1]))
    for point in StartPoint:
        if point not in (StartPoint.NAMED, StartPoint.BATCH) and word.lower() == point.value:
            return point, None
    return StartPoint.NAMED, word


_MOMENT = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:")
_EXAMPLES = '{"orders": {"0": 124}} for single partitions, or {"orders": "2026-11-23T07:00:00Z"} for a time'


@dataclass(frozen=True)
class SourceOffsets:
    """Chosen positions in Kafka topics. Other partitions continue where they stopped.

    Attributes:
        partitions: Topic to partition to the offset of the next record.
        times: Topic to a time in ms: the next record is the first that is not older.
    """

    partitions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def parse(text: str) -> SourceOffsets:
        try:
            told = from_json(text)
            if not isinstance(told, dict) or not told:
                raise TypeError("it names no topic")
            partitions = {topic: _offsets(value) for topic, value in told.items() if isinstance(value, dict)}
            times = {topic: _time_ms(value) for topic, value in told.items() if not isinstance(value, dict)}
        except (ValueError, TypeError) as error:
            raise OptionError(f"source_offsets is {text!r}: {error}. Give {_EXAMPLES}.") from error
        return SourceOffsets(partitions, times)

    def __str__(self) -> str:
        import pendulum  # noqa: PLC0415 - see _time_ms

        times = {topic: pendulum.from_timestamp(ms / 1000).to_iso8601_string() for topic, ms in self.times.items()}
        return json.dumps({**self.partitions, **times}, sort_keys=True)


def _offsets(value: dict[str, object]) -> dict[str, int]:
    found: dict[str, int] = {}
    for partition, offset in value.items():
        if not partition.isdecimal() or type(offset) is not int or offset < 0:
            raise ValueError(f"partition {partition!r} with offset {offset!r} is not valid")
        found[partition] = offset
    if not found:
        raise ValueError("a topic has no partition")
    return found


def _time_ms(value: object) -> int:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is neither partitions nor a time")
    # Slow to import, and few starts choose offsets.
    import pendulum  # noqa: PLC0415

    moment = pendulum.parse(value, strict=True) if _MOMENT.match(value) else None
    if not isinstance(moment, pendulum.DateTime):
        raise TypeError(f"{value!r} has no date and time")
    return round(moment.timestamp() * 1000)
