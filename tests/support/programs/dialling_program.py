"""Dials and waits: a driver, for tests that kill it. Prints the number of the process that it has started."""

from __future__ import annotations

import asyncio
import pickle
import sys


async def main() -> None:
    dialler, host, bootstrap = pickle.load(sys.stdin.buffer)
    dialled = await dialler.dial(host, bootstrap)
    print(dialled.pid, flush=True)
    await dialled.failed


asyncio.run(main())
