"""A Dagster instance in memory, a catalog in a file, and streams whose queries are never started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import register
from supervised_streams import Supervised

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies
from dagster_ckpt.values.durations import wall_clock_ms
from tests.support.manual_clock import ManualClock


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def catalog_resource(tmp_path: Path) -> CheckpointCatalogResource:
    return CheckpointCatalogResource(url=f"sqlite:///{tmp_path / 'catalog.db'}")


@pytest.fixture
def orders() -> StreamingAsset:
    @streaming_asset(
        checkpointing=CheckpointConfig(interval=1000),
        restart_strategy=RestartStrategies.fixed_delay_restart(2, 60_000),
    )
    def orders(context: Any) -> Any: ...

    return orders


@pytest.fixture
def payments() -> StreamingAsset:
    @streaming_asset(key_prefix="shop", checkpointing=CheckpointConfig(interval=1000))
    def payments(context: Any) -> Any: ...

    return payments


@pytest.fixture
def catalog(
    catalog_resource: CheckpointCatalogResource, orders: StreamingAsset, payments: StreamingAsset
) -> Iterator[Catalog]:
    catalog = catalog_resource.catalog()
    for stream in (orders, payments):
        register(catalog, stream.stream_id)
    yield catalog
    catalog.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    clock = ManualClock(wall_clock_ms())  # Dagster stamps the runs with the real time.
    monkeypatch.setattr("dagster_ckpt.orchestration.supervisor_sensor.wall_clock_ms", clock)
    return clock


@pytest.fixture
def supervised(
    instance: dg.DagsterInstance,
    catalog_resource: CheckpointCatalogResource,
    orders: StreamingAsset,
    payments: StreamingAsset,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Supervised]:
    catalog = Catalog(catalog_resource.url, clock=clock)
    monkeypatch.setattr(CheckpointCatalogResource, "catalog", lambda _self: catalog)
    for stream_id in ("orders", "shop.payments", "elsewhere"):
        register(catalog, stream_id)
    yield Supervised(instance, catalog_resource, clock, [orders, payments])
    catalog.close()
