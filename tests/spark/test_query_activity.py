"""What a query is doing, as its heartbeats record it."""

from types import SimpleNamespace
from typing import Any

from dagster_ckpt.spark.query.query import activity_of


def test_the_status_of_a_query_that_failed_has_no_secret() -> None:
    """The message is that of the exception, and a heartbeat between the failure and the end stores it."""
    message = "Terminated with exception: cannot connect to jdbc:postgresql://u:S3CR3T@h/db, password=S3CR3T"
    query: Any = SimpleNamespace(status={"message": message, "isTriggerActive": False})
    assert activity_of(query).doing.startswith("Terminated with exception: cannot connect to jdbc")
    assert "S3CR3T" not in activity_of(query).doing
