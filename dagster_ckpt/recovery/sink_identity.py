"""Whether the tables and topics of a stream are those that it has written to, with the batches that it continues after.

A table that was dropped and made again, or brought back from an older copy, lacks batches that the query does
not write again. The start is refused, whatever the new table contains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dagster_ckpt.errors import StorageAccessError
from dagster_ckpt.recovery.sink_survey import Survey
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.guard import Start
from dagster_ckpt.sinks.registry import described_sink, sinks_of
from dagster_ckpt.sinks.sink import FoundSink, Replay, Sink, SinkEffect, SinkForecast
from dagster_ckpt.sinks.snapshot_sinks import sinks_in
from dagster_ckpt.spark.query.output import NamedOutput
from dagster_ckpt.stream.handle import StreamHandle, query_ids_of
from dagster_ckpt.stream.known_sinks import KnownSink, known_in, known_of_executions


def missing_batches(
    found: FoundSink, known: KnownSink, batch_id: int, sink: Sink, brought_back: int | None = None
) -> SinkForecast | None:
    """Decide whether a sink lacks batches that the query does not write again. A pure function.

    Args:
        found: What is at its place now.
        known: What is recorded of it.
        batch_id: The batch after which the query continues.
        sink: The sink.
        brought_back: The newest batch that the roll-back of the start brings back, which an earlier one has undone.

    Returns:
        None if it has them, or if that is not known.
    """
    expected = known.expected(batch_id)
    if expected is None or expected < 0:
        return None
    what = f"The {sink.noun} {sink.place or sink.name}"
    kept = found.batch if found.is_certain and found.batch is not None else -1
    first = kept + 1
    which = (
        f"batch {first} of this stream is" if first == expected else f"batches {first} to {expected} of this stream are"
    )
    lost = f"{which} not in it" if first <= expected else ""
    # A snapshot from before belongs to another table as well.
    older = ""
    if found.identity is None:
        reason = f"{what} does not exist any more, with batches up to {expected} of this stream."
    elif known.identity is not None and known.identity != found.identity:
        reason = f"{what} has another id: was {known.identity}, is {found.identity}. It was dropped and made again"
        reason += f": {lost}." if lost else "."
    elif found.is_certain and lost and (brought_back is None or brought_back < expected):
        reason = f"{what}: {lost}. It was made again, restored, or brought back from an older copy."
        older = f"from a snapshot of batch {kept} or before, or " if kept >= 0 else ""
    else:
        return None
    advice = (
        f"Put the {sink.noun} back, such as from a backup, and start again. Or start {older}with start_from=empty and "
        "discard_state: the query then writes all that its sources still have. With accept_loss, it continues in the "
        f"{sink.noun} as it is, without these batches."
    )
    return SinkForecast(sink.name, SinkEffect.LOSE, reason, advice)


def forecast_missing_batches(
    stream: StreamHandle, survey: Survey, output: NamedOutput | None, replay: Replay | None = None
) -> tuple[SinkForecast, ...]:
    """Forecasts for the tables and topics that lack batches before the one that a start continues with.

    Args:
        stream: The stream.
        survey: Where the start brings the query.
        output: Where the query to start will write; None if unknown: those that the stream wrote to last.
        replay: What the sinks will see if they are rolled back, which may bring back batches undone before.

    Raises:
        SnapshotCorruptError: The snapshot cannot be read.
        StorageAccessError: The snapshot cannot be reached.
        LiveDirectoryError: The log of a table cannot be parsed.
    """
    aim = survey.aim
    # A restore that is being finished was judged when it began. A fork has its own tables.
    if aim.batch_id < 0 or aim.is_unfinished or aim.start not in (Start.RESUME, Start.TO_SNAPSHOT, Start.TO_BATCH):
        return ()
    executions = stream.catalog.executions.of_stream(stream.stream_id)
    properties: Mapping[str, Any] | None = None
    if aim.start is Start.TO_SNAPSHOT and aim.location is not None:
        properties = stream.store.manifest(aim.location).header.properties
    sinks = _written(stream, output) if properties is None else sinks_in(properties)
    described = described_sink(output)
    told = []
    for sink in sinks:
        known = known_of_executions(executions, sink)
        then = known_in(properties, sink) if properties is not None else None
        if then is not None:
            known = then if then.identity is not None or known is None else replace(then, identity=known.identity)
        is_written = described is None or described.is_same(sink)
        if known is None or not is_written:
            continue
        forecast = _forecast(stream, sink, known, aim.batch_id, output=output, replay=replay)
        if forecast is not None:
            told.append(forecast)
    return tuple(told)


def forecast_shared(stream: StreamHandle, survey: Survey, output: NamedOutput | None) -> tuple[SinkForecast, ...]:
    """A forecast if the query starts from the beginning in a table or topic that another stream wrote last.

    The guard judges folders of files. A fork, an import and an adopted query do not start from the beginning.
    """
    aim, sink = survey.aim, described_sink(output)
    starts_empty = aim.start is Start.EMPTY or (aim.start is Start.RESUME and aim.batch_id < 0)
    if sink is None or sink.place is None or isinstance(sink, FileSink) or aim.is_unfinished or not starts_empty:
        return ()
    executions = stream.catalog.executions
    if sink.is_among(sinks_of(executions.last_sinks(stream.stream_id))):
        return ()
    others = executions.sinks_by_other(stream.stream_id)
    other = next((each for each, names in others.items() if sink.is_among(sinks_of(names))), None)
    if other is None:
        return ()
    return (
        SinkForecast(
            sink.name,
            SinkEffect.SHARED,
            f"Stream {other!r} of this catalog wrote to {sink.place} last, and this start reads its sources from the "
            "beginning: rows that both read would be there twice.",
            f"To continue that stream under another name, stop it (dagster-ckpt stop {other}) and set "
            f"stream_id={other!r} in the new definition. To begin anew, write elsewhere. If both streams are to write "
            "there, start this one once with accept_loss.",
        ),
    )


def _written(stream: StreamHandle, output: NamedOutput | None) -> Sequence[Sink]:
    described = described_sink(output)
    return [described] if described is not None else sinks_of(stream.catalog.executions.last_sinks(stream.stream_id))


def _forecast(
    stream: StreamHandle,
    sink: Sink,
    known: KnownSink,
    batch_id: int,
    *,
    output: NamedOutput | None,
    replay: Replay | None,
) -> SinkForecast | None:
    try:
        found = sink.look(query_ids_of(stream))
        brought_back = sink.batch_after(replay) if replay is not None and replay.roll_back_tables else None
    except StorageAccessError as error:
        # The start itself asks again.
        is_start = output is not None and known.identity is not None
        return SinkForecast(sink.name, SinkEffect.UNREACHABLE, str(error)) if is_start else None
    return missing_batches(found, known, batch_id, sink, brought_back) if found is not None else None
