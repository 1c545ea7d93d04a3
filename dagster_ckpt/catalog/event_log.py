"""The log line and the metrics of each event of a stream.

The process that recorded an event logs it after the commit, in Flink's words; transitions of a lease or restart are no
events, but logged too. The logger is `dagster_ckpt.transitions`; its records have the attributes `stream_id` and
`event`.

Example:
    Completed checkpoint 7 of stream orders: 12.3 MB (0.4 MB new), batch 812, 82 ms
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from sqlalchemy import Connection, text

from dagster_ckpt.catalog.records import EventType, ExecutionStatus, SnapshotRecord, SnapshotTrigger, StartCause
from dagster_ckpt.values import metrics
from dagster_ckpt.values.durations import size
from dagster_ckpt.values.metrics import Change
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.redaction import without_secrets

PACKAGE_LOGGER = "dagster_ckpt"
_LOG = logging.getLogger(f"{PACKAGE_LOGGER}.transitions")


def log_transition(
    stream_id: str, message: str, *, level: int = logging.INFO, event: EventType | None = None, **facts: object
) -> None:
    """Log one transition without secrets; `facts` become attributes of the record, prefixed with `ckpt_`."""
    if _LOG.isEnabledFor(level):
        named = {f"ckpt_{name}": value for name, value in facts.items()}
        extra = {"stream_id": stream_id, "event": event.value if event is not None else None, **named}
        _LOG.log(level, "%s", without_secrets(message), extra=extra)


def log_message(stream_id: str, message: str) -> None:
    log_transition(stream_id, f"Stream {stream_id}: {message}")


def log_triggered(snapshot: SnapshotRecord) -> None:
    what = f"{snapshot.kind.lower()} {snapshot.number}"
    message = f"Triggering {what} (type={snapshot.trigger.value}) of stream {snapshot.stream_id}"
    log_transition(snapshot.stream_id, message, number=snapshot.number, kind=snapshot.kind, trigger=snapshot.trigger)


def log_renewed(checkpoint: SnapshotRecord) -> None:
    message = (
        f"Renewed checkpoint {checkpoint.number} of stream {checkpoint.stream_id}: no batch since batch "
        f"{checkpoint.batch_id}"
    )
    log_transition(checkpoint.stream_id, message, number=checkpoint.number, kind=checkpoint.kind)


def log_event(stream_id: str, event: EventType, payload: Mapping[str, Any]) -> None:
    level, message = describe_event(stream_id, event, payload)
    log_transition(stream_id, message, level=level, event=event, **payload)


def describe_event(stream_id: str, event: EventType, payload: Mapping[str, Any]) -> tuple[int, str]:
    level, words = _WORDS.get(event, (logging.DEBUG, _any_event))
    if event is EventType.EXECUTION_ENDED and payload.get("status") == "FAILED":
        level = logging.WARNING
    return level, words(stream_id, event, payload)


def _snapshot(payload: Mapping[str, Any]) -> str:
    kind = str(payload.get("kind", "snapshot")).lower()
    number = payload.get("number")
    return kind if number is None else f"{kind} {number}"


def _took(payload: Mapping[str, Any], word: str = "") -> str:
    took_ms = payload.get("duration_ms")
    return "" if took_ms is None else f"{word}{took_ms} ms"


def _completed(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    new = payload.get("incremental_bytes")
    bytes_ = size(payload.get("full_bytes")) + ("" if new is None else f" ({size(new)} new)")
    facts = [bytes_, f"batch {payload.get('batch_id')}", _took(payload)]
    if payload.get("kind") == "SAVEPOINT":
        facts += [f"label {payload['label']!r}" if payload.get("label") else "", str(payload.get("location") or "")]
    return f"Completed {_snapshot(payload)} of stream {stream_id}: {', '.join(filter(None, facts))}"


def _failed(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    streak = failure_streak(payload.get("failures"), payload.get("tolerable"))
    took = _took(payload, " after ")
    return f"Failed {_snapshot(payload)} of stream {stream_id}{took}: {payload.get('reason')}{streak}"


def failure_streak(failures: int | None, tolerable: int | None) -> str:
    if failures is None or tolerable is None:
        return ""
    if failures <= tolerable:
        return f" ({failures} of {tolerable} tolerated failures)"
    return f" (failure {failures} in a row, {tolerable} {'is' if tolerable == 1 else 'are'} tolerated)"


def _discarded(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    facts = [size(payload["full_bytes"])] if payload.get("full_bytes") is not None else []
    facts += [f"batch {payload['batch_id']}"] if payload.get("batch_id") is not None else []
    measured = f" ({', '.join(facts)})" if facts else ""
    return f"Deleted {_snapshot(payload)} of stream {stream_id}{measured}: {payload.get('reason')}"


def _restored(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    at_batch = f" at batch {payload['batch_id']}" if payload.get("batch_id") is not None else ""
    origin = payload.get("origin")
    if origin == "SNAPSHOT":
        what = f"Restored stream {stream_id} from {_snapshot(payload)}{at_batch}"
    elif origin == "FORK":
        source = payload.get("source")
        what = f"Forked stream {stream_id}{f' from {source}' if source else ''}{at_batch}"
    elif origin == "ADOPTED":
        what = f"Adopted a checkpoint directory for stream {stream_id}{at_batch}"
    elif origin == "DIRECTORY":
        verb = "Rewound stream" if payload.get("new_timeline") else "Moved stream"
        what = f"{verb} {stream_id}{at_batch.replace(' at ', ' to ' if payload.get('new_timeline') else ' at ')}"
    elif origin == "EMPTY":
        what = f"Reset stream {stream_id} to empty state"
    else:
        what = f"Switched stream {stream_id} to another live directory"
    if payload.get("accepted"):
        what += f"; streams downstream keep what they have read of undone rows: {payload['accepted']}"
    facts = [size(payload["full_bytes"]) if payload.get("full_bytes") is not None else "", _took(payload)]
    return f"{what}: {', '.join([*filter(None, facts), str(payload.get('live_directory'))])}"


def _starting(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    why = {"RESTART_IN_PLACE": "restarted in place, ", "RESTART_NEW_RUN": "restarted, "}
    return f"Starting stream {stream_id}: {why.get(str(payload.get('cause')), '')}run {payload.get('run_id')}"


def _running(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    batch = payload.get("to_batch")
    facts = ["from empty state" if batch is None else f"resumes after batch {batch}"]
    if payload.get("rewound_batches"):
        facts.append(f"{payload['rewound_batches']} batches are processed again")
    return f"Stream {stream_id} is running: {', '.join(facts)}"


def _ended(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    return f"Stream {stream_id} is {payload.get('status')}{_took(payload, ' after ')}: {payload.get('reason')}"


def _terminally_failed(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    return f"Stream {stream_id} will not be restarted: {payload.get('reason')}"


def _recovery_failed(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    found = f"{payload.get('error')}: {payload.get('detail')}"
    return f"Recovery of stream {stream_id} failed at {payload.get('point')}: {found}"


def _taken_over(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    proof = "has ended" if payload.get("proven") else "may be alive, but did not renew it"
    return (
        f"Took over the lease of stream {stream_id} from run {payload.get('from_run')} (process "
        f"{payload.get('from_pid')} on {payload.get('from_host')}), which {proof}: token {payload.get('token')}"
    )


def _desired_state_set(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    desired = payload.get("desired") or "that of its definition"
    return f"Set the desired state of stream {stream_id} to {desired}: by {payload.get('origin')}"


def _upgrade_changed(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    version = payload.get("to_version")
    return f"Upgrade of stream {stream_id} to version {version} is {payload.get('phase')}: {payload.get('reason')}"


def _code_tried(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    version, verdict = payload.get("to_version"), "passed" if payload.get("passed") else "was refused"
    return f"Version {version} of stream {stream_id} {verdict}: {payload.get('reason')}"


def _handed_over(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    facts = [f"batch {payload.get('batch_id')} is the first of the new code"]
    if payload.get("gap_ms") is not None:
        facts.append(f"{payload['gap_ms']} ms after the last of the old code")
    if payload.get("stopped_ms") is not None:
        facts.append(f"no query ran for {payload['stopped_ms']} ms")
    versions = f"version {payload.get('from_version')} to version {payload.get('to_version')}"
    return f"Handed stream {stream_id} over from {versions}: {', '.join(facts)}"


def _alert(stream_id: str, _event: EventType, payload: Mapping[str, Any]) -> str:
    return f"Alert for stream {stream_id}: {payload.get('alert')}"


def _any_event(stream_id: str, event: EventType, payload: Mapping[str, Any]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in payload.items() if value is not None)
    return f"{event.value.replace('_', ' ').capitalize()} of stream {stream_id}: {facts}"


_Words = Callable[[str, EventType, Mapping[str, Any]], str]
_WORDS: dict[EventType, tuple[int, _Words]] = {
    EventType.CHECKPOINT_COMPLETED: (logging.INFO, _completed),
    EventType.SAVEPOINT_COMPLETED: (logging.INFO, _completed),
    EventType.CHECKPOINT_FAILED: (logging.WARNING, _failed),
    EventType.SAVEPOINT_FAILED: (logging.WARNING, _failed),
    EventType.SNAPSHOT_DELETED: (logging.INFO, _discarded),
    EventType.RESTORED: (logging.INFO, _restored),
    EventType.EXECUTION_STARTED: (logging.INFO, _starting),
    EventType.EXECUTION_RUNNING: (logging.INFO, _running),
    EventType.EXECUTION_ENDED: (logging.INFO, _ended),
    EventType.TERMINALLY_FAILED: (logging.ERROR, _terminally_failed),
    EventType.RECOVERY_FAILED: (logging.WARNING, _recovery_failed),
    EventType.LEASE_TAKEN_OVER: (logging.WARNING, _taken_over),
    EventType.DESIRED_STATE_SET: (logging.INFO, _desired_state_set),
    EventType.UPGRADE_CHANGED: (logging.INFO, _upgrade_changed),
    EventType.CODE_TRIED: (logging.INFO, _code_tried),
    EventType.HANDED_OVER: (logging.INFO, _handed_over),
    EventType.ALERT: (logging.ERROR, _alert),
}


ROUTINE_INTERVAL_S = 60

Send = Callable[[int, str], object]
_TAKEN = ("completed", "renewed")


class RunLog:
    """Passes the transitions of one stream on, in order, to the log of a Dagster run, which keeps each line forever.

    Of periodic checkpoints, the first one completed in each minute is passed on. The others are counted; the newest of
    them precedes the next other line.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_running = False
        self._asked_for: set[object] = set()
        self._minute: float | None = None
        self._held: logging.LogRecord | None = None
        self._counted: Counter[str] = Counter()

    def take(self, record: logging.LogRecord) -> None:
        what = self._routine(record)
        if what is None:
            self.flush()
            self._send(record.levelno, record.getMessage())
            return
        self._counted[what] += 1
        if what not in _TAKEN:
            return
        self._held = record
        minute = record.created // ROUTINE_INTERVAL_S
        if minute != self._minute:
            self._minute = minute
            self.flush()

    def flush(self) -> None:
        held, counted = self._held, self._counted
        if held is None:
            return
        self._held, self._counted = None, Counter()
        counts = ", ".join(f"{counted[what]:,} {what}" for what in (*_TAKEN, "deleted") if counted[what])
        several = sum(counted[what] for what in _TAKEN) > 1
        self._send(held.levelno, held.getMessage() + (f"; since the previous line: {counts}" if several else ""))

    def _routine(self, record: logging.LogRecord) -> str | None:
        """What happened to a periodic checkpoint while the query runs; None for any other line."""
        event, number, trigger = (getattr(record, name, None) for name in ("event", "ckpt_number", "ckpt_trigger"))
        if event in (EventType.EXECUTION_RUNNING, EventType.EXECUTION_ENDED):
            self._is_running = event == EventType.EXECUTION_RUNNING
        if getattr(record, "ckpt_kind", None) != SnapshotKind.CHECKPOINT or not self._is_running:
            return None
        if trigger not in (None, SnapshotTrigger.PERIODIC):
            self._asked_for.add(number)
        if number in self._asked_for or event == EventType.CHECKPOINT_FAILED:
            return None
        if event is None:
            return "triggered" if trigger is not None else "renewed"
        return "completed" if event == EventType.CHECKPOINT_COMPLETED else "deleted"


