"""The event loop of a driver, an agent or a service. Workers have none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

import uvloop

from elastic_driver.system.threads import started_pool

# Of libuv's own threads, and the most that it takes of UV_THREADPOOL_SIZE.
_UV_THREADS, _MOST_UV_THREADS = 4, 1024


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop whose own threads have been started.

    Where they cannot be, libuv ends the process without a word, at the first name that is looked up.

    Raises:
        RuntimeError: they cannot be started.
    """
    try:
        wanted = int(os.environ.get("UV_THREADPOOL_SIZE", ""))
    except ValueError:
        wanted = 0
    # What such threads have had for stacks libuv's get, which are started at once.
    started_pool(min(max(wanted, _UV_THREADS), _MOST_UV_THREADS), "uvloop").shutdown()
    loop = uvloop.new_event_loop()
    with contextlib.suppress(OSError):  # it is no number, which is seen without asking anybody
        loop.run_until_complete(loop.getaddrinfo("-", 0, flags=socket.AI_NUMERICHOST))
    return loop


async def unix_connection(factory: Callable[[], asyncio.BaseProtocol], sock: socket.socket) -> asyncio.BaseTransport:
    """``create_unix_connection()`` of the running loop, for a connected socket, which is the transport's from then on.

    uvloop forgets the socket where the connection breaks while it is made, as when what the protocol says first finds
    nobody: libuv closes the descriptor, and the socket closes it once more when it is deleted, whatever has the number
    by then.
    """
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_unix_connection(factory, sock=sock)
    if isinstance(loop, uvloop.Loop) and transport.is_closing():
        sock.detach()
    return transport
