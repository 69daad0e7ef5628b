"""Settings for pods as hosts (``--discovery kubernetes``), and their checks.

Owns names, defaults and checks of these values. Knows nothing of Kubernetes' API.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from elastic_driver.errors import SettingsError

KUBERNETES = "kubernetes"
AUTO_NAMES, POD, HOSTNAME, DNS, IP = POD_NAMES = ("auto", "pod", "hostname", "dns", "ip")
"""Which of a pod's names is its host's: the pod's, its own hostname, its DNS name, its address."""
SLOTS_FROM = "nvidia.com/gpu"
RACK_FROM = "topology.kubernetes.io/zone"

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
# The server reports errors in a selector that only looks valid.
_SELECTOR = re.compile(r"[-A-Za-z0-9_./=!,() ]{1,4096}")
_MAX_TAINTS = 64


def check_pods(
    *,
    selector: str,
    namespace: str | None,
    slots_from: str,
    rack_from: str,
    pod_names: str,
    departure_taints: Sequence[str],
) -> None:
    """Check these values. Raises SettingsError for an invalid one; a line that names the flag."""
    if not selector.strip():
        raise SettingsError(
            "--discovery kubernetes needs --selector, the labels of the job's pods, e.g. --selector app=train: "
            "without it all pods of the namespace would be hosts"
        )
    if not _SELECTOR.fullmatch(selector):
        raise SettingsError(
            f"--selector {selector[:200]!r} is not a label selector: expected, for example, app=train,tier!=web"
        )
    if namespace is not None and not _NAMESPACE.fullmatch(namespace):
        raise SettingsError(f"--namespace {namespace[:80]!r} is not the name of a namespace")
    for flag, key in (("--slots-from", slots_from), ("--rack-from", rack_from)):
        if not _QUALIFIED.fullmatch(key):
            raise SettingsError(f"{flag} {key[:80]!r} is not a Kubernetes name: expected, for example, {SLOTS_FROM}")
    if pod_names not in POD_NAMES:
        raise SettingsError(f"--pod-names {pod_names} is not one of {', '.join(POD_NAMES)}")
    for key in departure_taints:
        if not _QUALIFIED.fullmatch(key):
            raise SettingsError(f"--departure-taints {key[:80]!r} is not the key of a taint")
    if len(departure_taints) > _MAX_TAINTS:
        raise SettingsError(f"--departure-taints has {len(departure_taints)} keys; at most {_MAX_TAINTS} are allowed")
