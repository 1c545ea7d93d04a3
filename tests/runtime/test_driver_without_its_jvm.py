"""A driver whose JVM a successor killed says that it was fenced, and by whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt import driver
from dagster_ckpt.catalog.catalog import Catalog
from dagster_ckpt.config.rocksdb import EmbeddedRocksDBStateBackend
from dagster_ckpt.errors import LeaseLostError
from dagster_ckpt.flink import program
from dagster_ckpt.runtime import start as starting
from dagster_ckpt.spark.query.session import settings_for_a_while
from tests.support.played_query import PlayedQuery
from tests.support.retention_shelf import HOLDER, STREAM


class Conf:
    """The settings of a session, in a JVM that may be gone."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False

    def get(self, name: str, default: str | None) -> str | None:
        if self.is_gone:
            raise ConnectionRefusedError(111, "Connection refused")
        return self.values.get(name, default)

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def unset(self, name: str) -> None:
        del self.values[name]

    def isModifiable(self, _name: str) -> bool:  # noqa: N802 - Spark's name
        return True


class Session:
    version = "4.1.0"

    def __init__(self) -> None:
        self.conf = Conf()


def test_it_ends_with_the_error_of_the_lost_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session: Any = Session()
    url = f"sqlite:///{tmp_path / 'catalog.db'}"

    class Fenced(PlayedQuery):
        def wait(self, timeout_s: float) -> bool:
            catalog = Catalog(url)
            lease = catalog.leases.current(STREAM)
            assert lease is not None
            successor = replace(HOLDER, run_id="the successor", host="another-machine")
            catalog.leases.acquire(STREAM, successor, 60_000, take_over=lease)
            catalog.close()
            session.conf.is_gone = True
            raise ConnectionRefusedError(111, "Connection refused")

        def stop(self, *, within_ms: int | None = None) -> None:
            raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(driver, "start_stream_query", lambda *_: Fenced())
    monkeypatch.setattr(program, "jvm_pid", lambda _spark: None)
    monkeypatch.setattr(program, "application_of", lambda _spark: None)
    monkeypatch.setattr(driver.QueryToStart, "take", lambda _self: None)
    monkeypatch.setattr(starting, "named_output", lambda _writer: None)
    monkeypatch.setattr(starting, "plan_of_writer", lambda _writer: None)

    with pytest.raises(LeaseLostError, match=r"is held by run the successor .* on another-machine"):
        driver.run_stream(
            STREAM,
            lambda _spark: None,  # type: ignore[arg-type, return-value]
            catalog=url,
            storage=f"file://{tmp_path}/snapshots",
            live_root=str(tmp_path / "live"),
            state_backend=EmbeddedRocksDBStateBackend(),
            spark=session,
        )


def test_settings_are_restored_after_an_error() -> None:
    session: Any = Session()
    session.conf.values["spark.sql.a"] = "1"

    def fail() -> None:
        with settings_for_a_while(session, {"spark.sql.a": "2", "spark.sql.b": "3"}, "A test"):
            raise ValueError("no such table")

    with pytest.raises(ValueError, match="no such table"):
        fail()

    assert session.conf.values == {"spark.sql.a": "1"}
