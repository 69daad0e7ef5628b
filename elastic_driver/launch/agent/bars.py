"""Which states of workers' progress bars leave an agent's process: for the driver's terminal, and for its own.

Owns whose bars are looked at. Knows nothing of how they come about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.agent_messages import Redrawn
from elastic_driver.words import NO_BARS, Bar, is_chosen, may_be_shown


class BarScreen(Protocol):
    """Shows them, on this machine.

    Attributes:
        bars: of whom: "all", "none" or one rank's.
    """

    bars: str

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """Takes the newest state of a worker's, without data where that stream has none any more; None: none at all."""


class BarsOfWorkers:
    """See above. Used on the event loop only.

    Args:
        send: tells the driver.
        has_room: whether nothing else waits for the driver, and it takes what it is told.
        screen: this machine's; None for none.
        shown: of whom the driver shows them.

    Attributes:
        shown: as given; of another driver, from then on.
    """

    def __init__(
        self, send: Callable[[Redrawn], None], has_room: Callable[[], bool], screen: BarScreen | None, shown: str
    ) -> None:
        self._send = send
        self._has_room = has_room
        self._screen = screen
        self.shown = shown

    def are_watched(self, label: str) -> bool:
        """Whether somebody looks at those of a worker with this label."""
        here = NO_BARS if self._screen is None else self._screen.bars
        # All that are here are few, whatever their ranks.
        return may_be_shown(label, self.shown) or is_chosen(label, here)

    def take(self, worker: WorkerId, bar: Bar) -> None:
        """The newest state of one. Where something is on its way to the driver, a later one follows it."""
        is_wanted = bar.is_line or may_be_shown(bar.label, self.shown)
        if not bar.data or (is_wanted and self._has_room()):
            self._send(Redrawn(worker.key, bar.stream, bar.label, bar.is_line, bar.data))
        if self._screen is not None:
            self._screen.bar(worker, bar)

    def end(self, worker: WorkerId) -> None:
        """It has ended. The driver is told of that anyhow."""
        if self._screen is not None:
            self._screen.bar(worker, None)
