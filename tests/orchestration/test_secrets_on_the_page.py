"""What the web page is given of a code location has no secret, and a run has its value all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.remote_representation.external_data import RepositorySnap
from dagster._serdes import serialize_value
from dagster.components.core.component_tree import ComponentTreeException
from dagster.components.testing import create_defs_folder_sandbox
from dagster_pyspark import PySparkResource

from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.component import StreamsComponent
from dagster_ckpt.orchestration.definitions import stream_definitions
from dagster_ckpt.orchestration.resources import (
    CheckpointCatalogResource,
    CheckpointStorageResource,
    SparkSessionResource,
    StateBackendResource,
)
from dagster_ckpt.orchestration.streaming_asset import streaming_asset
from dagster_ckpt.orchestration.yaml_fields import with_values
from dagster_ckpt.orchestration.yaml_stream import Sink
from tests.support.planted_secrets import Planted

PLANTED = Planted()
NAMES = ("CATALOG_URL", "S3_SECRET", "S3A_SECRET", "REDIS_PASSWORD", "FACTORY_PASSWORD", "KAFKA_JAAS", "JDBC_PASSWORD")


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, PLANTED.plant(name))


def what_the_page_is_given(definitions: dg.Definitions) -> str:
    text = serialize_value(RepositorySnap.from_def(definitions.get_repository_def()))
    assert "checkpoint_catalog" in text
    return text


def values(definitions: dg.Definitions) -> dict[str, Any]:
    """The resources as a run gets them."""
    return {
        name: resource.process_config_and_initialize()
        for name, resource in (definitions.resources or {}).items()
        if isinstance(resource, dg.ConfigurableResource)
    }


def assert_values_are_there(definitions: dg.Definitions) -> None:
    found = values(definitions)
    assert found["checkpoint_catalog"].url in PLANTED.secrets
    assert found["checkpoint_storage"].storage_options["secret"] in PLANTED.secrets
    assert found["state_backend"].settings["spark.sql.streaming.stateStore.redis.password"] in PLANTED.secrets
    assert found["pyspark"].spark_config["spark.hadoop.fs.s3a.secret.key"] in PLANTED.secrets


def in_yaml(variable: str) -> str:
    return "{{ env_var('" + variable + "') }}"


RESOURCES = {
    "spark_config": {"spark.hadoop.fs.s3a.secret.key": in_yaml("S3A_SECRET"), "spark.sql.shuffle.partitions": 2},
    "checkpoint_storage": {"path": "s3://bucket/snapshots", "storage_options": {"secret": in_yaml("S3_SECRET")}},
    "state_backend": {
        "live_directory": "s3a://bucket/live",
        "kind": "CUSTOM",
        "provider_class": "a.B",
        "settings": {"spark.sql.streaming.stateStore.redis.password": in_yaml("REDIS_PASSWORD")},
    },
    "checkpoint_catalog": {"url": in_yaml("CATALOG_URL")},
}
STREAM = {
    "name": "orders",
    "sources": [
        {"name": "raw", "format": "kafka", "options": {"kafka.sasl.jaas.config": in_yaml("KAFKA_JAAS"), "x": True}}
    ],
    "sink": {"format": "jdbc", "options": {"password": in_yaml("JDBC_PASSWORD")}},
}


def loaded(attributes: dict[str, Any]) -> dg.Definitions:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=StreamsComponent,
            defs_path="streams",
            defs_yaml_contents={"type": "dagster_ckpt.StreamsComponent", "attributes": attributes},
        )
        assert yaml.safe_load((Path(path) / "defs.yaml").read_text())["attributes"] == attributes
        with sandbox.load_component_and_build_defs(defs_path=path) as (_, definitions):
            return definitions


def test_env_var_in_yaml_is_a_name_on_the_page_and_the_value_in_a_run() -> None:
    definitions = loaded({"streams": [STREAM], "resources": RESOURCES})

    given = what_the_page_is_given(definitions)

    PLANTED.assert_in_none({"page": given})
    assert "CATALOG_URL" in given
    assert_values_are_there(definitions)


def test_env_var_in_python_is_a_name_on_the_page_and_the_value_in_a_run() -> None:
    @streaming_asset()
    def orders(context: Any, pyspark: PySparkResource) -> Any: ...

    resources = {
        "pyspark": SparkSessionResource(spark_config={"spark.hadoop.fs.s3a.secret.key": dg.EnvVar("S3A_SECRET")}),
        "checkpoint_storage": CheckpointStorageResource(
            path="s3://bucket/snapshots", storage_options={"secret": dg.EnvVar("S3_SECRET")}
        ),
        "state_backend": StateBackendResource(
            live_directory="/live",
            settings={"spark.sql.streaming.stateStore.redis.password": dg.EnvVar("REDIS_PASSWORD")},
        ),
        "checkpoint_catalog": CheckpointCatalogResource(url=dg.EnvVar("CATALOG_URL")),
    }
    definitions = dg.Definitions.merge(stream_definitions(orders), dg.Definitions(resources=resources))

    PLANTED.assert_in_none({"page": what_the_page_is_given(definitions)})
    assert_values_are_there(definitions)


def test_options_of_sources_and_sinks_have_their_value_where_the_query_is_described() -> None:
    sink = Sink(format="jdbc", options={"password": dg.EnvVar("JDBC_PASSWORD"), "truncate": True})

    PLANTED.assert_in_none({"sink": f"{sink.format} {sink.partition_by}"})
    assert with_values(sink.options)["password"] in PLANTED.secrets
    assert with_values(sink.options)["truncate"] == "true"


def test_a_variable_that_is_not_set_is_named_with_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JDBC_PASSWORD")
    with pytest.raises(OptionError, match="Option password is read from the environment variable JDBC_PASSWORD"):
        with_values({"password": dg.EnvVar("JDBC_PASSWORD")})


def test_where_a_value_is_needed_while_definitions_are_loaded_env_var_is_refused() -> None:
    stream = {**STREAM, "sink": {"format": "parquet", "path": in_yaml("S3_SECRET")}}
    with pytest.raises(ComponentTreeException) as refused:
        loaded({"streams": [stream], "resources": RESOURCES})
    assert "path cannot be an env_var" in str(refused.value.__cause__)
