"""Which states of workers' progress bars leave an agent's process: for the driver's terminal, and for its own.

Owns whose bars are looked at, and what the driver lacks of them. Knows nothing of how they come about.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.agent_messages import Redrawn
from elastic_driver.words import NO_BARS, Bar, is_chosen, may_be_shown

# Of a state, prefix included: more than a terminal's row has, with colours.
_LONGEST_BAR = 2000
_CUT_ESCAPE = re.compile(rb"\x1b[^A-Za-z]{0,32}\Z")


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
        has_room: whether nothing else waits for the driver, and it takes what it is told at once: what is on its way
            to it delays ordinary output.
        screen: this machine's; None for none.
        shown: of whom the driver shows them.

    """

    def __init__(
        self, send: Callable[[Redrawn], None], has_room: Callable[[], bool], screen: BarScreen | None, shown: str
    ) -> None:
        self._send = send
        self._has_room = has_room
        self._screen = screen
        self._shown = shown
        self._told: dict[tuple[WorkerId, str], Bar] = {}  # the newest that the driver has, by stream
        self._owed: dict[tuple[WorkerId, str], Bar] = {}  # the newest for which there was no room

    def are_watched(self, label: str) -> bool:
        """Whether somebody looks at those of a worker with this label."""
        here = NO_BARS if self._screen is None else self._screen.bars
        # All that are here are few, whatever their ranks.
        return may_be_shown(label, self._shown) or is_chosen(label, here)

    def take(self, worker: WorkerId, bar: Bar) -> None:
        """The newest state of one. Where something is on its way to the driver, the newest then follows it."""
        bar = _cut(bar)
        key = worker, bar.stream
        if bar.data and (bar.is_line or may_be_shown(bar.label, self._shown)):
            # What waits is replaced in its place, so that each gets its turn.
            owed = self._owed.get(key)
            self._owed[key] = replace(bar, is_line=bar.is_line or (owed is not None and owed.is_line))
            self.go_on()
        else:
            self._owed.pop(key, None)
            if self._was_shown(key) or (not bar.data and key in self._told):
                # It is there no more, or its rank is another one, whose bar the driver does not show.
                del self._told[key]
                self._send(Redrawn(worker.key, bar.stream, bar.label, False, b""))
        if self._screen is not None:
            self._screen.bar(worker, bar)

    def go_on(self) -> None:
        """Tells the driver of what waits, as far as there is room."""
        while self._owed and self._has_room():
            key = next(iter(self._owed))
            bar = self._told[key] = self._owed.pop(key)
            self._send(Redrawn(key[0].key, bar.stream, bar.label, bar.is_line, bar.data))

    def taken_over(self, shown: str) -> None:
        """Another driver has nothing of all that, and may show others."""
        self._shown = shown
        again = {key: replace(bar, is_line=False) for key, bar in self._told.items()} | self._owed
        self._owed = {key: bar for key, bar in again.items() if bar.is_line or may_be_shown(bar.label, shown)}
        self._told.clear()
        self.go_on()

    def _was_shown(self, key: tuple[WorkerId, str]) -> bool:
        told = self._told.get(key)
        return told is not None and may_be_shown(told.label, self._shown)

    def end(self, worker: WorkerId) -> None:
        """It has ended. The driver is told of that anyhow."""
        for stream in ("stdout", "stderr"):
            self._told.pop((worker, stream), None)
            self._owed.pop((worker, stream), None)
        if self._screen is not None:
            self._screen.bar(worker, None)


def _cut(bar: Bar) -> Bar:
    """No longer than a row can show, and without half a character or half a colour at its end."""
    if len(bar.data) <= _LONGEST_BAR:
        return bar
    text = bar.data[: _LONGEST_BAR - 1].decode(errors="ignore").encode()
    return replace(bar, data=_CUT_ESCAPE.sub(b"", text) + b"\n")
