"""Only the API server proves the end of a pod: a server that answers as Kubernetes does is asked here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dagster_ckpt.stream import liveness
from dagster_ckpt.stream.liveness import KubernetesApi, Liveness, Pod, PodState, ProcessIdentity

POD = Pod("streams", "orders-driver", "uid-1")
TOKEN = "the token"


class ApiServer:
    """Answers as the API server of Kubernetes.

    Attributes:
        answers: Status and body by path.
        asked: The paths that were asked.
        url: Its address.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, Any]] = {}
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.path)
                status, body = server.answers.get(self.path, (404, not_found("pods")))
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    status, body = 401, {"kind": "Status", "reason": "Unauthorized"}
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def path_of(pod: Pod) -> str:
    return f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"


def not_found(kind: str) -> dict[str, Any]:
    return {"kind": "Status", "reason": "NotFound", "code": 404, "details": {"name": "x", "kind": kind}}


def told(uid: str = POD.uid, phase: str = "Running", *containers: str) -> dict[str, Any]:
    statuses = [{"name": str(number), "state": {state: {}}} for number, state in enumerate(containers)]
    return {"kind": "Pod", "metadata": {"uid": uid}, "status": {"phase": phase, "containerStatuses": statuses}}


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ((200, told()), PodState.RUNS),
        ((200, told("another-uid")), PodState.GONE),
        ((200, told(POD.uid, "Failed", "terminated")), PodState.TERMINATED),
        ((200, told(POD.uid, "Succeeded", "terminated", "terminated")), PodState.TERMINATED),
        # The node controller sets the phase of a pod whose node does not answer.
        ((200, told(POD.uid, "Failed", "running")), PodState.RUNS),
        ((200, told(POD.uid, "Failed", "terminated", "running")), PodState.RUNS),
        ((200, told(POD.uid, "Failed")), PodState.RUNS),
        ((200, told(POD.uid, "Unknown", "terminated")), PodState.RUNS),
        ((404, not_found("pods")), PodState.GONE),
        # A namespace that is missing, or a proxy that answers: no word about the pod.
        ((404, not_found("namespaces")), PodState.UNKNOWN),
        ((404, "<html>not found</html>"), PodState.UNKNOWN),
        ((403, {"kind": "Status", "reason": "Forbidden"}), PodState.UNKNOWN),
        ((500, "oops"), PodState.UNKNOWN),
        ((200, "{"), PodState.UNKNOWN),
        ((200, []), PodState.UNKNOWN),
        ((200, {"kind": "Pod"}), PodState.UNKNOWN),
    ],
    ids=lambda value: value.value if isinstance(value, PodState) else str(value)[:60],
)
def test_only_an_answer_about_this_very_pod_proves_its_end(
    server: ApiServer, account: Path, answer: tuple[int, Any], state: PodState
) -> None:
    server.answers[path_of(POD)] = answer

    assert KubernetesApi(server.url, account).state(POD) is state


def test_a_server_that_cannot_be_reached_and_a_missing_token_prove_nothing(server: ApiServer, tmp_path: Path) -> None:
    assert KubernetesApi(server.url, tmp_path / "nothing").state(POD) is PodState.UNKNOWN
    (tmp_path / "token").write_text(TOKEN)
    assert KubernetesApi("http://127.0.0.1:1", tmp_path).state(POD) is PodState.UNKNOWN
    (tmp_path / "token").write_text("expired")
    assert KubernetesApi(server.url, tmp_path).state(POD) is PodState.UNKNOWN


def test_a_running_pod_is_asked_about_again_after_a_while_and_a_dead_one_never(
    server: ApiServer, account: Path
) -> None:
    now = [0.0]
    api = KubernetesApi(server.url, account, clock=lambda: now[0])
    server.answers[path_of(POD)] = (200, told())
    states = []
    for now[0] in (0.0, 1.0, 3.0):
        states.append(api.state(POD))
    server.answers[path_of(POD)] = (404, not_found("pods"))
    for now[0] in (6.0, 60.0):
        states.append(api.state(POD))

    assert states == [PodState.RUNS] * 3 + [PodState.GONE] * 2
    assert len(server.asked) == 3


def test_a_process_of_a_replaced_pod_has_ended(
    server: ApiServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_api", KubernetesApi(server.url, account))
    for name, value in ((liveness.POD_NAMESPACE, "streams"), (liveness.POD_NAME, "next"), (liveness.POD_UID, "uid-2")):
        monkeypatch.setenv(name, value)
    assert liveness.boot_id().endswith(" pod:streams/next/uid-2")
    predecessor = ProcessIdentity(1, 100, "orders-driver", f"boot-of-a-node pid:[1] time:[2] {POD}")
    elsewhere = ProcessIdentity(1, 100, "some-machine", "boot-of-a-node pid:[1] time:[2]")

    server.answers[path_of(POD)] = (200, told())
    assert predecessor.liveness() is Liveness.UNKNOWN
    liveness._api._known.clear()
    server.answers[path_of(POD)] = (200, told("uid-of-the-replacement"))
    assert predecessor.liveness() is Liveness.ENDED
    assert elsewhere.liveness() is Liveness.UNKNOWN


def test_an_earlier_process_of_the_same_pod_is_not_asked_about(
    server: ApiServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "_api", KubernetesApi(server.url, account))
    for name, value in (
        (liveness.POD_NAMESPACE, POD.namespace),
        (liveness.POD_NAME, POD.name),
        (liveness.POD_UID, POD.uid),
    ):
        monkeypatch.setenv(name, value)

    assert not liveness.pod_has_ended(f"boot pid:[1] {POD}")
    assert not server.asked


@pytest.mark.parametrize("recorded", [None, "", "boot pid:[1]", "boot pod:", "boot pod:a/b", "boot pod:a//c"])
def test_a_boot_without_a_pod_is_of_no_pod(recorded: str | None) -> None:
    assert Pod.recorded(recorded) is None
    assert not liveness.pod_has_ended(recorded)
