"""Forecast what each sink of a query does when batches that it has written come again. Changes nothing.

Sinks identify a batch by its number: some regardless of the query (the file sink), some together
with the query's id (Delta, Iceberg), some not at all. A rewound query plans its batches again, so
the same number can stand for other rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dagster_ckpt.sinks.effect import Replay, SinkEffect, SinkForecast
from dagster_ckpt.sinks.parquet import forecast_file_sink
from dagster_ckpt.sinks.tables import (
    LOCATION,
    forecast_catalog_table,
    forecast_delta,
    forecast_iceberg,
    forecast_numbered,
)

_DELTA = re.compile(r"DeltaSink\[(?P<path>.+)\]")
_ICEBERG_WRITE = re.compile(r"IcebergWrite\(table=(?P<path>[^,)]+).*\)")
# Spark's own noop sink, and no other sink with such a word in its name.
_NOOP = re.compile(r"(org\.apache\.spark\.sql\.execution\.datasources\.noop\.)?NoopTable\$?(@[0-9a-f]+)?")
_CATALOG_TABLE = re.compile(r"[\w`-]+(?:\.[\w`-]+)+")


def forecast(sink: str, replay: Replay) -> SinkForecast:
    """Forecast what one sink does with the batches after `replay.to_batch`.

    Args:
        sink: `sink.description` of the query's progress.
        replay: The replay that it will see.
    """
    for pattern, judge in _KINDS:
        match = pattern.fullmatch(sink)
        if match is not None:
            return judge(sink, match, replay)
    return SinkForecast(
        sink, SinkEffect.UNKNOWN, "Nothing is known of this sink: rewound batches may be written twice or passed over."
    )


def _always(effect: SinkEffect, reason: str, advice: str = "") -> Callable[[str, re.Match[str], Replay], SinkForecast]:
    return lambda sink, _match, _replay: SinkForecast(sink, effect, reason, advice)


_REPEATED = SinkEffect.DUPLICATE
# In this order: class names are matched before the general form of a table name.
_KINDS: tuple[tuple[re.Pattern[str], Callable[[str, re.Match[str], Replay], SinkForecast]], ...] = (
    (re.compile(r"FileSink\[.+\]"), lambda sink, _match, replay: forecast_file_sink(sink, replay)),
    (_DELTA, forecast_delta),
    (_ICEBERG_WRITE, forecast_iceberg),
    (re.compile(r"(?i).*(hoodie|hudi|paimon).*"), forecast_numbered),
    (
        re.compile(r".*Kafka(Table|Sink|SourceProvider).*"),
        _always(
            _REPEATED,
            "Kafka keeps no memory of batches: the records of the rewound ones are sent once more.",
            "Let consumers drop repeated keys; Spark does not write in transactions.",
        ),
    ),
    (re.compile(r".*Console(Table|Sink).*"), _always(_REPEATED, "The rewound batches are printed once more.")),
    (_NOOP, _always(SinkEffect.EXACT, "It keeps nothing.")),
    (
        re.compile(r"MemorySink.*|.*MemoryTable.*"),
        _always(SinkEffect.UNKNOWN, "Its table lives in the session: after any restart it holds only what came since."),
    ),
    (
        re.compile(r"ForeachBatchSink"),
        _always(
            SinkEffect.UNKNOWN,
            "The function is called again for batch numbers it has seen, with other rows: it depends on what it does.",
            "A function that keeps its own record of batch numbers, such as Delta's txnVersion, has to forget these.",
        ),
    ),
    (
        re.compile(r"Foreach.*"),
        _always(SinkEffect.UNKNOWN, "The writer gets the rewound rows once more: it depends on what it does."),
    ),
    (LOCATION, forecast_iceberg),
    (_CATALOG_TABLE, forecast_catalog_table),
)
