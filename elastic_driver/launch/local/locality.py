"""Which names mean this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from typing import Any

import psutil

_RESOLVE_S = 3.0
# The resolver's result for each address: the full name is the fourth item, the address in the fifth.
_Found = tuple[int, int, int, str, tuple[Any, ...]]

# Names that have been found to mean this machine.
_known_local = {"localhost"}


def is_local_host(name: str) -> bool:
    """Return whether a name or address means this machine.

    Loopback names and addresses, this machine's host name and addresses, its full name with some or all of its domains,
    and names that resolve (forwards; never backwards, which can hang for seconds) to nothing but these. A positive
    answer is cached. Blocks for up to 6 s.
    """
    if name in _known_local:
        return True
    local_addresses = {
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }

    def is_ours(address: str) -> bool:
        address = address.split("%")[0]
        return address in local_addresses or ipaddress.ip_address(address).is_loopback

    try:
        return is_ours(name)
    except ValueError:
        pass  # not an address, so a name
    hostname = socket.gethostname().lower()
    short = hostname.split(".")[0]
    local = name.lower() in (hostname, short)
    if not local and name.lower().startswith(f"{short}."):
        # The machine knows its full name from its hosts file, even before a name server has it: for example in a pod
        # that is starting.
        local = f"{_full_name_of(hostname)}.".startswith(f"{name.lower().rstrip('.')}.")
    if not local:
        resolved = addresses_of(name)
        local = bool(resolved) and all(is_ours(address) for address in resolved)
    if local:
        _known_local.add(name)
    return local


def addresses_of(name: str) -> list[str]:
    """Return the addresses to which a name resolves; empty if there is no answer in time. Blocks for up to 3 s."""
    return list(dict.fromkeys(str(info[4][0]) for info in _look_up(name)))


def _full_name_of(hostname: str) -> str:
    """Return a name with its domains, from the system's resolver; "" if there is no answer in time."""
    return next((info[3].lower() for info in _look_up(hostname, socket.AI_CANONNAME) if info[3]), "")


def _look_up(name: str, flags: int = 0) -> list[_Found]:
    found: list[_Found] = []

    def look_up() -> None:
        # UnicodeError: a label is too long for a valid name.
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM, flags=flags))

    # The system's resolver cannot be interrupted, and takes 30 s and more if no name server answers. A daemon, so that
    # nothing waits for it at the end either; the resolver ends it.
    thread = threading.Thread(target=look_up, name=f"elasticrun-resolve-{name}", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return [] if thread.is_alive() else found
