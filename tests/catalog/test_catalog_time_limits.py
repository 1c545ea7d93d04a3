"""No call to the catalog takes longer than a holder can wait: its lease would run out while it hangs there."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text
from stalling_proxy import StallingProxy

from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.catalog.records import Holder, LeaseRecord
from dagster_ckpt.catalog.time_limits import DEFAULT_TTL_MS, GIVE_UP_AFTER, call_limit_s
from dagster_ckpt.errors import CatalogError

TTL_MS = 5_000
LIMIT_S = call_limit_s(TTL_MS)
# What a busy machine may add; far below what a call took without a limit.
SLACK_S = 20.0

HOLDER = Holder("execution", "run", "host", 1, process_start_ticks=1, boot_id="boot")

CALLS: dict[str, Callable[[Catalog, LeaseRecord], object]] = {
    "renew": lambda catalog, lease: catalog.leases.renew(lease, TTL_MS),
    "check": lambda catalog, lease: catalog.leases.check(lease),
    "release": lambda catalog, lease: catalog.leases.release(lease),
    "read": lambda catalog, _lease: catalog.streams.get("orders"),
}


def seconds_until_it_fails(call: Callable[[], object]) -> float:
    began = time.monotonic()
    with pytest.raises(CatalogError):
        call()
    return time.monotonic() - began


def test_a_call_that_begins_right_before_a_holder_counts_itself_out_ends_within_its_lease() -> None:
    assert DEFAULT_TTL_MS / 1000 * GIVE_UP_AFTER + call_limit_s(DEFAULT_TTL_MS) <= DEFAULT_TTL_MS / 1000


def _close_connections_to(url: str) -> None:
    with create_engine(url).connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )


class TestPostgresql:
    @pytest.fixture
    def url(self, postgres: str) -> str:
        return postgres

    @pytest.fixture
    def proxy(self, url: str) -> Iterator[StallingProxy]:
        proxy = StallingProxy(url)
        yield proxy
        proxy.close()

    @pytest.fixture
    def catalog(self, proxy: StallingProxy) -> Iterator[Catalog]:
        catalog = Catalog(proxy.url)
        catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
        catalog.database.limit_calls(TTL_MS)
        yield catalog
        proxy.resume()
        catalog.close()

    def test_reads_in_a_row_ask_the_server_once_each(self, catalog: Catalog, proxy: StallingProxy) -> None:
        catalog.streams.get("orders")
        before = proxy.asked
        for _ in range(10):
            catalog.streams.get("orders")
        # Once more where the driver begins to prepare the statement.
        assert proxy.asked - before <= 11

    def test_an_idle_connection_that_the_server_has_closed_is_replaced(
        self, catalog: Catalog, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("dagster_ckpt.catalog.database._IDLE_S", math.inf)
        catalog.streams.get("orders")
        _close_connections_to(url)
        with pytest.raises(CatalogError):
            catalog.streams.get("orders")
        catalog.streams.get("orders")

        monkeypatch.setattr("dagster_ckpt.catalog.database._IDLE_S", 0.0)
        _close_connections_to(url)
        catalog.streams.get("orders")

    @pytest.mark.parametrize("call", CALLS)
    def test_a_connection_that_stalls_ends_the_call_and_is_not_used_again(
        self, catalog: Catalog, proxy: StallingProxy, call: str
    ) -> None:
        current = catalog.leases.current("orders")
        taken = catalog.leases.acquire("orders", HOLDER, TTL_MS, take_over=current)

        proxy.stall()
        took_s = seconds_until_it_fails(lambda: CALLS[call](catalog, taken))

        assert LIMIT_S * 0.9 <= took_s < LIMIT_S + SLACK_S
        proxy.resume()
        catalog.leases.check(taken)

    def test_so_does_a_server_that_answers_no_new_connection(self, catalog: Catalog, proxy: StallingProxy) -> None:
        catalog.close()
        proxy.stall()

        assert seconds_until_it_fails(lambda: catalog.streams.get("orders")) < 2 + LIMIT_S + SLACK_S

    def test_a_row_that_another_holds_is_not_waited_for_longer(self, catalog: Catalog, url: str) -> None:
        other = Catalog(url)
        with other.database.writing() as connection:
            connection.execute(text("SELECT * FROM streams WHERE stream_id = 'orders' FOR UPDATE"))

            took_s = seconds_until_it_fails(lambda: catalog.streams.allocate_number("orders"))

        assert took_s < LIMIT_S + SLACK_S
        other.close()

    def test_the_server_ends_what_a_client_left_open_that_hangs(self, catalog: Catalog) -> None:
        with catalog.database.reading() as connection:
            limits = {
                name: connection.execute(text(f"SHOW {name}")).scalar_one()
                for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
            }

        assert set(limits.values()) == {"6s"}


class TestSqlite:
    @pytest.fixture
    def catalog(self, tmp_path: Path) -> Iterator[Catalog]:
        catalog = Catalog(f"sqlite:///{tmp_path / 'catalog.db'}")
        catalog.streams.ensure("orders", name="orders", asset_key="orders", options={})
        catalog.database.limit_calls(TTL_MS)
        yield catalog
        catalog.close()

    def test_a_file_that_another_process_keeps_locked_is_not_waited_for_longer(self, catalog: Catalog) -> None:
        taken = catalog.leases.acquire("orders", HOLDER, TTL_MS)
        path = make_url(catalog.database.shown_url).database
        assert path is not None
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")

        took_s = seconds_until_it_fails(lambda: catalog.leases.renew(taken, TTL_MS))

        other.close()
        assert LIMIT_S * 0.9 <= took_s < LIMIT_S + SLACK_S
        catalog.leases.renew(taken, TTL_MS)
