"""Find the kind of a sink by Spark's name for it.

Spark calls every `foreachBatch` query `ForeachBatchSink`. For the option that the package adds, see `Sink.of`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dagster_ckpt.errors import OptionTypeError
from dagster_ckpt.sinks.delta import DeltaMerge, DeltaTable
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.file_sink_log import bare, listed
from dagster_ckpt.sinks.iceberg import IcebergTable
from dagster_ckpt.sinks.kafka.sink import KafkaSink, TransactionalKafkaSink
from dagster_ckpt.sinks.sink import OnRepeat, Replay, Sink, SinkEffect, SinkForecast
from dagster_ckpt.snapshot.store import SnapshotStore, read_files
from dagster_ckpt.spark.checkpoint_dir.captured_sinks import SINKS_FOLDER, SinkEntry, logs_of_sinks
from dagster_ckpt.spark.query.output import FOREACH_BATCH, NamedOutput, foreach_batch_name


class ConsoleSink(Sink):
    names = re.compile(r".*Console(Table|Sink).*")
    on_repeat = OnRepeat.REPEATS
    effect = SinkEffect.DUPLICATE
    reason = "The rewound batches are printed again."


class NoopSink(Sink):
    names = re.compile(r"(org\.apache\.spark\.sql\.execution\.datasources\.noop\.)?NoopTable\$?(@[0-9a-f]+)?")
    effect = SinkEffect.EXACT
    reason = "It keeps nothing."


class MemorySink(Sink):
    names = re.compile(r"MemorySink.*|.*MemoryTable.*")
    reason = "Its table lives in the session: after a restart it contains only later rows."


class ForeachBatchSink(Sink):
    names = re.compile(r"ForeachBatchSink(\[(?P<place>.+)\])?")
    knows_queries = True

    reason = (
        "The function is called again for batch numbers that it has seen, with other rows: the effect depends on the "
        "function."
    )
    advice = (
        "A function that keeps its own record of batch numbers, such as Delta's txnVersion, must forget these. "
        "Describe such a sink with register_sink."
    )

    @classmethod
    def name_of(cls, output_format: str, place: str) -> str | None:
        return foreach_batch_name(place) if output_format == FOREACH_BATCH else None


class ForeachSink(Sink):
    names = re.compile(r"Foreach.*")
    reason = "The writer receives the rewound rows again: the effect depends on the writer."


class NamedTable(Sink):
    """A table known only by its name in a catalog: the worst of the possible formats is forecast."""

    names = re.compile(r"(?P<place>[\w`-]+(?:\.[\w`-]+)+)")

    def forecast(self, replay: Replay) -> SinkForecast:
        if not replay.keeps_query_id:
            return self.forecast_as(
                SinkEffect.DUPLICATE,
                "A table known by name only. Under another query id, Paimon accepts the rewound batches again.",
                "Roll the table back first.",
            )
        return self.forecast_as(
            SinkEffect.LOSE,
            "A table known by name only. Tables that record batch numbers skip the batches that they have of a query, "
            "and a batch with other boundaries then loses rows.",
            "Roll the table back to the time of the batch.",
        )


class HudiOrPaimonTable(Sink):
    names = re.compile(r"(?i).*(hoodie|hudi|paimon).*")
    on_repeat = OnRepeat.RUNS
    is_proven = False
    effect = SinkEffect.LOSE
    reason = (
        "Hudi and Paimon record batch numbers in their commits and skip the batches that they have, under an "
        "identifier that a new query id does not change."
    )
    advice = "Roll the table back to the batch (Hudi: a savepoint, or another checkpoint identifier), then start."


# The last pattern is the general form of a table name.
_BUILT_IN: tuple[type[Sink], ...] = (
    FileSink,
    DeltaTable,
    DeltaMerge,
    IcebergTable,
    HudiOrPaimonTable,
    KafkaSink,
    TransactionalKafkaSink,
    ConsoleSink,
    NoopSink,
    MemorySink,
    ForeachBatchSink,
    ForeachSink,
    NamedTable,
)
_registered: list[type[Sink]] = []


def register_sink(kind: type[Sink]) -> type[Sink]:
    """Register a kind of sink. Can be used as a decorator.

    The kind registered last is asked first, the built-in kinds last. Register it where the streams are defined, so that
    every process that starts, forks, rewinds or examines one imports it. A kind of the same module and name is
    replaced: a code location can be reloaded.

    Example:
        >>> from dagster_ckpt import register_sink
        >>> from dagster_ckpt.sinks.sink import Sink
        >>> @register_sink
        ... class TotalsInPostgres(Sink): ...
    """
    if not (isinstance(kind, type) and issubclass(kind, Sink)):
        raise OptionTypeError(f"register_sink takes a subclass of dagster_ckpt.sinks.sink.Sink, not {kind!r}.")
    _registered[:] = [kind, *(each for each in _registered if _identity(each) != _identity(kind))]
    return kind


def _identity(kind: type[Sink]) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__


def sink_of(name: str) -> Sink:
    found = (kind.of(name) for kind in (*_registered, *_BUILT_IN))
    return next((sink for sink in found if sink is not None), Sink(name))


def sinks_of(names: Sequence[str]) -> list[Sink]:
    return [sink_of(name) for name in names]


def described_sink(output: NamedOutput | None) -> Sink | None:
    if output is not None and output.sink is not None:
        return sink_of(output.sink)
    if output is None or output.place is None:
        return None
    names = (kind.name_of(output.format, output.place) for kind in (*_registered, *_BUILT_IN))
    sink = next((sink_of(name) for name in names if name is not None), None)
    return FileSink.at(output.place) if sink is None and output.of_files else sink


def output_of(names: Sequence[str]) -> NamedOutput:
    sink = next((sink for sink in sinks_of(names) if sink.rolls_back), None)
    return NamedOutput("", sink.place, sink.name) if sink is not None else NamedOutput("", None)


def forecast(name: str, replay: Replay) -> SinkForecast:
    return sink_of(name).forecast(replay)


def captured_sinks(properties: Mapping[str, Any]) -> list[Sink] | None:
    described = properties.get("sinks")
    return [FileSink.at(str(sink["path"])) for sink in described] if isinstance(described, list) else None


def other_sinks(properties: Mapping[str, Any]) -> list[Sink] | None:
    named = properties.get("other_sinks")
    return sinks_of([str(sink) for sink in named]) if isinstance(named, list) else None


def sinks_in(properties: Mapping[str, Any]) -> list[Sink]:
    return [*(captured_sinks(properties) or ()), *(other_sinks(properties) or ())]


def names_of_others(sinks: Sequence[str]) -> list[str]:
    return [sink.name for sink in sinks_of(sinks) if not isinstance(sink, FileSink)]


def logs_in_snapshot(store: SnapshotStore, location: str) -> dict[str, list[SinkEntry]]:
    properties = store.manifest(location).header.properties
    return logs_of_sinks(properties, _files(store, location) if captured_sinks(properties) else {})


def part_files_in_snapshot(store: SnapshotStore, location: str) -> set[str]:
    entries = _files(store, location).items()
    return {bare(file) for path, data in entries for file in listed(data, f"{location}/{path}")}


def _files(store: SnapshotStore, location: str) -> dict[str, bytes]:
    return read_files(store, location, lambda path: path.startswith(f"{SINKS_FOLDER}/"))
