"""Which names mean this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading

import psutil

_RESOLVE_S = 3.0

# Names that have been found to mean this machine.
_known_local = {"localhost"}


def is_local_host(name: str) -> bool:
    """Whether a name or address means this machine.

    Loopback names and addresses, this machine's host name and addresses, and names that resolve (forwards; never
    backwards, which can hang for seconds) to nothing but these. A positive answer is remembered. Blocks for up to 3 s.
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
        pass  # no address, so a name
    hostname = socket.gethostname().lower()
    local = name.lower() in (hostname, hostname.split(".")[0])
    if not local:
        resolved = addresses_of(name)
        local = bool(resolved) and all(is_ours(address) for address in resolved)
    if local:
        _known_local.add(name)
    return local


def addresses_of(name: str) -> list[str]:
    """The addresses that a name resolves to, forwards; none when there is no answer in time. Blocks for up to 3 s."""
    addresses: list[str] = []

    def look_up() -> None:
        # UnicodeError: a label that is too long for the name to be one.
        with contextlib.suppress(OSError, UnicodeError):
            addresses.extend(str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))

    # The system's resolver cannot be interrupted and takes 30 s and more when no name server answers. A daemon, so that
    # nobody waits for it at the end either; the resolver ends it.
    thread = threading.Thread(target=look_up, name=f"elasticrun-resolve-{name}", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return [] if thread.is_alive() else list(dict.fromkeys(addresses))
