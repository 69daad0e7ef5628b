"""What the event loop does with a socket that it is given."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from typing import cast

import pytest

from elastic_driver.system.loops import new_loop, unix_connection

pytestmark = pytest.mark.unit


class Says(asyncio.Protocol):
    """Says something as soon as it can."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(b"hello")


def test_a_connection_that_breaks_while_it_is_made_is_closed_once() -> None:
    """An agent dialled a driver that had just died so; the second close was that of its next connection."""

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        theirs.close()
        number = ours.fileno()
        transport = await unix_connection(Says, ours)
        assert transport.is_closing()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(number)
        other = os.open(os.devnull, os.O_RDONLY)
        os.dup2(other, number)
        del ours, transport
        gc.collect()
        os.fstat(number)
        for descriptor in {other, number}:
            os.close(descriptor)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
