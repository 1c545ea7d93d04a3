"""A real HDFS, and emulators of Google Cloud Storage and Azure.

HDFS comes from Maven Central, Azurite from npm, and fake-gcs-server is built by Go; Node.js and Go are from PyPI.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import requests

from tests.support.server import DEADLINE_S, Server, free_port

FAKE_GCS = "github.com/fsouza/fake-gcs-server@v1.52.2"
AZURITE = "azurite@3.35.0"
# What was downloaded stays in this environment.
FETCHED = Path(sys.prefix, "stores")
FETCH_DEADLINE_S = 500.0
# The account of every Azurite, from its documentation.
AZURE_ACCOUNT = (
    "DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey="
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==;"
)


@dataclass(frozen=True)
class Bucket:
    """An empty bucket, container or folder, and the options that fsspec needs for it."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)


NewBucket = Callable[[str], Bucket]


@contextmanager
def hdfs() -> Iterator[NewBucket]:
    """A name node and a data node, through WebHDFS."""
    # Imported here: collecting tests needs no Spark.
    import pyspark

    from tests.support.maven import from_maven, java

    (hadoop,) = (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")
    version = hadoop.stem.removeprefix("hadoop-client-api-")
    # Not the single jar hadoop-client-minicluster: its WebHDFS answers 404 to everything.
    jars = FETCHED / f"hdfs-{version}"
    if not (jars / f"hadoop-hdfs-{version}.jar").exists():
        for module in ("hadoop-common", "hadoop-hdfs-client", "hadoop-hdfs"):
            from_maven(jars, ("org.apache.hadoop", module, version), "default")
    rpc, http = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "fs.defaultFS": f"hdfs://127.0.0.1:{rpc}",
            "dfs.namenode.http-address": f"127.0.0.1:{http}",
            "dfs.replication": "1",
            "hadoop.tmp.dir": folder,
            **{f"dfs.datanode.{each}address": "127.0.0.1:0" for each in ("", "http.", "ipc.")},
        }
        properties = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>" for name, value in settings.items()
        )
        for site in ("core", "hdfs"):
            Path(folder, f"{site}-site.xml").write_text(f"<configuration>{properties}</configuration>")
        # Only Hadoop's distribution contains their web pages.
        for pages in ("hdfs", "datanode", "static"):
            Path(folder, "webapps", pages).mkdir(parents=True)
        # Its JAXB defines classes.
        command = [java(), "--add-opens", "java.base/java.lang=ALL-UNNAMED", "-cp", f"{folder}{os.pathsep}{jars}/*"]
        name_node = [*command, "org.apache.hadoop.hdfs.server.namenode.NameNode"]
        data_node = [*command, "org.apache.hadoop.hdfs.server.datanode.DataNode"]
        subprocess.run([*name_node, "-format"], check=True, capture_output=True, timeout=DEADLINE_S)
        url = f"http://127.0.0.1:{http}"
        with (
            _running(Server("name-node", name_node, Path(folder), partial(_answers, url))),
            _running(Server("data-node", data_node, Path(folder), partial(_has_data_node, url))),
        ):
            yield lambda name: Bucket(f"webhdfs://127.0.0.1:{http}/{name}")


@contextmanager
def google_cloud_storage() -> Iterator[NewBucket]:
    """fake-gcs-server."""
    program = FETCHED / "fake-gcs-server"
    if not program.exists():
        _fetch([_tool("go"), "install", FAKE_GCS], GOBIN=str(FETCHED))
    # gcsfs asks what kind of bucket it is over gRPC, which the emulator lacks, and waits a minute for the answer.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]
    command += ["-backend", "memory"]
    options = {"token": "anon", "endpoint_url": url, "project": "test"}
    with (
        tempfile.TemporaryDirectory() as folder,
        _running(Server("fake-gcs-server", command, Path(folder), partial(_answers, url))),
    ):
        yield partial(_made, "gs", options)


@contextmanager
def azure() -> Iterator[NewBucket]:
    """Azurite."""
    program = FETCHED / "node_modules/azurite/dist/src/blob/main.js"
    if not program.exists():
        _fetch([_tool("npm"), "install", "--no-save", "--no-audit", "--prefix", str(FETCHED), AZURITE])
    port = free_port()
    url = f"http://127.0.0.1:{port}/devstoreaccount1"
    with tempfile.TemporaryDirectory() as folder:
        command = [_tool("node"), str(program), "--blobPort", str(port), "--location", folder, "--skipApiVersionCheck"]
        with _running(Server("azurite", command, Path(folder), partial(_answers, url))):
            yield partial(_made, "abfs", {"connection_string": f"{AZURE_ACCOUNT}BlobEndpoint={url};"})


SERVERS = {"webhdfs": hdfs, "gs": google_cloud_storage, "abfs": azure}
# Parameters of tests.
FAR = [pytest.param(scheme, marks=pytest.mark.stores) for scheme in SERVERS]
FAR_OBJECTS = FAR[1:]


class FarStores(ExitStack):
    """Starts each server when a test first asks for a bucket there."""

    def __init__(self) -> None:
        super().__init__()
        self._started: dict[str, NewBucket] = {}

    def new_bucket(self, scheme: str) -> Bucket:
        """In the store of a URL's scheme."""
        if scheme not in self._started:
            self._started[scheme] = self.enter_context(SERVERS[scheme]())
        return self._started[scheme](uuid.uuid4().hex)


def _made(scheme: str, options: dict[str, Any], name: str) -> Bucket:
    fsspec.filesystem(scheme, **options).mkdir(name)
    return Bucket(f"{scheme}://{name}", options)


@contextmanager
def _running(server: Server) -> Iterator[None]:
    try:
        server.start()
        yield
    finally:
        server.stop()


def _has_data_node(url: str) -> bool:
    with suppress(requests.ConnectionError):
        state = requests.get(f"{url}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState", timeout=10).json()
        return any(bean.get("NumLiveDataNodes") for bean in state["beans"])
    return False


def _answers(url: str) -> bool:
    with suppress(requests.ConnectionError):
        requests.get(url, timeout=10)
        return True
    return False


def _fetch(command: list[str], **environment: str) -> None:
    both = {**os.environ, **environment}
    done = subprocess.run(command, env=both, capture_output=True, text=True, timeout=FETCH_DEADLINE_S, check=False)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} failed, and these tests need its server:\n{done.stderr[-2000:]}")


def _tool(name: str) -> str:
    """`make test-stores` installs it in this environment."""
    return str(Path(sys.prefix, "bin", name))
