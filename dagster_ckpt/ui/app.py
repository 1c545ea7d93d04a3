"""The ASGI application of the checkpoint page, and the metrics of all streams for Prometheus."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from jinja2 import Environment, PackageLoader, StrictUndefined
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from dagster_ckpt.client import (
    Client,
    HistoryCursor,
    RewindPreview,
    SnapshotStatus,
    StartFrom,
    describe_snapshot,
    is_location,
    lies_in,
    start_options,
)
from dagster_ckpt.errors import CatalogError, CkptError, OptionError, SnapshotNotFoundError, StreamNotFoundError
from dagster_ckpt.ui import page_data
from dagster_ckpt.values.durations import headline, rounded_duration, size, utc_time
from dagster_ckpt.values.metrics import METRICS, Sample
from dagster_ckpt.values.modes import SnapshotKind
from dagster_ckpt.values.redaction import without_secrets
from dagster_ckpt.values.storage_path import StoragePath, location_url

# Past actions on the page; the catalog has all.
_REMEMBERED = 50
_AT_ONCE = 4
_CLOSING_S = 5.0
Report = Callable[[str], None]


class ActionStatus(StrEnum):
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"


@dataclass
class Action:
    number: int
    stream_id: str
    title: str
    started_at_ms: int
    status: ActionStatus = ActionStatus.RUNNING
    messages: list[str] = field(default_factory=list)


class ActionLog:
    """Runs actions in threads: a savepoint takes longer than a browser waits."""

    def __init__(self) -> None:
        self._slots = threading.Semaphore(_AT_ONCE)
        self._is_closing = False
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._actions: deque[Action] = deque(maxlen=_REMEMBERED)

    def start(self, stream_id: str, title: str, now_ms: int, work: Callable[[Report], list[str]]) -> Action:
        """Start an action; `work` reports its steps, and returns its result as messages."""
        action = Action(next(self._numbers), stream_id, title, now_ms)
        with self._lock:
            self._actions.appendleft(action)
        threading.Thread(target=self._run, args=(action, work), name="checkpoint-page", daemon=True).start()
        return action

    def of(self, stream_id: str) -> list[Action]:
        with self._lock:
            return [action for action in self._actions if action.stream_id == stream_id]

    def close(self, withdraw: Callable[[], None]) -> None:
        """End what is running, and return within seconds; nothing new is started.

        `withdraw` withdraws the actions' requests, and is called until all have ended: an action may make another.
        """
        self._is_closing = True
        until = time.monotonic() + _CLOSING_S
        while self._is_running() and time.monotonic() < until:
            withdraw()
            time.sleep(0.1)

    def _is_running(self) -> bool:
        with self._lock:
            return any(action.status is ActionStatus.RUNNING for action in self._actions)

    def _run(self, action: Action, work: Callable[[Report], list[str]]) -> None:
        try:
            with self._slots:
                if self._is_closing:
                    action.status = ActionStatus.FAILED
                    return
                action.messages += work(action.messages.append)
            action.status = ActionStatus.DONE
        except CkptError as error:
            action.messages.append(without_secrets(str(error)))
            action.status = ActionStatus.FAILED
        except BaseException as error:
            # The thread ends here; the page shows why.
            action.messages.append(without_secrets(f"{type(error).__name__}: {error}"))
            action.status = ActionStatus.FAILED
            raise


def exposition(samples: Iterable[Sample], accept: str) -> tuple[bytes, str]:
    families = {
        metric: (CounterMetricFamily if metric.is_counter else GaugeMetricFamily)(
            metric.family, metric.description, labels=metric.labels
        )
        for metric in METRICS
    }
    for sample in samples:
        families[sample.metric].add_metric(list(sample.labels.values()), sample.value)
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families.values()))
    return encode(registry), content_type


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


_COOKIE = "dagster_ckpt_actions"
# Nothing from other sites, no inline script, no frames.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # no-referrer would hide the origin of our own forms.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LARGEST_FORM = 10_000
_TABS: dict[str, Callable[[Client, str], Any]] = {
    "overview": page_data.overview,
    "timeline": page_data.timeline,
    "summary": page_data.summary,
    "failures": page_data.failures,
    "configuration": page_data.configuration,
}


class CheckpointPage:
    def __init__(self, client: Client, *, token: str | None, allowed_hosts: list[str]) -> None:
        # A unique name, so that the page withdraws only its own requests.
        self._client = client.operating_as(f"{client.origin}, checkpoint page {secrets.token_hex(4)}")
        self._token = token
        self._hosts = frozenset(host.lower() for host in allowed_hosts)
        self._log = ActionLog()
        self._templates = Environment(
            loader=PackageLoader("dagster_ckpt.ui"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        filters: dict[str, Callable[..., str]] = {
            "size": lambda value: "-" if value is None else size(value),
            "duration": lambda value: "-" if value is None else rounded_duration(value),
            "moment": lambda value: "-" if not value else utc_time(value),
            # For columns whose heading says UTC.
            "clock": lambda value: "-" if not value else utc_time(value).removesuffix(" UTC"),
            "number": lambda value: "-" if value is None else page_data.number(value),
            "redacted": lambda value: "" if value is None else without_secrets(str(value)),
            "snapshot_name": describe_snapshot,
            "headline": headline,
        }
        self._templates.filters |= filters
        stream = "/streams/{stream:path}"
        routes = [
            Route("/", self._page(self._streams)),
            Route("/graph", self._page(self._graph)),
            Route("/sign-in", self._sign_in),
            Route("/metrics", self._metrics),
            Route(f"{stream}/-/history", self._page(self._history)),
            *(
                Route(f"{stream}/-/{name}", self._page(partial(self._tab, name)))
                for name in _TABS
                if name != "overview"
            ),
            Route(f"{stream}/-/snapshots/{{snapshot}}", self._page(self._snapshot)),
            Route(f"{stream}/-/restart", self._page(self._restart_form)),
            Route(f"{stream}/-/actions/{{verb}}", self._action, methods=["POST"]),
            Route(stream, self._page(partial(self._tab, "overview"))),
            Mount("/static", StaticFiles(packages=[("dagster_ckpt.ui", "static")])),
        ]
        middleware = [
            Middleware(BaseHTTPMiddleware, dispatch=_with_headers),
            Middleware(BaseHTTPMiddleware, dispatch=self._only_at_allowed_hosts),
        ]
        self.app = Starlette(routes=routes, middleware=middleware, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(self._log.close, self._withdraw_requests)

    def _withdraw_requests(self) -> None:
        # An unavailable catalog must not keep the page from ending.
        with suppress(CkptError):
            for request in self._client.list_requests():
                if request.origin == self._client.origin:
                    self._client.withdraw_request(request)

    async def _only_at_allowed_hosts(
        self, request: Request, call: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
        if host in self._hosts:
            return await call(request)
        return PlainTextResponse(
            "This page does not answer to the host name in your address, so that no web site can reach it under a name "
            "of its own. Open the address that `dagster-ckpt ui` printed, or add the name with --allowed-host.",
            400,
        )

    def _streams(self, request: Request) -> Response:
        return self._render(request, "streams.html", streams=self._client.list_streams())

    def _graph(self, request: Request) -> Response:
        stream = request.query_params.get("stream") or None
        return self._render(request, "graph.html", page=page_data.graph(self._client, stream), of_stream=stream)

    def _tab(self, name: str, request: Request) -> Response:
        page = _TABS[name](self._client, _stream(request))
        return self._render(request, f"{name}.html", page=page, **self._of_stream(page.stream, name))

    def _history(self, request: Request) -> Response:
        asked = request.query_params
        kind = SnapshotKind(asked["kind"]) if asked.get("kind") in list(SnapshotKind) else None
        status = SnapshotStatus(asked["status"]) if asked.get("status") in _statuses() else None
        try:
            older_than = HistoryCursor.parse(asked["before"]) if asked.get("before") else None
        except ValueError:
            older_than = None
        described, page = page_data.history(
            self._client, _stream(request), kind=kind, status=status, older_than=older_than
        )
        return self._render(
            request,
            "history.html",
            page=page,
            kind=kind or "",
            status_filter=status.value if status else "",
            statuses=_statuses(),
            is_first=older_than is None,
            **self._of_stream(described, "history"),
        )

    def _snapshot(self, request: Request) -> Response:
        stream = _stream(request)
        page = page_data.snapshot(self._client, stream, request.path_params["snapshot"])
        described = self._client.describe_stream(stream, limit=1)
        return self._render(request, "snapshot.html", page=page, **self._of_stream(described, "history"))

    def _restart_form(self, request: Request) -> Response:
        stream = self._client.describe_stream(_stream(request), limit=page_data.ROWS)
        given = _given(request.query_params)
        start: StartFrom | None = None
        preview: RewindPreview | None = None
        problem = None
        if given.get("start_from"):
            try:
                start = StartFrom.from_record(given)
                refuse_location(self._client, stream.stream_id, start, may_act=self._may_act(request))
                preview = self._client.preview_rewind(stream.stream_id, start_from=start)
            except CkptError as error:
                problem = without_secrets(str(error))
        return self._render(
            request,
            "restart.html",
            given=given,
            start=start,
            preview=preview,
            problem=problem,
            options=start_options(),
            names=page_data.names(stream.snapshots),
            **self._of_stream(stream, "restart"),
        )

    async def _metrics(self, request: Request) -> Response:
        try:
            samples = await run_in_threadpool(self._client.metrics)
        except CkptError as error:
            return PlainTextResponse(without_secrets(str(error)), 500)
        text, content_type = await run_in_threadpool(exposition, samples, request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def _sign_in(self, request: Request) -> Response:
        given = request.query_params.get("token", "")
        if self._token is None or not hmac.compare_digest(given.encode(), self._token.encode()):
            return PlainTextResponse("This token is not valid. Open the address that `dagster-ckpt ui` printed.", 403)
        # 303: the token leaves the address bar and the history.
        response = RedirectResponse("/", 303)
        response.set_cookie(
            _COOKIE, self._signature(), httponly=True, samesite="strict", secure=request.url.scheme == "https"
        )
        return response

    async def _action(self, request: Request) -> Response:
        if not self._may_act(request):
            return PlainTextResponse(
                "Actions are not allowed here. Start the page with --actions and open the address that it prints.", 403
            )
        if not _is_same_origin(request):
            return PlainTextResponse("This request comes from another site, so it is refused.", 403)
        form = await _form(request)
        if form is None:
            return PlainTextResponse(f"This form has more than {_LARGEST_FORM} bytes, so it is refused.", 413)
        stream = _stream(request)
        verb = request.path_params["verb"]
        try:
            started = await run_in_threadpool(self._start_action, stream, verb, form)
        except CatalogError as error:
            return self._error(str(error), 500)
        return started or RedirectResponse(f"/streams/{stream}#actions", 303)

    def _start_action(self, stream: str, verb: str, form: Mapping[str, str]) -> Response | None:
        try:
            stream_id = self._client.describe_stream(stream, limit=1).stream_id
        except StreamNotFoundError as error:
            return PlainTextResponse(str(error), 404)
        label = form.get("label") or None
        start = StartFrom()
        if verb == "restart":
            if not form.get("start_from"):
                return PlainTextResponse("This form does not say where to start from, so nothing was started.", 400)
            try:
                start = StartFrom.from_record(_given(form))
                refuse_location(self._client, stream_id, start, may_act=True)
            except CkptError as error:
                return PlainTextResponse(f"Nothing was started. {without_secrets(str(error))}", 400)
        actions: dict[str, tuple[str, Callable[[Report], list[str]]]] = {
            "savepoint": ("Savepoint", lambda _: [_taken(self._client.trigger_savepoint(stream_id, label=label))]),
            "checkpoint": ("Checkpoint", lambda _: [_taken(self._client.trigger_checkpoint(stream_id))]),
            "stop": ("Stop with savepoint", lambda _: self._client.stop(stream_id, label=label).messages()),
            "restart": (
                f"Restart from {start}",
                lambda report: self._client.restart(stream_id, start_from=start, report=report).messages(),
            ),
        }
        if verb not in actions:
            return PlainTextResponse(f"There is no action {verb!r}.", 404)
        title, work = actions[verb]
        self._log.start(stream_id, title, int(time.time() * 1000), work)
        return None

    def _may_act(self, request: Request) -> bool:
        cookie = request.cookies.get(_COOKIE, "")
        return self._token is not None and hmac.compare_digest(cookie.encode(), self._signature().encode())

    def _signature(self) -> str:
        """What the cookie holds: proof of the token, not the token."""
        return hmac.new((self._token or "").encode(), b"actions", hashlib.sha256).hexdigest()

    def _of_stream(self, stream: Any, tab: str) -> dict[str, Any]:
        return {"stream": stream, "tab": tab, "actions": self._log.of(stream.stream_id)}

    def _render(self, request: Request, template: str, **values: Any) -> Response:
        may_act = self._may_act(request)
        text = self._templates.get_template(template).render(
            may_act=may_act, is_read_only=self._token is None, now_ms=self._client.catalog.now_ms(), **values
        )
        return HTMLResponse(text)

    def _page(self, handler: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
        """Run a handler, which blocks, in a thread; its errors are pages too."""

        async def answer(request: Request) -> Response:
            try:
                return await run_in_threadpool(handler, request)
            except (StreamNotFoundError, SnapshotNotFoundError) as error:
                return self._error(str(error), 404)
            except CkptError as error:
                return self._error(str(error), 500)

        return answer

    def _error(self, message: str, status: int) -> Response:
        text = self._templates.get_template("error.html").render(
            message=without_secrets(message), may_act=False, is_read_only=True
        )
        return HTMLResponse(text, status)


def checkpoint_page(client: Client, *, token: str | None = None, allowed_hosts: list[str] | None = None) -> Starlette:
    """The checkpoint page as an ASGI application.

    Args:
        token: Secret that allows actions; None: the page is read-only.
        allowed_hosts: Host names of the page, so that no web site reaches it through one of its own; default: this
            machine.
    """
    hosts = allowed_hosts if allowed_hosts is not None else ["localhost", "127.0.0.1", "[::1]"]
    return CheckpointPage(client, token=token, allowed_hosts=hosts).app


def refuse_location(client: Client, stream_id: str, start: StartFrom, *, may_act: bool) -> None:
    """Refuse a location unless the browser is signed in and it is in the storage of the stream. Opens nothing.

    A preview opens its location: anybody who reaches the page could make the server fetch addresses of its network, or
    read local files.
    """
    reference = start.reference or ""
    if not is_location(reference):
        return
    if not may_act:
        raise OptionError(
            "A location is opened only in a browser that is signed in (dagster-ckpt ui --actions prints the address). "
            "Nothing was opened. Name the snapshot by its id, number (chk-7) or label."
        )
    folder = reference.rstrip("/").removesuffix("/_metadata")
    if any(each.location == folder for each in client.list_snapshots(stream_id)):
        return
    folders = client.snapshot_folders(stream_id)
    if not is_inside(folder, folders):
        raise OptionError(
            f"{without_secrets(reference)} is not opened: this page opens only what lies in the configured storage of "
            f"the stream, {' and '.join(folders) or 'which has no folder'}. To start from a snapshot elsewhere, use "
            "dagster-ckpt restart --from on the command line."
        )


def is_inside(location: str, folders: Iterable[str]) -> bool:
    """Whether a location is in a folder, however it is spelled. A symbolic link leads out of a folder."""
    decoded = location
    while (once := unquote(decoded)) != decoded:
        decoded = once
    parts = decoded.replace("\\", "/").split("/")
    # "::" chains file systems of fsspec, such as simplecache::http://...
    if "::" in decoded or ".." in parts or any(mark in decoded for mark in "?#") or not decoded.isprintable():
        return False
    try:
        place = StoragePath.parse("location", location_url("location", location))
    except OptionError:
        return False
    # The spelling is compared first, so that no network disk is mounted.
    below = [folder for folder in folders if place.url.startswith(f"{folder.rstrip('/')}/")]
    return not place.user_info and any(lies_in(place.url, folder) for folder in below)


def _given(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in fields.items() if value}


def _stream(request: Request) -> str:
    return str(request.path_params["stream"])


def _statuses() -> list[str]:
    return [status.value for status in SnapshotStatus if status is not SnapshotStatus.BROKEN]


def _taken(snapshot: Any) -> str:
    return f"{describe_snapshot(snapshot)} at batch {snapshot.batch_id}: {snapshot.location}"


def _is_same_origin(request: Request) -> bool:
    origin = request.headers.get("origin")
    # Browsers always send it; a program with the cookie need not.
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


async def _form(request: Request) -> dict[str, str] | None:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LARGEST_FORM:
            return None
    return {name: values[-1] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


async def _with_headers(request: Request, call: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response
