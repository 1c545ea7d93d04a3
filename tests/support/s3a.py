"""Hadoop's S3A and the modules of the AWS SDK that it needs, without the SDK's bundle of half a gigabyte."""

from __future__ import annotations

from pathlib import Path

import pyspark

from tests.support.maven import from_maven

_AWS_SDK = "2.35.4"
# S3A reads through the first, copies through the second, and looks for credentials in the third.
_MODULES = [
    ("software.amazon.s3.analyticsaccelerator", "analyticsaccelerator-s3", "1.3.1"),
    ("software.amazon.awssdk", "s3-transfer-manager", _AWS_SDK),
    ("software.amazon.awssdk", "sts", _AWS_SDK),
]
# Spark brings these itself, in versions of its own.
_OF_SPARK = (
    "netty-buffer",
    "netty-codec",
    "netty-common",
    "netty-handler",
    "netty-resolver",
    "netty-transport",
    "slf4j",
)


def s3a_jars(folder: Path) -> list[Path]:
    """Fetch the jars from Maven Central into a folder, in the version of Spark's own Hadoop."""
    (hadoop,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    version = hadoop.stem.removeprefix("hadoop-client-api-")
    from_maven(folder, ("org.apache.hadoop", "hadoop-aws", version), "master")
    for module in _MODULES:
        from_maven(folder, module, "default")
    return [jar for jar in sorted(folder.glob("*.jar")) if not jar.name.startswith(_OF_SPARK)]
