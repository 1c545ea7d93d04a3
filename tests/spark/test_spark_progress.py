from dagster_ckpt.spark.query.query import QueryProgress, SourceProgress

REPORT = {
    "id": "q",
    "runId": "r",
    "timestamp": "2026-01-01T00:00:00.000Z",
    "batchId": 3,
    "batchDuration": 307,
    "numInputRows": 5,
    "durationMs": {"addBatch": 161, "triggerExecution": 307},
    "eventTime": {"watermark": "2024-01-01T00:00:00.000Z"},
    "stateOperators": [{"numRowsTotal": 4, "memoryUsedBytes": 30}, {"numRowsTotal": 6, "memoryUsedBytes": 12}],
    "sink": {"description": "FileSink[file:/out]", "numOutputRows": -1},
}


def test_a_report_of_a_batch_is_read() -> None:
    assert QueryProgress.of(REPORT) == QueryProgress(
        batch_id=3,
        run_id="r",
        timestamp="2026-01-01T00:00:00.000Z",
        input_rows=5,
        state_rows=10,
        watermark="2024-01-01T00:00:00.000Z",
        sinks=("FileSink[file:/out]",),
        duration_ms=307,
        ran=True,
        state_memory=42,
    )


def test_a_report_without_a_batch_says_so() -> None:
    idle = QueryProgress.of({**REPORT, "durationMs": {"latestOffset": 4}, "eventTime": {}, "stateOperators": []})

    assert (idle.ran, idle.watermark, idle.state_rows) == (False, None, 0)


def test_sources_say_what_is_left_to_read_where_they_tell_it() -> None:
    kafka = {
        "description": "KafkaV2[Subscribe[orders]]",
        "endOffset": {"orders": {"0": 10, "1": 5}},
        "latestOffset": {"orders": {"0": 12, "1": 9, "2": 3}},
    }
    others = [
        {"description": "FileStreamSource[file:/in]", "endOffset": {"logOffset": 3}, "latestOffset": None},
        {"description": "RateStreamV2[rowsPerSecond=1]", "endOffset": 7, "latestOffset": 7},
        {"description": "Strange", "endOffset": "not JSON"},
    ]

    progress = QueryProgress.of({**REPORT, "sources": [kafka, *others], "processedRowsPerSecond": 12.5})

    assert progress.sources[0] == SourceProgress(
        "KafkaV2[Subscribe[orders]]",
        behind=9,
        read_up_to='{"orders": {"0": 10, "1": 5}}',
        lags={"orders-0": 2, "orders-1": 4, "orders-2": 3},
    )
    assert [(source.behind, source.read_up_to) for source in progress.sources[1:]] == [(None, None)] * 3
    assert progress.rows_per_second == 12.5


def test_an_idle_query_has_no_speed() -> None:
    assert QueryProgress.of({**REPORT, "processedRowsPerSecond": float("nan")}).rows_per_second is None
    assert QueryProgress.of({**REPORT, "processedRowsPerSecond": 0.0}).rows_per_second is None
