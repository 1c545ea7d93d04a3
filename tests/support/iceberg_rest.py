"""A REST catalog of Iceberg: the requirements of each commit are checked by PyIceberg, not by Iceberg's Java code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, NoSuchNamespaceError, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableRequest, Table

_NAMESPACE = re.compile(r"/v1/namespaces/(?P<namespace>[^/]+)")
_TABLES = re.compile(r"/v1/namespaces/(?P<namespace>[^/]+)/tables")
_TABLE = re.compile(r"/v1/namespaces/(?P<namespace>[^/]+)/tables/(?P<table>[^/]+)")
_METRICS = re.compile(r".*/metrics")


@contextmanager
def iceberg_rest_catalog(folder: Path) -> Iterator[str]:
    """A catalog with its tables in a folder; gives its URL."""
    folder.mkdir(parents=True, exist_ok=True)
    catalog = SqlCatalog("rest", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/tables")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(catalog))
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def _handler(catalog: SqlCatalog) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None: ...

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                with one_at_a_time:
                    status, told = _answer_to(catalog, self.command, self.path.partition("?")[0], body)
            except (NoSuchTableError, NoSuchNamespaceError) as error:
                status, told = 404, _error(error, 404, type(error).__name__.replace("Error", "Exception"))
            except CommitFailedException as error:
                status, told = 409, _error(error, 409, "CommitFailedException")
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def _answer_to(catalog: SqlCatalog, method: str, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    if path == "/v1/config":
        return 200, {"defaults": {}, "overrides": {}}
    if path == "/v1/namespaces":
        namespace = json.loads(body)["namespace"]
        catalog.create_namespace_if_not_exists(tuple(namespace))
        return 200, {"namespace": namespace, "properties": {}}
    if _METRICS.fullmatch(path):
        return 200, {}
    if match := _TABLE.fullmatch(path):
        table = catalog.load_table((match["namespace"], match["table"]))
        if method == "GET":
            return 200, _loaded(table)
        identifier = {"namespace": [match["namespace"]], "name": match["table"]}
        asked = CommitTableRequest.model_validate(json.loads(body) | {"identifier": identifier})
        committed = catalog.commit_table(table, asked.requirements, asked.updates)
        return 200, json.loads(committed.model_dump_json(by_alias=True, exclude_none=True))
    if match := _TABLES.fullmatch(path):
        made = json.loads(body)
        name, schema = (match["namespace"], made["name"]), Schema.model_validate(made["schema"])
        return 200, _loaded(catalog.create_table(name, schema, properties=made.get("properties") or {}))
    if match := _NAMESPACE.fullmatch(path):
        return 200, {
            "namespace": [match["namespace"]],
            "properties": dict(catalog.load_namespace_properties(match["namespace"])),
        }
    return 404, _error(LookupError(f"{method} {path}"), 404, "NoSuchEndpoint")


def _loaded(table: Table) -> dict[str, Any]:
    return {
        "metadata-location": table.metadata_location,
        "metadata": json.loads(table.metadata.model_dump_json(by_alias=True, exclude_none=True)),
        "config": {},
    }


def _error(error: Exception, code: int, kind: str) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": kind, "code": code}}
