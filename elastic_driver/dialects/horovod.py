"""What workers that run Horovod's own library say, and are answered: the words of its older protocol.

Pure: texts and numbers. Owns the variables that such a worker reads, the paths that it asks for, and the form of the
answers; docs/howto/use-horovods-library.md says when a worker is of this kind. Facts of Horovod 0.28.1: a worker has
one rendezvous server, whose paths are ``/scope/key``. It puts and gets the addresses of its Gloo contexts there, asks
for its place after a reset, and tells where it takes notices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.hosts import SlotInfo

AUTO, ON, OFF = MODES = ("auto", "on", "off")
ENV_PROTOCOL = "ELASTIC_DRIVER_HOROVOD_PROTOCOL"
"""Whether workers are served so: one of the modes. What a worker finds there is for its agent."""
ENV_ADDRESS = "ELASTIC_DRIVER_HOROVOD_ADDRESS"
"""Where the worker's host is reached by those that it is planned with, for its agent."""
ENV_PORT = "ELASTIC_DRIVER_HOROVOD_PORT"
"""The port that is this worker's own; set where it is served so. Its import of Horovod asks there before ``init()``."""

ENV_STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
ENV_STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
ENV_INTERFACE = "HOROVOD_GLOO_IFACE"

PLACE_HEADER = b"x-elastic-driver-process"
"""Of a request for a place: the process's id and that of one of its threads. Sent by the import hook only."""
INTERFACE_HEADER = "X-Elastic-Driver-Interface"
"""Of the answer to it: on which interface to meet the others."""

RANK_AND_SIZE, WORKER_ADDRESSES = "rank_and_size", "worker_addresses"
REMOVED = b"-1,-1,-1,-1,-1,-1"

# Six contexts are made, in this order; the last three are those of process set 0.
_PROCESS_SET = "_process_set_hash_"
_CROSS = "cross_"
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def check_protocol(mode: str, said_by: str) -> str:
    """The mode in lower case.

    Raises:
        SettingsError: there is no such mode.
    """
    lower = mode.lower()
    if lower not in MODES:
        raise SettingsError(f"{said_by} {mode!r} is not one of {', '.join(MODES)}")
    return lower


def scope_and_key(url: bytes) -> tuple[str, str]:
    """The two parts of a path.

    Raises:
        RendezvousProtocolError: it has fewer, or more.
    """
    parts = url.decode("latin-1").split("/")  # hosts' names stand there as they are
    if len(parts) != 3 or parts[0] or not parts[1] or not parts[2]:
        raise RendezvousProtocolError("cannot read the path: it is not /scope/key")
    return parts[1], parts[2]


def placed(slot: SlotInfo) -> bytes:
    """The answer to a worker that asks for its place."""
    return ",".join(map(str, astuple(slot))).encode()


def place_variables(slot: SlotInfo) -> dict[str, str]:
    """What tells a process its place at its first ``init()``."""
    return {f"HOROVOD_{name}": str(number) for name, number in zip(_NUMBERS, astuple(slot), strict=True)}


def planned(env: Mapping[str, str]) -> SlotInfo | None:
    """The place that a worker reads from its environment; None where it has none."""
    try:
        return SlotInfo(*(int(env[f"HOROVOD_{name}"]) for name in _NUMBERS))
    except (KeyError, ValueError):
        return None


def ends_init(scope: str) -> bool | None:
    """Whether the context of this scope is the last one that ``init()`` makes; None: perhaps (without process sets)."""
    if not scope.startswith(_CROSS):
        return False
    return True if _PROCESS_SET in scope else None
