"""The address of a TensorFlow server, as text."""

from __future__ import annotations


def checked_address(address: str) -> str:
    """Check the address of a server, and return it unchanged.

    Raises:
        ValueError: it is not "host:port", or "[IPv6]:port".
    """
    host, colon, port = str(address).rpartition(":")
    is_host = bool(host) and not any(c.isspace() or c == "/" for c in host) and (":" not in host or host[0] == "[")
    if not (colon and is_host and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"cannot read {address!r} as the address of a server: expected host:port")
    return address
