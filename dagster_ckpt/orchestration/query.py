"""The query of a streaming asset outside of a run, for what only describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import dagster as dg

from dagster_ckpt.errors import OptionError
from dagster_ckpt.orchestration.stream import StreamingAsset
from dagster_ckpt.orchestration.translator import SPARK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter


@dataclass(frozen=True)
class _WithSession:
    """In place of the asset's Spark resource."""

    spark_session: SparkSession


def query_of(
    asset: StreamingAsset, resources: Mapping[str, Any]
) -> tuple[SparkSession, Callable[[SparkSession], DataStreamWriter]]:
    """The session of an asset's Spark resource, and its query as a function of any session.

    Raises:
        OptionError: Its query runs in another program, or a resource is missing.
    """
    describe, of_spark = asset.describe, asset.translator.get_resource_key(SPARK)
    if describe is None:
        raise OptionError(
            f"The query of stream {asset.stream_id!r} is in the program that its runs launch. Name the function there."
        )
    # Those of the asset include its IO manager, which no stream uses.
    keys = {*asset.asset.op.required_resource_keys, of_spark}
    missing = sorted(keys - resources.keys())
    if missing:
        raise OptionError(
            f"The query of stream {asset.stream_id!r} needs the resources {', '.join(missing)}, which the definitions "
            "do not have. Name the module of the definitions."
        )
    with dg.build_resources({key: resources[key] for key in keys}) as built:
        given = {key: getattr(built, key) for key in keys}

    def with_session(spark: SparkSession) -> DataStreamWriter:
        return describe(dg.build_asset_context(), SimpleNamespace(**{**given, of_spark: _WithSession(spark)}))

    return given[of_spark].spark_session, with_session
