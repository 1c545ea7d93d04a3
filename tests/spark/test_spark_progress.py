from dagster_ckpt.spark import QueryProgress

REPORT = {
    "id": "q",
    "runId": "r",
    "timestamp": "2026-01-01T00:00:00.000Z",
    "batchId": 3,
    "batchDuration": 307,
    "numInputRows": 5,
    "durationMs": {"addBatch": 161, "triggerExecution": 307},
    "eventTime": {"watermark": "2024-01-01T00:00:00.000Z"},
    "stateOperators": [{"numRowsTotal": 4}, {"numRowsTotal": 6}],
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
    )


def test_a_report_without_a_batch_says_so() -> None:
    idle = QueryProgress.of({**REPORT, "durationMs": {"latestOffset": 4}, "eventTime": {}, "stateOperators": []})

    assert (idle.ran, idle.watermark, idle.state_rows) == (False, None, 0)
