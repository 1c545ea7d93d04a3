"""`assert_compatible`: fail a test whose code cannot continue from a stream's state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_ckpt.errors import OptionError
from dagster_ckpt.recovery.compatibility_report import Compatibility, CompatibilityReport

if TYPE_CHECKING:
    import dagster as dg
    from pyspark.sql.streaming.readwriter import DataStreamWriter

    from dagster_ckpt.client import Client
    from dagster_ckpt.state.migration import StateMigration
    from dagster_ckpt.stream.start_from import StartFrom


def assert_compatible(
    stream: str,
    definitions: dg.Definitions | None = None,
    *,
    client: Client | None = None,
    query: Callable[[], DataStreamWriter] | None = None,
    start_from: str | StartFrom = "latest",
    allow_migration: bool = False,
    state_migrations: Sequence[StateMigration] | None = None,
) -> CompatibilityReport:
    """Assert that the code of a stream can continue from its state. Starts no query.

    Args:
        definitions: Those of the code location, with the resources of the deployment to compare with.
        client: Instead of definitions, for a stream of a program of your own.
        query: With a client: describes the query, without starting it.
        start_from: The start that the release will request, as in `Client.restart`.
        allow_migration: Also accept code that needs options of the start, such as `map_sources`.

    Raises:
        AssertionError: The code cannot continue; the message is the report.

    Example:
        >>> def test_orders_can_be_released():
        ...     assert_compatible("orders", defs)
    """
    report = _report(stream, definitions, client, query, start_from=start_from, state_migrations=state_migrations)
    allowed = {Compatibility.SAME, Compatibility.COMPATIBLE, *([Compatibility.MIGRATABLE] if allow_migration else [])}
    if report.verdict not in allowed:
        raise AssertionError("\n".join(report.messages()))
    return report


def _report(
    stream: str,
    definitions: dg.Definitions | None,
    client: Client | None,
    query: Callable[[], DataStreamWriter] | None,
    *,
    start_from: str | StartFrom,
    state_migrations: Sequence[StateMigration] | None,
) -> CompatibilityReport:
    if definitions is not None and client is None and query is None:
        # Dagster is needed only for definitions.
        from dagster_ckpt.orchestration.query import check_definitions  # noqa: PLC0415

        return check_definitions(stream, definitions, start_from=start_from)
    if definitions is None and client is not None and query is not None:
        return client.check(stream, query, start_from=start_from, state_migrations=state_migrations)
    raise OptionError("assert_compatible takes either definitions, or a client and a query.")
