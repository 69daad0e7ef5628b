"""The states of workers' progress bars that leave an agent's process: for the driver's terminal and for its own.

Owns whose bars are shown, and which states the driver has not received yet. Does not parse output.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.agent_messages import Redrawn
from elastic_driver.words import NO_BARS, Bar, is_chosen, may_be_shown

# Of one state, prefix included: more than a row of a terminal with colors.
_LONGEST_BAR = 2000
_CUT_ESCAPE = re.compile(rb"\x1b[^A-Za-z]{0,32}\Z")


class BarScreen(Protocol):
    """Shows the bars on this machine.

    Attributes:
        bars: whose: "all", "none" or one rank.
    """

    bars: str

    def bar(self, worker: WorkerId, bar: Bar | None) -> None:
        """Show a worker's newest state. Empty data: its stream no longer has a bar; None: the worker has none."""


class BarsOfWorkers:
    """The progress bars of this host's workers, sent as far as there is room. Used on the event loop only.

    Args:
        send: sends the driver a state.
        has_room: returns whether nothing else waits for the driver, and it reads at once: data in flight delays
            ordinary output.
        screen: this machine's; None if it shows no bars.
        shown: whose bars the driver shows.
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
        """Return whether the bars of a worker with this label are shown anywhere."""
        here = NO_BARS if self._screen is None else self._screen.bars
        # On this machine there are few, whatever their ranks.
        return may_be_shown(label, self._shown) or is_chosen(label, here)

    def take(self, worker: WorkerId, bar: Bar) -> None:
        """Record a bar's newest state, and send it as soon as there is room."""
        bar = _cut(bar)
        key = worker, bar.stream
        if bar.data and (bar.is_line or may_be_shown(bar.label, self._shown)):
            # A waiting state is replaced in its place, so that each bar gets its turn.
            owed = self._owed.get(key)
            self._owed[key] = replace(bar, is_line=bar.is_line or (owed is not None and owed.is_line))
            self.go_on()
        else:
            self._owed.pop(key, None)
            if self._was_shown(key) or (not bar.data and key in self._told):
                # It is gone, or its rank has changed to one whose bar the driver does not show.
                del self._told[key]
                self._send(Redrawn(worker.key, bar.stream, bar.label, False, b""))
        if self._screen is not None:
            self._screen.bar(worker, bar)

    def go_on(self) -> None:
        """Send the driver the waiting states, as far as there is room."""
        while self._owed and self._has_room():
            key = next(iter(self._owed))
            bar = self._told[key] = self._owed.pop(key)
            self._send(Redrawn(key[0].key, bar.stream, bar.label, bar.is_line, bar.data))

    def taken_over(self, shown: str) -> None:
        """Send another driver, which has none of the states, those that it shows."""
        self._shown = shown
        again = {key: replace(bar, is_line=False) for key, bar in self._told.items()} | self._owed
        self._owed = {key: bar for key, bar in again.items() if bar.is_line or may_be_shown(bar.label, shown)}
        self._told.clear()
        self.go_on()

    def _was_shown(self, key: tuple[WorkerId, str]) -> bool:
        told = self._told.get(key)
        return told is not None and may_be_shown(told.label, self._shown)

    def end(self, worker: WorkerId) -> None:
        """Forget the bars of a worker that has ended; the driver is notified of that otherwise."""
        for stream in ("stdout", "stderr"):
            self._told.pop((worker, stream), None)
            self._owed.pop((worker, stream), None)
        if self._screen is not None:
            self._screen.bar(worker, None)


def _cut(bar: Bar) -> Bar:
    """Cut a state to what a row can show, without half a character or half a color code at its end."""
    if len(bar.data) <= _LONGEST_BAR:
        return bar
    text = bar.data[: _LONGEST_BAR - 1].decode(errors="ignore").encode()
    return replace(bar, data=_CUT_ESCAPE.sub(b"", text) + b"\n")
