"""The health of streams as Dagster asset checks: by a sensor all the time, by hand from the page."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import dagster as dg

from dagster_ckpt.catalog import Catalog
from dagster_ckpt.lifecycle.health import Finding, HealthCheck, HealthFacts, HealthSettings, Verdict, judge
from dagster_ckpt.lifecycle.health_facts import health_facts
from dagster_ckpt.lifecycle.job import wall_clock_ms
from dagster_ckpt.orchestration._compat import latest_check_evaluations
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.streaming_asset import StreamingAsset

VERDICT_KEY = "dagster_ckpt/verdict"
# Most of a tick goes into what Dagster knows of the checks: half a millisecond for each stream.
STREAMS_PER_TICK = 25
DAY_S = 24 * 3600

# Looks at a stream from outside the catalog, such as at the offsets that its topics still have.
FactsBesides = Callable[[StreamingAsset, HealthFacts], HealthFacts]

_DESCRIPTIONS = {
    HealthCheck.RESTORABILITY: "An image was proven to be restorable lately (verify_images_job).",
    HealthCheck.CHECKPOINT_AGE: "Recovery point objective: the newest image is young enough.",
    HealthCheck.CONSECUTIVE_FAILURES: "Checkpoints do not fail one after the other.",
    HealthCheck.SIZE_GROWTH: "The state does not grow without a bound.",
    HealthCheck.SOURCE_LAG: "The stream keeps up with its sources.",
    HealthCheck.SOURCE_RETENTION: "The sources still have what a recovery reads again.",
}


def build_health_checks(
    streams: Sequence[StreamingAsset],
    *,
    settings: HealthSettings | Mapping[str, HealthSettings] = HealthSettings(),  # noqa: B008 - frozen
    checks: Sequence[HealthCheck] = tuple(HealthCheck),
    facts_besides: FactsBesides | None = None,
) -> list[dg.AssetChecksDefinition]:
    """The checks of these streams, to be run from the page; `build_health_sensor` evaluates them all the time.

    Args:
        streams: The streams.
        settings: Thresholds, for all of them or by job id.
        checks: Which checks there are. Leave one out where nobody can know, such as the lag of a source without one.
        facts_besides: Adds to what the catalog knows.
    """
    return [_checks_of(stream, _settings_of(stream, settings), checks, facts_besides) for stream in streams]


def build_health_sensor(
    streams: Sequence[StreamingAsset],
    *,
    settings: HealthSettings | Mapping[str, HealthSettings] = HealthSettings(),  # noqa: B008 - frozen
    checks: Sequence[HealthCheck] = tuple(HealthCheck),
    facts_besides: FactsBesides | None = None,
    repeat_after_seconds: int = DAY_S,
    name: str = "checkpoint_health_sensor",
    minimum_interval_seconds: int = 15,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """A sensor that evaluates the health checks of streams, and reports a verdict when it changes.

    Evaluations of one run collapse into its last one; those of a sensor do not. It reads the catalog only, 25
    streams in a tick, and changes nothing. An unchanged verdict is reported again once a day.

    Args:
        streams: The streams.
        settings: Thresholds, for all of them or by job id.
        checks: As in `build_health_checks`.
        facts_besides: As in `build_health_checks`; it has to be quick.
        repeat_after_seconds: An unchanged verdict is reported again after so long.
        name: Name of the sensor.
        minimum_interval_seconds: Shortest time between two looks.
        default_status: Whether it runs from the start.
    """
    ordered = sorted(streams, key=lambda stream: stream.job_id)

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Evaluates the health checks of streaming assets: " + ", ".join(checks) + ".",
    )
    def checkpoint_health_sensor(
        context: dg.SensorEvaluationContext, checkpoint_catalog: CheckpointCatalogResource
    ) -> dg.SensorResult:
        begin = _cursor(context.cursor) % max(len(ordered), 1)
        looked_at = ordered[begin : begin + STREAMS_PER_TICK]
        now_ms = wall_clock_ms()
        findings = _findings(
            checkpoint_catalog.catalog(),
            [(stream, _settings_of(stream, settings)) for stream in looked_at],
            facts_besides,
            now_ms=now_ms,
        )
        evaluations = [
            _evaluation(stream.key, finding)
            for stream, found in findings
            for finding in found
            if finding.check in checks
        ]
        known = latest_check_evaluations(context.instance, [each.asset_check_key for each in evaluations])
        news = [
            each
            for each in evaluations
            if each.asset_check_key not in known
            or known[each.asset_check_key].verdict(VERDICT_KEY) != each.metadata[VERDICT_KEY].value
            or known[each.asset_check_key].at_s + repeat_after_seconds <= now_ms / 1000
        ]
        after = begin + len(looked_at)
        return dg.SensorResult(
            asset_events=news,
            cursor=json.dumps(after if after < len(ordered) else 0),
            skip_reason=None if news else dg.SkipReason(f"nothing new of {len(looked_at)} streams"),
        )

    return checkpoint_health_sensor


def _checks_of(
    stream: StreamingAsset,
    settings: HealthSettings,
    checks: Sequence[HealthCheck],
    facts_besides: FactsBesides | None,
) -> dg.AssetChecksDefinition:
    @dg.multi_asset_check(
        name="__".join([*stream.key.path, "health"]),
        specs=[dg.AssetCheckSpec(check.value, asset=stream.key, description=_DESCRIPTIONS[check]) for check in checks],
        can_subset=True,
        required_resource_keys={"checkpoint_catalog"},
    )
    def health(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        selected = {key.name for key in context.selected_asset_check_keys}
        catalog = context.resources.checkpoint_catalog.catalog()
        for _, found in _findings(catalog, [(stream, settings)], facts_besides, now_ms=wall_clock_ms()):
            for finding in found:
                if finding.check.value in selected:
                    evaluation = _evaluation(stream.key, finding)
                    yield dg.AssetCheckResult(
                        asset_key=stream.key,
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
    facts_besides: FactsBesides | None,
    *,
    now_ms: int,
) -> Iterator[tuple[StreamingAsset, list[Finding]]]:
    by_job_id = {stream.job_id: settings for stream, settings in streams}
    facts = health_facts(catalog, by_job_id, now_ms=now_ms)
    for stream, settings in streams:
        known = facts[stream.job_id]
        if facts_besides is not None:
            known = facts_besides(stream, known)
        yield stream, judge(known, stream.options, settings, now_ms=now_ms)


def _evaluation(key: dg.AssetKey, finding: Finding) -> dg.AssetCheckEvaluation:
    # What nobody can say is not well: it warns, and says what to do.
    severity = dg.AssetCheckSeverity.ERROR if finding.verdict is Verdict.ERROR else dg.AssetCheckSeverity.WARN
    return dg.AssetCheckEvaluation(
        asset_key=key,
        check_name=finding.check.value,
        passed=finding.verdict is Verdict.PASS,
        severity=severity,
        description=finding.sentence,
        metadata={
            VERDICT_KEY: finding.verdict.value,
            **{f"dagster_ckpt/{name}": value for name, value in finding.figures.items()},
        },
    )


def _settings_of(stream: StreamingAsset, settings: HealthSettings | Mapping[str, HealthSettings]) -> HealthSettings:
    return settings if isinstance(settings, HealthSettings) else settings.get(stream.job_id, HealthSettings())


def _cursor(text: str | None) -> int:
    try:
        return int(json.loads(text)) if text else 0
    except (TypeError, ValueError):
        # A person may write anything into a cursor; a round that begins anew is always right.
        return 0
