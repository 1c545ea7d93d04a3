"""Gives a changed query its state: what is still valid, or what is built from its input."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_ckpt.catalog.records import StreamRecord
from dagster_ckpt.errors import InputGoneError, OptionError, PlanChangedError, StateRewriteError
from dagster_ckpt.recovery.operator_compatibility import (
    Decision,
    describe_differences,
    describe_operator,
    evolve,
    plan_differences,
    refused_reasons,
    ruled_operators,
    taken_rows,
)
from dagster_ckpt.recovery.plan import FinishRestore, RecoveryPlan
from dagster_ckpt.recovery.query_plan_check import old_plan
from dagster_ckpt.recovery.source_check import gone_records
from dagster_ckpt.recovery.source_inputs import changed
from dagster_ckpt.spark.checkpoint_dir.file_source import existing_files, files_after, log_offset
from dagster_ckpt.spark.checkpoint_dir.layout import METADATA, OFFSETS, SOURCES, LiveDirectory
from dagster_ckpt.spark.checkpoint_dir.logs import parse_offset_entry, query_metadata, with_sources, with_watermark
from dagster_ckpt.spark.checkpoint_dir.operators import widen_schemas
from dagster_ckpt.spark.checkpoint_dir.restore import Watch
from dagster_ckpt.spark.query.description import session_of
from dagster_ckpt.spark.query.plan import PlanDescription
from dagster_ckpt.spark.query.sources import (
    DELTA,
    FILE,
    GENERATED,
    ICEBERG,
    KAFKA,
    SourceIdentity,
    keyed,
    source_identities,
    source_options,
    sources_in_entry,
)
from dagster_ckpt.spark.query.table_sources import FROM_THE_FIRST, delta_beginning, delta_offset
from dagster_ckpt.spark.query.trial_batch import describe_trial_error, run_trial
from dagster_ckpt.state.migration import StateMigration, write_ruled_rows
from dagster_ckpt.state.stopped_state import StateShape, StoppedState
from dagster_ckpt.state.unsafe_rows import Graft
from dagster_ckpt.stream.start_from import StartFrom

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_SHOWN = 3


@dataclass(frozen=True)
class PlannedMigration:
    """A change of the state by a start; without `decisions` on operators, all state is built from the input."""

    describe: Callable[[], DataStreamWriter]
    before: PlanDescription
    after: PlanDescription
    decisions: tuple[Decision, ...] | None

    @contextmanager
    def graft(
        self, source: LiveDirectory, place: LiveDirectory, watch: Watch, report: Callable[[str], None]
    ) -> Iterator[Graft]:
        """Build the new code's operators in `place`, which is deleted at the end, for the state of `source`."""
        given = place.sibling(".given")
        for each in (place, given):
            each.delete()
        try:
            if self.decisions is None:
                refuse_gone_input(self.describe(), source)
            make_fresh_state(self.describe, source, place, reads_input=self.decisions is None, watch=watch)
            if self.decisions is None:
                yield Graft(place, plan=self.after.as_record())
                return
            old, new = StoppedState.read(source), StoppedState.read(place)
            known = (self.decisions, self.before, self.after, old.operators, new.operators)
            taken, rows = taken_rows(*known), {}
            for ruled in ruled_operators(*known):
                rows[ruled.operator.number] = given.sibling(f"/{ruled.operator.number}")
                spark = session_of(self.describe())
                count = write_ruled_rows(spark, ruled, old, new, place=rows[ruled.operator.number], watch=watch)
                report(f"{count:,} rows of state are given for {ruled}")
            yield Graft(place, taken, rows, self.after.as_record())
        finally:
            place.delete()
            given.delete()

    def check_input(self, record: StreamRecord, plan: RecoveryPlan) -> None:
        """Refuse input that is gone; for a snapshot, that is checked once it is restored."""
        if self.decisions is None and plan.snapshot is None:
            refuse_gone_input(self.describe(), LiveDirectory(plan.directory or record.live_directory or ""))

    def messages(self) -> list[str]:
        if self.decisions is None:
            differences = describe_differences(plan_differences(self.before, self.after))
            return [f"the state is built from all input that was read so far. {differences}"]
        return [
            f"the state of the {describe_operator(each.operator)}: {each.fate}{f' ({each.why})' if each.why else ''}"
            for each in self.decisions
        ]