# The same in SQLite and PostgreSQL.
_CHANGE = (
    "INSERT INTO metrics (stream_id, name, kind, value) VALUES (:stream_id, :name, :kind, :value) "
    "ON CONFLICT (stream_id, name, kind) DO UPDATE SET value = "
)
_ADD, _SET = text(f"{_CHANGE} metrics.value + excluded.value"), text(f"{_CHANGE} excluded.value")

_RESTARTS = {StartCause.RESTART_IN_PLACE.value: "in_place", StartCause.RESTART_NEW_RUN.value: "new_run"}
_OF_COMPLETED = {
    "incremental_bytes": (metrics.WRITTEN, metrics.LAST_NEW_SIZE),
    "full_bytes": (metrics.LAST_SIZE,),
    "duration_ms": (metrics.LAST_DURATION,),
    "alignment_ms": (metrics.LAST_ALIGNMENT,),
}


def changes_of(event: EventType, payload: Mapping[str, Any], at_ms: int) -> Iterator[Change]:
    """Yield an event's changes of metrics: counters are added to, gauges are set; times are in ms."""
    kind = str(payload.get("kind") or "").lower()
    match event:
        case EventType.CHECKPOINT_COMPLETED | EventType.SAVEPOINT_COMPLETED:
            yield metrics.COMPLETED, kind, 1
            yield metrics.LAST_TIME, kind, at_ms
            for name, changed in _OF_COMPLETED.items():
                # An unknown figure must not stay that of an earlier snapshot, but a counter may.
                yield from ((metric, kind, payload.get(name) or 0) for metric in changed)
        case EventType.CHECKPOINT_FAILED | EventType.SAVEPOINT_FAILED:
            yield metrics.FAILED, kind, 1
        case EventType.SNAPSHOT_DELETED:
            yield metrics.DELETED, "", 1
            yield metrics.FREED, "", payload.get("freed_bytes") or 0
        case EventType.EXECUTION_STARTED if payload.get("cause") in _RESTARTS:
            yield metrics.RESTARTS, _RESTARTS[payload["cause"]], 1
        case EventType.EXECUTION_RUNNING if payload.get("recovery_ms") is not None:
            yield metrics.RECOVERY_TIME, "", payload["recovery_ms"]
            yield metrics.LAST_RECOVERY, "", payload["recovery_ms"]
        case EventType.EXECUTION_ENDED if payload.get("status") == ExecutionStatus.FAILED.value:
            yield metrics.FAILURES, "", 1
        case EventType.TERMINALLY_FAILED:
            yield metrics.TERMINAL_FAILURES, "", 1
        case EventType.LEASE_TAKEN_OVER:
            yield metrics.LEASES_LOST, "ended" if payload.get("proven") else "unproven", 1
        case _:
            pass


def note_changes(connection: Connection, stream_id: str, changes: Iterable[Change]) -> None:
    added: list[dict[str, object]] = []
    replaced: list[dict[str, object]] = []
    for metric, kind, value in changes:
        row = {"stream_id": stream_id, "name": metric.name, "kind": kind, "value": value}
        (added if metric.is_counter else replaced).append(row)
    for statement, rows in ((_ADD, added), (_SET, replaced)):
        if rows:
            connection.execute(statement, rows)
