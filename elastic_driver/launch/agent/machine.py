"""Facts about this machine that an agent reports. Reads the system, and keeps nothing."""

from __future__ import annotations

import os
import socket
import sys

from elastic_driver.system.interfaces import host_addresses, without_loopback


def machine_name() -> str:
    """Return the machine's own name."""
    return socket.gethostname()


def pid() -> int:
    """Return the PID of this process."""
    return os.getpid()


def cores() -> int:
    """Return how many processors this process and its children may use."""
    return len(os.sched_getaffinity(0))


def python() -> str:
    """Return version and path of this Python, for messages."""
    return f"Python {sys.version.split()[0]} at {sys.executable}"


def addresses() -> list[str]:
    """Return all of the machine's addresses except loopback, each as "INTERFACE ADDRESS/PREFIX"."""
    return without_loopback(host_addresses())
