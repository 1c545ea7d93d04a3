"""Health of streams as Dagster asset checks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import dagster as dg

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.client.health import Finding, HealthCheck, Verdict, judge, worst
from dagster_ckpt.client.health_facts import HealthSettings, health_facts
from dagster_ckpt.orchestration._compat import LatestEvaluation, latest_check_evaluations
from dagster_ckpt.orchestration.metadata import DEPLOYMENT_KEY, OtherDeployments
from dagster_ckpt.orchestration.resources import catalog_of
from dagster_ckpt.orchestration.stream import StreamingAsset, translator_of
from dagster_ckpt.orchestration.translator import CHECKPOINT_CATALOG
from dagster_ckpt.values.durations import wall_clock_ms

VERDICT_KEY = "dagster_ckpt/verdict"
OF_FURTHER_ASSETS = "stream_health"
_NO_TROUBLE = (Verdict.PASS.value, Verdict.UNKNOWN.value)
# Reading the checks' state from Dagster takes a millisecond per stream.
STREAMS_PER_TICK = 25
DAY_S = 24 * 3600

_DESCRIPTIONS = {
    HealthCheck.RESTORABILITY: "A recent verification proved that a snapshot can be restored (verify_snapshots_job).",
    HealthCheck.CHECKPOINT_AGE: "Recovery point objective: the newest snapshot is young enough.",
    HealthCheck.CONSECUTIVE_FAILURES: "Checkpoints do not fail repeatedly.",
    HealthCheck.PROGRESS: "The query processes batches, or is idle.",
    HealthCheck.SIZE_GROWTH: "The state does not grow without bound.",
    HealthCheck.SOURCE_LAG: "The stream keeps up with its sources.",
    HealthCheck.SOURCE_RETENTION: "The sources still retain every record a recovery would re-read.",
    HealthCheck.EVENT_TIME: "The watermark is not ahead of the clock.",
    HealthCheck.DESIRED_STATE: "The last upgrade succeeded and no manual action is required.",
}


def build_health_checks(
    streams: Sequence[StreamingAsset],
    *,
    settings: HealthSettings | Mapping[str, HealthSettings] = HealthSettings(),  # noqa: B008 - frozen
    checks: Sequence[HealthCheck] = tuple(HealthCheck),
) -> list[dg.AssetChecksDefinition]:
    """Define the health checks of streams, to run from the page. `build_health_sensor` evaluates them continuously.

    They are on a stream's first asset. Each further asset has one, `stream_health`, with the worst result.

    Args:
        settings: Thresholds, for all streams or by stream id.
        checks: Leave out those that cannot be evaluated.
    """
    return [_checks_of(stream, _settings_of(stream, settings), checks) for stream in streams]


def build_health_sensor(
    streams: Sequence[StreamingAsset],
    *,
    settings: HealthSettings | Mapping[str, HealthSettings] = HealthSettings(),  # noqa: B008 - frozen
    checks: Sequence[HealthCheck] = tuple(HealthCheck),
    repeat_after_seconds: int = DAY_S,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """Define a sensor that evaluates the health checks of streams and reports results when they change.

    It reads only the catalog, 25 streams per tick: each of 1,000 streams every 200 seconds.

    Args:
        repeat_after_seconds: When an unchanged result is reported again.
    """
    translator = translator_of(streams)
    catalog_key = translator.get_resource_key(CHECKPOINT_CATALOG)
    others = OtherDeployments()
    ordered = sorted(streams, key=lambda stream: stream.stream_id)

    @dg.sensor(
        name=translator.get_sensor_name("checkpoint_health_sensor"),
        required_resource_keys={catalog_key},
        minimum_interval_seconds=5,
        default_status=default_status,
        description="Evaluates the health checks of streaming assets: " + ", ".join(checks) + ".",
    )
    def checkpoint_health_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        begin = _cursor(context.cursor) % max(len(ordered), 1)
        evaluated = ordered[begin : begin + STREAMS_PER_TICK]
        catalog = catalog_of(context, catalog_key)
        findings = _findings(
            catalog,
            [(stream, _settings_of(stream, settings)) for stream in evaluated],
            checks,
            now_ms=catalog.now_ms(),
        )
        evaluated_now = [
            (stream.stream_id, was_started, list(_evaluations(stream, found, catalog.deployment_id)))
            for stream, found, was_started in findings
        ]
        keys = [each.asset_check_key for *_, evaluations in evaluated_now for each in evaluations]
        known = latest_check_evaluations(context.instance, keys)
        oldest_s = wall_clock_ms() / 1000 - repeat_after_seconds
        news: list[dg.AssetCheckEvaluation] = []
        for stream_id, was_started, evaluations in evaluated_now:
            before = {each.asset_check_key: known.get(each.asset_check_key) for each in evaluations}
            by = [each.value_of(DEPLOYMENT_KEY) for each in before.values() if each is not None]
            if not was_started and any(each not in (None, catalog.deployment_id) for each in by):
                # Another deployment runs the stream, and reports it.
                continue
            if was_started and others.silence(stream_id, by, catalog.deployment_id, context.log):
                continue
            news += [
                each
                for each in evaluations
                if _is_news(each, before[each.asset_check_key], oldest_s)
                # Before the first start, checks stay "not evaluated": neither green nor a warning.
                and (was_started or by or each.metadata[VERDICT_KEY].value not in _NO_TROUBLE)
            ]
        after = begin + len(evaluated)
        # Only changes, as Dagster keeps every evaluation that a sensor reports.
        return dg.SensorResult(
            asset_events=news,
            cursor=json.dumps(after if after < len(ordered) else 0),
            skip_reason=None if news else dg.SkipReason(f"the verdicts of {len(evaluated)} streams are unchanged"),
        )

    return checkpoint_health_sensor


def _checks_of(
    stream: StreamingAsset,
    settings: HealthSettings,
    checks: Sequence[HealthCheck],
) -> dg.AssetChecksDefinition:
    summary = f"The stream is healthy; the checks of {stream.key.to_user_string()}, its first asset, give the details."

    catalog_key = stream.translator.get_resource_key(CHECKPOINT_CATALOG)

    @dg.multi_asset_check(
        name="__".join([*stream.key.path, "health"]),
        specs=[
            *(dg.AssetCheckSpec(check.value, asset=stream.key, description=_DESCRIPTIONS[check]) for check in checks),
            *(dg.AssetCheckSpec(OF_FURTHER_ASSETS, asset=key, description=summary) for key in stream.keys[1:]),
        ],
        can_subset=True,
        required_resource_keys={catalog_key},
    )
    def health(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        catalog = catalog_of(context, catalog_key)
        for _, found, _ in _findings(catalog, [(stream, settings)], checks, now_ms=catalog.now_ms()):
            for evaluation in _evaluations(stream, found, catalog.deployment_id):
                if evaluation.asset_check_key in context.selected_asset_check_keys:
                    yield dg.AssetCheckResult(
                        asset_key=evaluation.asset_key,
                        check_name=evaluation.check_name,
                        passed=evaluation.passed,
                        severity=evaluation.severity,
                        description=evaluation.description,
                        metadata=evaluation.metadata,
                    )

    return health


def _findings(
    catalog: Catalog,
    streams: Sequence[tuple[StreamingAsset, HealthSettings]],
    checks: Sequence[HealthCheck],
    *,
    now_ms: int,
) -> Iterator[tuple[StreamingAsset, list[Finding], bool]]:
    by_stream_id = {stream.stream_id: settings for stream, settings in streams}
    facts = health_facts(catalog, by_stream_id, now_ms=now_ms)
    for stream, settings in streams:
        known = replace(facts[stream.stream_id], loaded_version=stream.code_version)
        found = judge(known, stream.spec.options, settings, now_ms=now_ms)
        yield stream, [finding for finding in found if finding.check in checks], not known.was_never_started


def _is_news(evaluation: dg.AssetCheckEvaluation, before: LatestEvaluation | None, oldest_s: float) -> bool:
    if before is None or before.stored_at_s <= oldest_s:
        return True
    judged = {key: evaluation.metadata[key].value for key in (VERDICT_KEY, DEPLOYMENT_KEY)}
    # An earlier version recorded no deployment.
    return any(before.value_of(key) not in (None, value) for key, value in judged.items())


def _evaluations(
    stream: StreamingAsset, findings: Sequence[Finding], deployment: str
) -> Iterator[dg.AssetCheckEvaluation]:
    by = {DEPLOYMENT_KEY: deployment}
    for finding in findings:
        figures = {f"dagster_ckpt/{name}": value for name, value in finding.figures.items()}
        yield _evaluation(stream.key, finding.check.value, finding.verdict, finding.message, by | figures)
    failing = [
        f"{finding.check.value}: {finding.message}" for finding in findings if finding.verdict is not Verdict.PASS
    ]
    message = f"checks of {stream.key.to_user_string()}: {'; '.join(failing) or 'all pass'}"
    for key in stream.keys[1:]:
        yield _evaluation(key, OF_FURTHER_ASSETS, worst(findings), message, by)


def _evaluation(
    key: dg.AssetKey, name: str, verdict: Verdict, message: str, metadata: Mapping[str, int | float | str]
) -> dg.AssetCheckEvaluation:
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=name,
        passed=verdict is Verdict.PASS,
        # An unknown state warns.
        severity=dg.AssetCheckSeverity.ERROR if verdict is Verdict.ERROR else dg.AssetCheckSeverity.WARN,
        description=message,
        metadata={VERDICT_KEY: verdict.value, **metadata},
    )


def _settings_of(stream: StreamingAsset, settings: HealthSettings | Mapping[str, HealthSettings]) -> HealthSettings:
    return settings if isinstance(settings, HealthSettings) else settings.get(stream.stream_id, HealthSettings())


def _cursor(text: str | None) -> int:
    try:
        return int(json.loads(text)) if text else 0
    except (TypeError, ValueError):
        # An edited cursor starts over.
        return 0
