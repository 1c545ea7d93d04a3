"""A Dagster instance in memory, a catalog in a file, and streams whose queries are never started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from orchestration_catalog import register

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.checkpoint_config import CheckpointConfig
from dagster_ckpt.orchestration.resources import CheckpointCatalogResource
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.policies.restart import RestartStrategies


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
