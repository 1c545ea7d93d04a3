"""An option of the wrong kind is refused where it is written, not later in a run or a sensor."""

from collections.abc import Callable
from typing import Any

import pytest

from dagster_ckpt.client.health_facts import HealthSettings
from dagster_ckpt.driver import run_stream
from dagster_ckpt.errors import OptionError, OptionTypeError
from dagster_ckpt.orchestration import PeriodicSavepoints, stream_definitions, streaming_asset
from dagster_ckpt.orchestration.external_asset import external_streaming_asset
from dagster_ckpt.orchestration.stream import StreamSpec
from dagster_ckpt.policies.trigger import Blackout
from dagster_ckpt.policies.upgrade import UpgradeMode, UpgradePolicy
from dagster_ckpt.stream.start_from import StartFrom
from dagster_ckpt.values.modes import DesiredState, RecoveryClaimMode


def asset(**given: Any) -> object:
    def orders(context: Any) -> Any: ...

    return streaming_asset(**given)(orders)


def external(**given: Any) -> object:
    return external_streaming_asset("orders", **given)


def definitions(**given: Any) -> object:
    return stream_definitions(external_streaming_asset("orders"), **given)


def driver(**given: Any) -> object:
    places = {"catalog": "sqlite:////none", "storage": "/none", "live_root": "/none"}
    return run_stream("orders", lambda spark: None, **places, **given)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("declare", "given"),
    [
        (asset, {"desired_state": "running"}),
        (asset, {"desired_state": True}),
        (asset, {"upgrade": "SAVEPOINT"}),
        (asset, {"upgrade": {"mode": "SAVEPOINT"}}),
        (asset, {"checkpointing": {"interval": 1_000}}),
        (asset, {"checkpointing": 60_000}),
        (asset, {"restart_strategy": "FIXED_DELAY"}),
        (asset, {"stall_timeout_ms": "30000"}),
        (asset, {"restart_in_run": "false"}),
        (asset, {"standby": "yes"}),
        (asset, {"op_tags": "dagster/priority"}),
        (asset, {"hooks": "company.alerts:page"}),
        (external, {"launch": ("spark-submit", "orders.py")}),
        (definitions, {"health": {"max_stall_ms": 1}}),
        (definitions, {"health_checks": ["liveliness"]}),
        (definitions, {"health": 3}),
        (definitions, {"operator_jobs": "restart_stream_job"}),
        (definitions, {"savepoint_schedules": {"orders": {"cron_schedule": "0 3 * * *"}}}),
        (driver, {"checkpointing": {"interval": 1_000}}),
        (driver, {"state_backend": "rocksdb"}),
        (driver, {"on_backend_change": "convert"}),
        (PeriodicSavepoints, {"cron_schedule": "0 3 * * *", "history": {"latest": 3}}),
        (PeriodicSavepoints, {"cron_schedule": "0 3 * * *", "blackouts": Blackout("22:00", "06:00")}),
        (PeriodicSavepoints, {"cron_schedule": "0 3 * * *", "blackouts": ["22:00"]}),
        (PeriodicSavepoints, {"cron_schedule": "0 3 * * *", "default_status": "ON"}),
        (UpgradePolicy, {"mode": "ROLLING"}),
        (UpgradePolicy, {"preflight": "no"}),
        (UpgradePolicy, {"stop_timeout_ms": "60000"}),
        (HealthSettings, {"size_growth_factor": "2"}),
        (Blackout, {"end": "06:00", "begin": 22}),
        (StartFrom, {"start_from": 7}),
        (StartFrom, {"accept_loss": "no"}),
        (StartFrom, {"claim_mode": "MINE"}),
    ],
)
def test_a_value_of_another_kind_is_refused_with_its_option(declare: Callable[..., object], given: Any) -> None:
    with pytest.raises((OptionError, OptionTypeError)) as refusal:
        declare(**given)
    assert list(given)[-1] in str(refusal.value)


def test_a_member_is_given_by_its_name_too() -> None:
    assert StreamSpec.of("orders", desired_state="RUNNING").desired_state is DesiredState.RUNNING  # type: ignore[typeddict-item]
    assert UpgradePolicy("LAST_STATE").mode is UpgradeMode.LAST_STATE  # type: ignore[arg-type]
    assert StartFrom("chk-7", claim_mode="claim").claim_mode is RecoveryClaimMode.CLAIM  # type: ignore[arg-type]
    assert HealthSettings(size_growth_factor=3).size_growth_factor == 3
    checks = stream_definitions(external_streaming_asset("orders"), health_checks=["progress"])  # type: ignore[list-item]
    assert [spec.name for check in checks.asset_checks or () for spec in check.check_specs] == ["progress"]  # type: ignore[union-attr]
    blackouts = [Blackout("22:00", "06:00")]
    assert PeriodicSavepoints("0 3 * * *", blackouts=blackouts).blackouts == tuple(blackouts)  # type: ignore[arg-type]
