"""What an agent says of its machine. Reads the system, and keeps nothing."""

from __future__ import annotations

import os
import socket
import sys

from elastic_driver.system.interfaces import host_addresses, without_loopback


def machine_name() -> str:
    """The machine's own name."""
    return socket.gethostname()


def pid() -> int:
    """This process."""
    return os.getpid()


def cores() -> int:
    """Processors that this process, and what it starts, may use."""
    return len(os.sched_getaffinity(0))


def python() -> str:
    """Version and path of this Python, for messages."""
    return f"Python {sys.version.split()[0]} at {sys.executable}"


def addresses() -> list[str]:
    """All of the machine's that are not loopback, "INTERFACE ADDRESS/PREFIX" each."""
    return without_loopback(host_addresses())
