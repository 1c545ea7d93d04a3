"""Finds the kind of a sink by Spark's name for it. `register_sink` adds a kind of your own."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_ckpt.errors import OptionTypeError
from dagster_ckpt.sinks.builtin import ConsoleSink, ForeachBatchSink, ForeachSink, MemorySink, NoopSink
from dagster_ckpt.sinks.delta import DeltaTable
from dagster_ckpt.sinks.delta_merge import DeltaMerge
from dagster_ckpt.sinks.file_sink import FileSink
from dagster_ckpt.sinks.iceberg import IcebergTable
from dagster_ckpt.sinks.kafka.sink import KafkaSink, TransactionalKafkaSink
from dagster_ckpt.sinks.sink import Replay, Sink, SinkForecast
from dagster_ckpt.sinks.tables import HudiOrPaimonTable, NamedTable
from dagster_ckpt.spark.query.output import NamedOutput

# In this order: class names are matched before the general form of a table name.
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
    """Teach the package a kind of sink. Can be used as a decorator.

    The kind registered last is asked first, and all of them before the built-in kinds. Register it
    where the streams are defined: every process that starts, forks, rewinds or examines one of them
    imports that module. A kind of the same module and name is replaced, so that a code location can
    be reloaded.

    Args:
        kind: A subclass of `Sink` that overrides at least `of`.

    Raises:
        OptionTypeError: It is no such subclass.

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
    """The sink with a name; an unknown one is a plain `Sink`.

    Args:
        name: `sink.description` of the query's progress.
    """
    found = (kind.of(name) for kind in (*_registered, *_BUILT_IN))
    return next((sink for sink in found if sink is not None), Sink(name))


def sinks_of(names: Sequence[str]) -> list[Sink]:
    """The sinks with some names."""
    return [sink_of(name) for name in names]


def described_sink(output: NamedOutput | None) -> Sink | None:
    """The sink to which a described query is about to write; None if its name cannot be known before the start."""
    if output is not None and output.sink is not None:
        return sink_of(output.sink)
    if output is None or output.place is None:
        return None
    names = (kind.name_of(output.format, output.place) for kind in (*_registered, *_BUILT_IN))
    return next((sink_of(name) for name in names if name is not None), None)


def output_of(names: Sequence[str]) -> NamedOutput:
    """The output of a query that reported some sinks: the first one that can be rolled back."""
    sink = next((sink for sink in sinks_of(names) if sink.rolls_back), None)
    return NamedOutput("", sink.place, sink.name) if sink is not None else NamedOutput("", None)


def forecast(name: str, replay: Replay) -> SinkForecast:
    """Forecast what one sink does with the batches after `replay.to_batch`. Changes nothing.

    Args:
        name: `sink.description` of the query's progress.
        replay: The replay that it will see.
    """
    return sink_of(name).forecast(replay)