def state_migration(
    record: StreamRecord,
    recovery: RecoveryPlan,
    new: PlanDescription | None,
    start_from: StartFrom,
    describe: Callable[[], DataStreamWriter] | None,
    *,
    rules: Sequence[StateMigration] = (),
) -> PlannedMigration | None:
    """Plan a requested migration, if plans differ; PlanChangedError if the state cannot be migrated."""
    if not (start_from.migrate_state or start_from.bootstrap_state):
        return None
    old = old_plan(record, recovery)
    if new is None or describe is None or (old is None and recovery.to_batch is not None):
        raise OptionError(
            f"The state of stream {record.stream_id!r} cannot be migrated: the plan of its query, or of the state, is "
            "not known before the start (Spark Connect, or state of an early version). Leave the option out."
        )
    if old is None or not plan_differences(old, new):
        return None
    if isinstance(recovery, FinishRestore):
        raise OptionError(
            f"Stream {record.stream_id!r} has an unfinished restore, rewind or fork. Start it first with the code that "
            "it was made for, or name a snapshot with start_from."
        )
    if start_from.bootstrap_state:
        return PlannedMigration(describe, old, new, None)
    decisions = evolve(old, new, rules)
    reasons = refused_reasons(decisions)
    if reasons:
        is_unknown = old.has_unknown_numbers or new.has_unknown_numbers
        by_rule = "" if is_unknown else "to say yourself what it becomes, give the stream state_migrations; "
        raise PlanChangedError(
            f"Stream {record.stream_id!r} is not started, nothing was changed: its state means something else to the "
            f"new code. {'; '.join(reasons)}. To build the state from all input that was read so far, start with "
            f"bootstrap_state; {by_rule}otherwise restore the previous query, or begin a new stream."
        )
    return PlannedMigration(describe, old, new, decisions)


def refuse_two_rewrites(stream_id: str, shape: StateShape | None) -> None:
    if shape is not None:
        raise StateRewriteError(
            f"Stream {stream_id!r} is not started, nothing was changed: its state would be migrated, and rewritten as "
            f"{shape}. Do one after the other."
        )


def refuse_gone_input(writer: DataStreamWriter, live: LiveDirectory) -> None:
    found: list[str] = []
    sources, ends = keyed(source_identities(writer) or ()), _read_to(live)
    for key, identity in sources.items():
        if identity.kind not in (FILE, KAFKA, DELTA, ICEBERG, *GENERATED):
            raise _not_read_again(key, identity, "only files, Kafka, Delta and Iceberg can be read up to a position")
        if identity.kind == FILE:
            # The log also has files of batches that a rewind undid.
            last = log_offset(ends.get(key))
            files = [each for each in files_after(live.folder, key, -1) if last is None or each.position <= last]
            existing = existing_files([each.path for each in files], session_of(writer)) or {}
            found += [f"{each.path} is gone" for each in files if each.path not in existing]
            found += [f"{path} was written again" for path in changed(files, existing) if path in existing]
    found += gone_records(writer, lambda: _beginnings(writer, live, sources, ends))
    if found:
        listed = "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise InputGoneError(
            f"The state cannot be built from its input, nothing was changed: {listed}. Bring the input back, or start "
            "with empty state.",
            listed,
        )


def _not_read_again(key: str, identity: SourceIdentity, why: object) -> StateRewriteError:
    return StateRewriteError(
        f"The state cannot be built from source {key} ({identity}): {why}. Nothing was changed. The other way is a "
        "function of a DataFrame (StateMigration)."
    )


