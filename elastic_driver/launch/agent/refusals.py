"""Whether the driver's machine reports that no driver runs: it refuses a connection to the port of the driver.

An agent must not mistake a cut network for a dead driver: a living driver continues without a host that is cut off. So
only the machine's own answer counts, the TCP reset of a port on which no process listens. An ICMP message may come from
anything on the way, such as a firewall or a Service without endpoints, and a broken connection is no answer at all.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from elastic_driver.system import local_socket

# Failed questions are repeated; anything that takes longer is no answer.
_ASK_S = 3.0
# Numbers from Linux's in.h and in6.h, for which Python has no names.
_IP_RECVERR, _IPV6_RECVERR = 11, 25
# Since then the error queue has the ICMP message that ended a connect. Before, both cases look alike.
_TELLS_SINCE = (5, 8)


async def refuses(url: str, address: str) -> bool:
    """Return whether the driver's own machine reports that no process listens there. Blocks for some seconds at most.

    Args:
        url: of the driver, ``https://host:port`` or ``unix:/path``.
        address: of the driver's end of the connection on which it welcomed this agent.
    """
    if (path := local_socket.path_of(url)) is not None:
        return _refuses_here(path)
    return await _refuses_there(address, urlsplit(url).port or 0)


def _refuses_here(path: Path) -> bool:
    try:
        local_socket.connect_at_once(path).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False


async def _refuses_there(address: str, port: int) -> bool:
    if not _kernel_tells():
        return False
    is_v6 = ":" in address
    try:
        with socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            level, option = (socket.IPPROTO_IPV6, _IPV6_RECVERR) if is_v6 else (socket.IPPROTO_IP, _IP_RECVERR)
            sock.setsockopt(level, option, 1)
            try:
                async with asyncio.timeout(_ASK_S):
                    await asyncio.get_running_loop().sock_connect(sock, (address, port))
            except ConnectionRefusedError:
                return not _was_told_by_icmp(sock)
    except OSError:  # includes TimeoutError
        return False
    return False


def _was_told_by_icmp(sock: socket.socket) -> bool:
    try:
        sock.recvmsg(1, 1024, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # unknown
    return True


@functools.cache
def _kernel_tells() -> bool:
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= _TELLS_SINCE
