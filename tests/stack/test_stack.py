"""The production stack: each of its processes killed in turn, while two streams run; every row is there once.

`make test-stack`. Flights go through Kafka to two streaming assets on a Spark cluster, which count them into a
transactional topic and keep them as Parquet; see `running_stack.py`.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

import psutil
import pytest

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import LeaseRecord
from tests.stack.orders import Orders, published_counts, rows_of_table
from tests.stack.running_stack import Stack, running_stack

pytestmark = [pytest.mark.spark, pytest.mark.kafka, pytest.mark.stack, pytest.mark.timeout(900)]

DEADLINE_S = 420.0
ORDERS = 200
STREAMS = ("shop_counts", "orders_table")


@dataclass
class Trade:
    """The stack, and what was sold.

    Attributes:
        stack: The stack.
        orders: What was put into it.
    """

    stack: Stack
    orders: Orders

    def lease(self, stream: str) -> LeaseRecord:
        with closing(Catalog(self.stack.catalog_url)) as catalog:
            lease = catalog.leases.current(stream)
        assert lease is not None, f"no process runs {stream}"
        return lease

    def await_everything(self) -> None:
        """Wait until both outputs have everything, and compare them row for row."""
        self.await_that(lambda: rows_of_table(self.stack.orders_table).total() >= self.orders.sold.total())
        self.await_that(lambda: self._newest_counts() == self.orders.by_shop)
        assert rows_of_table(self.stack.orders_table) == self.orders.sold
        for shop, counts in published_counts(self.stack.kafka.servers).items():
            # A count that is written twice, or goes back, would show here.
            assert counts == sorted(set(counts)), shop

    def await_that(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.told()
            self.stack.keep_up()
            time.sleep(1)

    def told(self) -> str:
        rows = rows_of_table(self.stack.orders_table).total()
        with closing(Catalog(self.stack.catalog_url)) as catalog:
            latest = [catalog.executions.latest(stream) for stream in STREAMS]
        return (
            f"{rows} of {self.orders.sold.total()} rows; counts {self._newest_counts()} of {self.orders.by_shop}; "
            f"{latest}; logs in {self.stack.folder}"
        )

    def _newest_counts(self) -> dict[str, int]:
        return {shop: counts[-1] for shop, counts in published_counts(self.stack.kafka.servers).items()}


@pytest.fixture(scope="module")
def trade(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trade]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        trade = Trade(stack, Orders(stack.kafka.servers))
        trade.orders.sell(ORDERS)
        stack.start_streams()
        trade.await_everything()
        yield trade


def kill_executors(trade: Trade) -> None:
    executors = trade.stack.cluster.executors()
    assert executors
    for executor in executors:
        executor.kill()


def kill_worker(trade: Trade) -> None:
    trade.stack.cluster.kill("worker-1")
    trade.orders.sell(ORDERS)
    trade.stack.cluster.start_worker(1)


def kill_master(trade: Trade) -> None:
    trade.stack.cluster.kill("master")
    trade.orders.sell(ORDERS)
    trade.stack.cluster.start_master()


def kill_driver(trade: Trade) -> None:
    pid = trade.lease("shop_counts").jvm_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def kill_runs(trade: Trade) -> None:
    for stream in STREAMS:
        lease = trade.lease(stream)
        psutil.Process(lease.pid).kill()


def kill_kafka(trade: Trade) -> None:
    trade.stack.kafka.kill()
    time.sleep(3)
    trade.stack.kafka.start()


def kill_postgres(trade: Trade) -> None:
    trade.stack.postgres.kill()
    trade.orders.sell(ORDERS)
    trade.stack.postgres.start()


def pause_object_store(trade: Trade) -> None:
    trade.stack.object_store.pause(10)


def kill_dagster(trade: Trade) -> None:
    # The runs are processes of the code location, and end with it.
    for server in trade.stack.dagster.values():
        server.kill()
    trade.orders.sell(10)
    trade.stack.keep_up()


DEATHS: dict[str, Callable[[Trade], None]] = {
    "executors": kill_executors,
    "a worker of Spark": kill_worker,
    "the master of Spark": kill_master,
    "a driver's JVM": kill_driver,
    "the runs of both streams": kill_runs,
    "Kafka": kill_kafka,
    "PostgreSQL": kill_postgres,
    "the object store, paused": pause_object_store,
    "code location, webserver, daemon": kill_dagster,
}


@pytest.mark.parametrize("death", DEATHS, ids=str)
def test_every_row_is_there_once_after_the_death_of(trade: Trade, death: str) -> None:
    trade.orders.sell(ORDERS)
    DEATHS[death](trade)
    trade.orders.sell(ORDERS)

    trade.await_everything()


def test_the_snapshots_are_in_the_object_store_and_the_live_directories_too(trade: Trade) -> None:
    with closing(Catalog(trade.stack.catalog_url)) as catalog:
        for stream in STREAMS:
            (newest, *_) = catalog.snapshots.completed(stream)
            assert str(newest.location).startswith("s3://"), newest
            assert str(catalog.streams.get(stream).live_directory).startswith("s3a://")


def test_the_page_shows_the_checkpoints(trade: Trade) -> None:
    def materialized() -> bool:
        told = trade.stack.graphql("{ assetsOrError { ... on AssetConnection { nodes { key { path } } } } }")
        known = {"/".join(node["key"]["path"]) for node in told["assetsOrError"]["nodes"]}
        return set(STREAMS) <= known

    trade.await_that(materialized)
