"""Horovod's older protocol, for workers that run Horovod's own library: variables, paths and answers.

Pure: texts and numbers. Owns the variables that such a worker reads, the paths that it requests, and the format of the
answers; docs/howto/use-horovods-library.md says when a worker is of this kind. Facts of Horovod 0.28.1: a worker has
one rendezvous server, whose paths are ``/scope/key``. It puts and gets the addresses of its Gloo contexts there,
requests its place after a reset, and publishes the address at which it accepts notifications.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple

from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.hosts import SlotInfo

AUTO, ON, OFF = MODES = ("auto", "on", "off")
ENV_PROTOCOL = "ELASTIC_DRIVER_HOROVOD_PROTOCOL"
"""Whether to serve workers in this protocol: one of the modes. In a worker's environment it is for its agent."""
ENV_ADDRESS = "ELASTIC_DRIVER_HOROVOD_ADDRESS"
"""The address of the worker's host, as the workers planned with it reach it; for its agent."""
ENV_PORT = "ELASTIC_DRIVER_HOROVOD_PORT"
"""This worker's own port, set if it uses this protocol. Its import of Horovod asks there before ``init()``."""

ENV_STORE_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
ENV_STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
ENV_INTERFACE = "HOROVOD_GLOO_IFACE"

PLACE_HEADER = b"x-elastic-driver-process"
"""In a request for a place: the ids of the process and of one of its threads. Only the import hook sends it."""
INTERFACE_HEADER = "X-Elastic-Driver-Interface"
"""In the answer: the interface on which to connect to the other workers."""

RANK_AND_SIZE, WORKER_ADDRESSES = "rank_and_size", "worker_addresses"
REMOVED = b"-1,-1,-1,-1,-1,-1"

# Horovod creates six contexts, in this order; the last three are those of process set 0.
_PROCESS_SET = "_process_set_hash_"
_CROSS = "cross_"
_NUMBERS = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def check_protocol(mode: str, said_by: str) -> str:
    """Return the mode in lower case.

    Raises:
        SettingsError: there is no such mode.
    """
    lower = mode.lower()
    if lower not in MODES:
        raise SettingsError(f"{said_by} {mode!r} is not one of {', '.join(MODES)}")
    return lower


def scope_and_key(url: bytes) -> tuple[str, str]:
    """Split a path into its scope and its key.

    Raises:
        RendezvousProtocolError: it has fewer parts, or more.
    """
    parts = url.decode("latin-1").split("/")  # host names are not escaped
    if len(parts) != 3 or parts[0] or not parts[1] or not parts[2]:
        raise RendezvousProtocolError("cannot read the path: it is not /scope/key")
    return parts[1], parts[2]


def placed(slot: SlotInfo) -> bytes:
    """Format the answer to a request for a place."""
    return ",".join(map(str, astuple(slot))).encode()


def place_variables(slot: SlotInfo) -> dict[str, str]:
    """Return the variables from which a process reads its place at its first ``init()``."""
    return {f"HOROVOD_{name}": str(number) for name, number in zip(_NUMBERS, astuple(slot), strict=True)}


def planned(env: Mapping[str, str]) -> SlotInfo | None:
    """Return the place that a worker reads from its environment; None if it has none."""
    try:
        return SlotInfo(*(int(env[f"HOROVOD_{name}"]) for name in _NUMBERS))
    except (KeyError, ValueError):
        return None


def ends_init(scope: str) -> bool | None:
    """Whether this scope's context is the last one that ``init()`` creates; None: perhaps (without process sets)."""
    if not scope.startswith(_CROSS):
        return False
    return True if _PROCESS_SET in scope else None
