"""Tracebacks of workers: shows one that many workers print only once.

A bug in a script fails in every process alike, and sixty interleaved tracebacks are unreadable. So the first is shown
as it arrives, and one that repeats a traceback already shown is held back: until it differs, or a moment has passed
(then it was a message, and the worker continues), or its process has ended. If it is the same to its last line by then,
it is not shown again; files under ``--output-filename`` contain all of it. Owns the held output; writes nothing.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

# A process that prints its last traceback exits within milliseconds, with exit handlers within tenths of a second.
_HOLD_S = 1.0
_MOST_BYTES = 65536
_MOST_KNOWN = 100
_MARK = b"]<stderr>:"
# The prefix of each line of a traceback if torch.distributed is initialized.
_RANK = re.compile(rb"\[rank\d+\]: ")
# The last two: a script that Python cannot compile, or cannot find.
_FIRST_LINE = re.compile(
    re.escape(_MARK)
    + rb"(\[rank\d+\]: )?(  \+ Exception Group |Traceback \(most recent call last\):|  File \"|\S+: can't open file )"
)


@dataclass(slots=True)
class _Traceback:
    """A worker's output from a traceback's first line on.

    Attributes:
        label: of the worker.
        since: when its first line arrived, in seconds of a monotonic clock.
        serial: number of the output that contained that line.
        lines: without the parts that differ between workers.
        size: of all lines including these parts, in bytes.
        held: the part not yet shown.
        is_shown: whether it is shown as it arrives, since it differs from all those shown before.
    """

    label: str
    since: float
    serial: int
    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    held: bytes = b""
    is_shown: bool = False


class Tracebacks:
    """Holds back repeated tracebacks, and remembers those shown."""

    def __init__(self) -> None:
        self._growing: dict[str, _Traceback] = {}  # by the worker's label
        self._ended: list[_Traceback] = []  # still held, since one that is behind may become the same
        self._shown: list[_Traceback] = []
        self._held: OrderedDict[int, _Traceback] = OrderedDict()  # by their object ids, in order of arrival

    @property
    def first_held(self) -> int | None:
        """The serial number of the earliest output that is partly held; None for none."""
        return next((one.serial for one in self._held.values()), None)

    def take(self, data: bytes, now: float, serial: int = 0) -> bytes:
        """Take whole lines of one worker's standard error, prefixed with its label. Returns the part to show at once.

        Args:
            data: the lines.
            now: the time, in seconds of a monotonic clock.
            serial: the number of this output; increases with each.
        """
        head, mark, _ = data.partition(_MARK)
        label = head.rpartition(b"[")[2].decode(errors="replace")
        before, growing = b"", self._growing.get(label) if mark else None
        if growing is None:
            first = _FIRST_LINE.search(data)
            if first is None:
                return data
            start = data.rfind(b"\n", 0, first.start()) + 1
            before, data = data[:start], data[start:]
            growing = self._growing[label] = _Traceback(label, now, serial)
        growing.lines += [_RANK.sub(b"", line.partition(_MARK)[2], count=1) for line in data.splitlines()]
        growing.size += len(data)
        growing.held += data
        if growing.size > _MOST_BYTES:
            del self._growing[label]
        elif not growing.is_shown:
            if self._may_become_one(growing):
                self._held[id(growing)] = growing
                return before
            return before + self._first_of_its_kind(growing)
        return before + self._let_go(growing) + self._settled()

    def _let_go(self, one: _Traceback) -> bytes:
        """Release a traceback: return its held output, in order to show it."""
        self._held.pop(id(one), None)
        held, one.held = one.held, b""
        return held

    def _may_become_one(self, growing: _Traceback) -> bool:
        """Return whether it equals one already shown so far, including one that has fewer lines yet."""
        return any(
            growing.lines == shown.lines[: len(growing.lines)] or self._is_behind(shown, growing)
            for shown in self._shown
        )

    def _is_behind(self, shown: _Traceback, other: _Traceback) -> bool:
        """Return whether the one already shown, which has fewer lines, may still become the same as the other."""
        return self._growing.get(shown.label) is shown and shown.lines == other.lines[: len(shown.lines)]

    def _same_as(self, ended: _Traceback) -> str:
        return next((shown.label for shown in self._shown if shown.lines == ended.lines), "")

    def _settled(self) -> bytes:
        """Return the output to show of ended workers, after one already shown has grown or ended."""
        waiting, show = [], b""
        for one in self._ended:
            if same := self._same_as(one):
                prefix, mark, _ = self._let_go(one).partition(_MARK)
                show += prefix + mark + f"the same traceback as rank {same}\n".encode()
            elif any(self._is_behind(shown, one) for shown in self._shown):
                waiting.append(one)
            else:
                show += self._first_of_its_kind(one)
        self._ended = waiting
        return show

    def _first_of_its_kind(self, one: _Traceback) -> bytes:
        """Mark a traceback as shown, so that same ones are not shown again. Returns its held output."""
        one.is_shown = True
        if len(self._shown) < _MOST_KNOWN:
            self._shown.append(one)
        return self._let_go(one)

    def overdue(self, now: float) -> bytes:
        """Return output that has been held long enough: its worker continues."""
        late = [label for label, one in self._growing.items() if now - one.since >= _HOLD_S]
        return b"".join(self._let_go(self._growing.pop(label)) for label in late) + self._settled()

    def ended(self, label: str, *, has_failed: bool) -> tuple[bytes, str]:
        """Note the end of a worker's process.

        Args:
            label: of the worker.
            has_failed: if false, its output was a message, and is shown in full.

        Returns:
            The output to show now, and the label of the worker that printed the same traceback before; "" for none.
        """
        ended = self._growing.pop(label, None)
        if ended is None:
            return b"", ""
        if ended.is_shown:
            return self._settled(), ""
        if not has_failed:
            return self._let_go(ended), ""
        same = self._same_as(ended)
        if same:
            self._let_go(ended)
            return b"", same
        if any(self._is_behind(shown, ended) for shown in self._shown):
            self._ended.append(ended)
            return b"", ""
        return self._first_of_its_kind(ended), ""

    def rest(self) -> bytes:
        """Return all held output."""
        rest = b"".join(self._let_go(one) for one in tuple(self._held.values()))
        self._growing.clear()
        self._ended.clear()
        return rest
