"""An event loop whose time passes only when the loop would wait: hours of timers in milliseconds."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any

PATIENCE_S = 150.0


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits for nothing; what the loop would have waited passes at once."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if time.monotonic() > self.loop.give_up:
            raise TimeoutError("the test takes too long")
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if not ready and timeout is None:
            return super().select(1.0)  # nothing but a socket can go on from here
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module.

    Attributes:
        now: its time, seconds.
        give_up: when, of the real time, it is enough.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        self.give_up = time.monotonic() + PATIENCE_S
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Its time."""
        return self.now

    def stand_still(self, seconds: float) -> None:
        """As a process that was stopped for so long sees it: all at once."""
        self.now += seconds


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Runs a test on such a loop."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main(loop))
