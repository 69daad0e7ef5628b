"""Limits of what an agent may report of its host. Pure: takes a hello, returns the reason to reject it.

An agent has proven that it belongs to the job, not that it is sound. The driver spends time on its event loop for each
slot, core or address that a host claims to have.
"""

from __future__ import annotations

import ipaddress

from elastic_driver.hosts import MAX_SLOTS_PER_HOST
from elastic_driver.rendezvous.agent_messages import Hello

# Eight times as many as Linux can be built for (NR_CPUS).
MOST_CORES = 65536
# The limit of torchrun's --nnodes, see settings/torchrun_options.py.
_MOST_NODES = 65536
# A machine with a thousand containers has an interface for each, with one or two addresses.
MOST_ADDRESSES = 4096
# An interface's name has at most 15 characters, an IPv6 address with its zone and prefix 66.
_LONGEST_ADDRESS = 128
_SHOWN = 80


def excess(hello: Hello, host: str) -> str:
    """Return why a host cannot be what its agent reports; "" if it can.

    Args:
        hello: its agent's first message on a connection.
        host: its name, for the message.
    """
    if not 0 <= hello.slots <= MAX_SLOTS_PER_HOST:
        return f"host {host} has {hello.slots} slots: at most {MAX_SLOTS_PER_HOST} are allowed"
    if not 1 <= hello.cores <= MOST_CORES:
        return f"host {host} has {hello.cores} cores: 1 to {MOST_CORES} are allowed"
    if not -1 <= hello.node_rank < _MOST_NODES:
        return f"host {host} has node rank {hello.node_rank}: -1 to {_MOST_NODES - 1} are allowed"
    if hello.address and not _is_address(hello.address):
        return f"host {host}: {hello.address[:_SHOWN]!r} is not an IP address"
    if len(hello.addresses) > MOST_ADDRESSES:
        return f"host {host} has {len(hello.addresses)} addresses: at most {MOST_ADDRESSES} are allowed"
    for line in hello.addresses:
        if len(line) > _LONGEST_ADDRESS:
            return f"host {host}: {line[:_SHOWN]!r}... is too long for an address"
    return ""


def _is_address(text: str) -> bool:
    # Python accepts anything as the zone of a link-local address.
    if len(text) > _LONGEST_ADDRESS or not text.isprintable() or " " in text:
        return False
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
