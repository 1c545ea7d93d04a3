"""Which pod a process runs in, and whether another pod has ended.

A replaced pod does not exist or has another UID, and one whose containers have all terminated runs nothing. A pod takes
part if its manifest passes its name, namespace and UID in the variables below (Downward API), and its service account
may `get` pods.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl
    import urllib.error

POD_NAMESPACE, POD_NAME, POD_UID = "DAGSTER_CKPT_POD_NAMESPACE", "DAGSTER_CKPT_POD_NAME", "DAGSTER_CKPT_POD_UID"

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ANSWER_S = 3.0
# Loops ask several times a second whether a holder lives.
_ASK_AGAIN_S = 2.0
_PREFIX = "pod:"


class PodState(Enum):
    """What the API server says of a pod.

    GONE: It was deleted or replaced.
    TERMINATED: All its containers have terminated.
    RUNS: A container may be running.
    UNKNOWN: There is no answer.
    """

    GONE = "GONE"
    TERMINATED = "TERMINATED"
    RUNS = "RUNS"
    UNKNOWN = "UNKNOWN"


@dataclass(frozen=True)
class Pod:
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.namespace}/{self.name}/{self.uid}"

    @staticmethod
    def recorded(text: str | None) -> Pod | None:
        word = next((each for each in (text or "").split() if each.startswith(_PREFIX)), None)
        parts = word.removeprefix(_PREFIX).split("/") if word is not None else []
        return Pod(*parts) if len(parts) == 3 and all(parts) else None

    @staticmethod
    def of(environment: Mapping[str, str]) -> Pod | None:
        parts = [environment.get(name, "") for name in (POD_NAMESPACE, POD_NAME, POD_UID)]
        return Pod(*parts) if all(part and not set(part) & set("/ ") for part in parts) else None


class KubernetesApi:
    """The API server; by default as the environment and the pod's service account say."""

    def __init__(
        self, url: str | None = None, account: Path = _ACCOUNT, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._account = account
        self._clock = clock
        self._known: dict[Pod, tuple[PodState, float]] = {}

    def state(self, pod: Pod) -> PodState:
        """A pod that has ended is not asked about again."""
        known, at = self._known.get(pod, (PodState.UNKNOWN, None))
        if known in (PodState.GONE, PodState.TERMINATED):
            return known
        if at is not None and self._clock() - at < _ASK_AGAIN_S:
            return known
        state = self._ask(pod)
        self._known[pod] = (state, self._clock())
        return state

    def _ask(self, pod: Pod) -> PodState:
        url = self._url or _address(os.environ)
        if url is None:
            return PodState.UNKNOWN
        # Slow to import, and needed only in Kubernetes.
        import urllib.error  # noqa: PLC0415
        import urllib.request  # noqa: PLC0415

        try:
            # The kubelet renews the token.
            token = (self._account / "token").read_text(encoding="utf-8").strip()
            request = urllib.request.Request(
                f"{url}/api/v1/namespaces/{pod.namespace}/pods/{pod.name}", headers={"Authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(request, timeout=_ANSWER_S, context=self._trust(url)) as answer:
                return _state_of(json.load(answer), pod)
        except urllib.error.HTTPError as error:
            return _missing(error)
        except (OSError, ValueError):
            return PodState.UNKNOWN

    def _trust(self, url: str) -> ssl.SSLContext | None:
        if not url.startswith("https:"):
            return None
        import ssl  # noqa: PLC0415 - loaded by then

        return ssl.create_default_context(cafile=str(self._account / "ca.crt"))


def _missing(error: urllib.error.HTTPError) -> PodState:
    """Only the API server itself says that this pod does not exist (GONE), not a proxy before it."""
    if error.code != 404:
        return PodState.UNKNOWN
    try:
        told = json.load(error)
        is_about_a_pod = told["kind"] == "Status" and told["reason"] == "NotFound" and told["details"]["kind"] == "pods"
    except (OSError, ValueError, KeyError, TypeError):
        return PodState.UNKNOWN
    return PodState.GONE if is_about_a_pod else PodState.UNKNOWN


def _state_of(told: object, pod: Pod) -> PodState:
    if not isinstance(told, dict) or told.get("kind") != "Pod":
        return PodState.UNKNOWN
    metadata, status = told.get("metadata"), told.get("status")
    if not isinstance(metadata, dict) or not isinstance(status, dict):
        return PodState.UNKNOWN
    if metadata.get("uid") != pod.uid:
        return PodState.GONE
    # The phase alone is no proof: pods of an unreachable node get one, too.
    containers = status.get("containerStatuses")
    if status.get("phase") not in ("Succeeded", "Failed") or not isinstance(containers, list) or not containers:
        return PodState.RUNS
    states = [each.get("state", {}) if isinstance(each, dict) else {} for each in containers]
    return PodState.TERMINATED if all("terminated" in state for state in states) else PodState.RUNS


def _address(environment: Mapping[str, str]) -> str | None:
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


_api = KubernetesApi()


def pod_has_ended(recorded_boot: str | None) -> bool:
    pod = Pod.recorded(recorded_boot)
    if pod is None or pod == Pod.of(os.environ):
        return False
    return _api.state(pod) in (PodState.GONE, PodState.TERMINATED)


def this_pod() -> str | None:
    """As a lease records it."""
    pod = Pod.of(os.environ)
    return str(pod) if pod is not None else None
