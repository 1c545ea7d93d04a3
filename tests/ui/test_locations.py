"""The page opens a location only for somebody who is signed in, and only in the storage of the stream."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import requests

from dagster_ckpt.client import Client
from dagster_ckpt.ui.app import is_inside
from tests.support.golden_stream import STREAM, GoldenStream

FORM = f"/streams/{STREAM}/-/restart"
ROOTS = ["file:///data/ckpt/orders", "s3://bucket/savepoints"]


class Internal:
    """A server of the network behind the page, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"an internal secret")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def internal() -> Iterator[Internal]:
    internal = Internal()
    yield internal
    internal.close()


@pytest.mark.thorough(but="*-signed in")
@pytest.mark.parametrize("who", ["anybody", "signed in"])
@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/latest/meta-data",
        " http://127.0.0.1:{port}/x",
        "webhdfs://127.0.0.1:{port}/x",
        "simplecache::http://127.0.0.1:{port}/x",
        "filecache::file://{root}/secret",
        "file://{root}/secret",
        "{root}/secret",
        "local://{root}/secret",
        "file://{root}/savepoints/../secret",
        "file://{root}/savepoints/%2e%2e/secret",
        "file://{root}/savepoints/%252e%252e/secret",
        "file://anna:word@{root}/savepoints/x",
        "file://{root}/savepoints/link",
    ],
)
def test_no_other_place_is_opened(
    acting: str,
    signed_in: requests.Session,
    golden: GoldenStream,
    internal: Internal,
    location: str,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secret = golden.root / "secret"
    secret.mkdir()
    (secret / "_metadata").write_text("a local secret")
    (golden.root / "savepoints").mkdir(exist_ok=True)
    (golden.root / "savepoints/link").symlink_to(secret)
    named = location.format(port=internal.port, root=golden.root)
    opened: list[str] = []
    store = type(golden.stream.store)
    monkeypatch.setattr(store, "manifest", lambda _self, place: opened.append(place))
    session = signed_in if who == "signed in" else requests.Session()

    shown = session.get(acting + FORM, params={"start_from": named}, timeout=30)
    posted = session.post(f"{acting}/streams/{STREAM}/-/actions/restart", data={"start_from": named}, timeout=30)

    assert 'class="problem"' in shown.text
    assert "secret</" not in shown.text
    assert posted.status_code == (400 if who == "signed in" else 403)
    assert (opened, internal.asked) == ([], [])


def test_a_snapshot_of_the_storage_is_opened_for_somebody_who_is_signed_in(
    acting: str, signed_in: requests.Session, golden: GoldenStream, client: Client
) -> None:
    [snapshot] = client.list_snapshots(STREAM)

    refused = requests.get(acting + FORM, params={"start_from": snapshot.location}, timeout=30).text
    assert "A location is opened only in a browser that is signed in" in refused
    # The advice of that refusal.
    assert "What this start would do" in requests.get(acting + FORM, params={"start_from": "chk-1"}, timeout=30).text
    assert "What this start would do" in signed_in.get(acting + FORM, params={"start_from": snapshot.location}).text


@pytest.mark.parametrize(
    "location", ["/data/ckpt/orders/chk-7", "file:///data/ckpt/orders/chk-7", "s3://bucket/savepoints/a b"]
)
def test_what_lies_inside(location: str) -> None:
    assert is_inside(location, ROOTS)


@pytest.mark.parametrize(
    "location",
    [
        "/data/ckpt/orders",
        "/data/ckpt/orders-2/chk-7",
        "file:///data/ckpt/orders/../payments/chk-7",
        "s3://bucket/savepoints2/a",
        "s3://bucket@evil.example/savepoints/a",
        "s3://key:word@bucket/savepoints/a",
        "s3://other/savepoints/a",
        "s3a://bucket/../savepoints/a",
        "zip://a::s3://bucket/savepoints/a",
        "s3://bucket/savepoints/%2E%2E/a",
        "s3://bucket/savepoints/..\\a",
        "s3://bucket/savepoints/a?versionId=1",
        "s3://bucket/savepoints/a\x00b",
        "http://bucket/savepoints/a",
        "savepoints/a",
        "",
    ],
)
def test_what_lies_outside(location: str) -> None:
    assert not is_inside(location, ROOTS)


def test_a_symbolic_link_leads_out(tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    (storage / "out").symlink_to(tmp_path)
    assert not is_inside(f"{storage}/out/chk-1", [f"file://{storage}"])
    assert is_inside(f"{storage}/chk-1", [f"file://{storage}"])