def _read_to(live: LiveDirectory) -> Mapping[str, str | None]:
    newest = live.positions().commit
    if newest is None:
        return {}
    path = f"{OFFSETS}/{newest}"
    return parse_offset_entry(live.folder.read(path), f"{live.url}/{path}").sources


def _beginnings(
    writer: DataStreamWriter,
    live: LiveDirectory,
    sources: Mapping[str, SourceIdentity],
    ends: Mapping[str, str | None],
) -> dict[str, str | None]:
    """Return where each source begins to read again, by its name in the offset log.

    For Kafka and Iceberg, the source's log says so; for Delta, the code.
    """
    found: dict[str, str | None] = {}
    for leaf, name, end in sources_in_entry(writer, ends):
        identity, log = sources[leaf.log], leaf.log
        if identity.kind == KAFKA:
            _, _, found[name] = (_logged(live, f"{log}/0") or "").partition("\n")
        elif identity.kind == ICEBERG:
            # Otherwise it would begin at today's oldest snapshot.
            found[name] = _logged(live, f"{log}/offsets/0") or FROM_THE_FIRST
        elif identity.kind == DELTA and (ended := delta_offset(end)) is not None:
            try:
                found[name] = delta_beginning(source_options(leaf.node), ended).as_text()
            except StateRewriteError as error:
                raise _not_read_again(log, identity, error) from None
    return found


def _logged(live: LiveDirectory, name: str) -> str | None:
    try:
        return live.folder.read(f"{SOURCES}/{name}").decode("utf-8", "replace")
    except FileNotFoundError:
        return None


_BATCH_S = 24 * 3600.0


def make_fresh_state(
    describe: Callable[[], DataStreamWriter],
    live: LiveDirectory,
    target: LiveDirectory,
    *,
    reads_input: bool,
    watch: Watch,
) -> None:
    """Fill a new directory with the state of a query after the newest batch of `live`, or after no input.

    One batch without output reads all input. A second one reads none and has the newest watermark of `live`, so that
    what was complete then is complete here. On an error, the caller deletes the directory.
    """
    newest = live.positions().commit
    if newest is None:
        raise StateRewriteError(f"{live.url} has no committed batch, so there is no state to migrate.")
    path = f"{OFFSETS}/{newest}"
    where = f"{live.url}/{path}"
    data = live.folder.read(path)
    planned = parse_offset_entry(data, where)
    if not reads_input:
        data = with_sources(data, where, dict.fromkeys(planned.sources))
    folder = target.folder
    folder.make()
    folder.place(METADATA, [query_metadata(str(uuid.uuid4()))])
    for name, _entry in list(live.folder.find(SOURCES)) if reads_input else ():
        folder.place(name, [live.folder.read(name)])
    _run(describe, target, 0, with_watermark(data, where, 0), watch)
    if reads_input and planned.watermark_ms > 0:
        widen_schemas(folder, 0, nullcontext)
        _run(describe, target, 1, data, watch)


def _run(
    describe: Callable[[], DataStreamWriter], target: LiveDirectory, batch_id: int, plan: bytes, watch: Watch
) -> None:
    def stopped() -> bool:
        watch()
        return False

    target.folder.place(f"{OFFSETS}/{batch_id}", [plan])
    name = f"fresh state {uuid.uuid4()}"
    trial = run_trial(describe, target, name, replays=True, timeout_s=_BATCH_S, interrupted=stopped)
    if trial.batch_id == batch_id:
        return
    if trial.data_is_gone:
        raise StateRewriteError(
            f"The state cannot be built from its input, which is gone or was changed: {trial.error}. Nothing was "
            "changed. Bring the input back, or start from a point whose input is there."
        )
    why = describe_trial_error(trial.error) if trial.error is not None else "Spark ran no batch"
    raise StateRewriteError(f"The state of the new code cannot be made: {why}. Nothing was changed.")
