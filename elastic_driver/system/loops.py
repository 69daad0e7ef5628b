"""The event loop of a driver, an agent or a service. Workers have none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import uvloop

from elastic_driver.system.threads import started_pool

# Default number of libuv's own threads, and its maximum for UV_THREADPOOL_SIZE.
_UV_THREADS, _MOST_UV_THREADS = 4, 1024


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a loop whose own threads have been started.

    If they cannot be started, libuv ends the process without a message, at the first name lookup.

    Raises:
        RuntimeError: they cannot be started.
    """
    try:
        wanted = int(os.environ.get("UV_THREADPOOL_SIZE", ""))
    except ValueError:
        wanted = 0
    # libuv's threads, started at once, get the stacks that these threads have had.
    started_pool(min(max(wanted, _UV_THREADS), _MOST_UV_THREADS), "uvloop").shutdown()
    loop = uvloop.new_event_loop()
    with contextlib.suppress(OSError):  # it is not an address, which is noticed without a lookup
        loop.run_until_complete(loop.getaddrinfo("-", 0, flags=socket.AI_NUMERICHOST))
    return loop


async def unix_connection(factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket) -> asyncio.BaseTransport:
    """Call the running loop's ``create_unix_connection()`` for a connected socket, which the transport then owns.

    uvloop forgets the socket if the connection breaks while it is made, such as when the protocol's first write fails:
    libuv closes the descriptor, and the socket closes it again when it is deleted, whatever has the number by then.
    """
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(factory, sock=sock)
    if isinstance(loop, uvloop.Loop) and transport.is_closing():
        sock.detach()
    return transport
