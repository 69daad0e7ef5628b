"""Tracebacks of workers: one that many of them print is shown once.

A mistake in a script fails in every process alike, and sixty tracebacks, interleaved, hide the one. So the first is
shown as it comes, and what repeats a traceback that has been shown is held: until it differs, or a moment has passed
(then it was a message, and the worker goes on), or its process has ended. Where it is the same then, to its last line,
it is not shown again; files under ``--output-filename`` have all of it. Owns what is held; writes nothing.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field

# A process that prints its last traceback is gone within milliseconds, with exit handlers within tenths of a second.
_HOLD_S = 1.0
_MOST_BYTES = 65536
_MOST_KNOWN = 100
_MARK = b"]<stderr>:"
# Before each line of a traceback, where torch.distributed is initialized.
_RANK = re.compile(rb"\[rank\d+\]: ")
# The last two: a script that Python cannot compile, or find.
_FIRST_LINE = re.compile(
    re.escape(_MARK)
    + rb"(\[rank\d+\]: )?(  \+ Exception Group |Traceback \(most recent call last\):|  File \"|\S+: can't open file )"
)


@dataclass(slots=True)
class _Traceback:
    """What a worker has printed from a traceback's first line on.

    Attributes:
        label: of the worker.
        since: when its first line came, in seconds of a monotonic clock.
        serial: of the output that brought that line.
        lines: without what differs among workers.
        size: of all of them with it, in bytes.
        held: what of it is not shown.
        is_shown: whether it is shown as it comes, as it is like none that was shown before.
    """

    label: str
    since: float
    serial: int
    lines: list[bytes] = field(default_factory=list)
    size: int = 0
    held: bytes = b""
    is_shown: bool = False


class Tracebacks:
    """What is held, and what has been shown already."""

    def __init__(self) -> None:
        self._growing: dict[str, _Traceback] = {}  # by the worker's label
        self._ended: list[_Traceback] = []  # as far as they are held, for one that is behind and may be the same
        self._shown: list[_Traceback] = []
        self._held: OrderedDict[int, _Traceback] = OrderedDict()  # by their ids, as they came

    @property
    def first_held(self) -> int | None:
        """The serial number of the first output of which something is held; None for none."""
        return next((one.serial for one in self._held.values()), None)

    def take(self, data: bytes, now: float, serial: int = 0) -> bytes:
        """Takes whole lines of one worker's standard error, prefixed with its label. Returns what is shown at once.

        Args:
            data: the lines.
            now: the time, in seconds of a monotonic clock.
            serial: a number that grows with each output.
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
        """What is held of it, which is to be shown."""
        self._held.pop(id(one), None)
        held, one.held = one.held, b""
        return held

    def _may_become_one(self, growing: _Traceback) -> bool:
        """Whether it is the same so far as one that is shown, which may be the one that is behind."""
        return any(
            growing.lines == shown.lines[: len(growing.lines)] or self._is_behind(shown, growing)
            for shown in self._shown
        )

    def _is_behind(self, shown: _Traceback, other: _Traceback) -> bool:
        """Whether the one that is shown may still become the same as the other."""
        return self._growing.get(shown.label) is shown and shown.lines == other.lines[: len(shown.lines)]

    def _same_as(self, ended: _Traceback) -> str:
        return next((shown.label for shown in self._shown if shown.lines == ended.lines), "")

    def _settled(self) -> bytes:
        """What is to be shown of those that have ended, now that one that is shown has grown, or grows no more."""
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
        """What of it is to be shown; others that are the same are not shown any more."""
        one.is_shown = True
        if len(self._shown) < _MOST_KNOWN:
            self._shown.append(one)
        return self._let_go(one)

    def overdue(self, now: float) -> bytes:
        """What has been held for long enough: its worker goes on."""
        late = [label for label, one in self._growing.items() if now - one.since >= _HOLD_S]
        return b"".join(self._let_go(self._growing.pop(label)) for label in late) + self._settled()

    def ended(self, label: str, *, has_failed: bool) -> tuple[bytes, str]:
        """The worker's process has ended.

        Args:
            label: of the worker.
            has_failed: else what it has printed was a message, of which nothing is left away.

        Returns:
            What is to be shown now, and the label of the worker that printed the same before; "" for none.
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
        """All that is held."""
        rest = b"".join(self._let_go(one) for one in tuple(self._held.values()))
        self._growing.clear()
        self._ended.clear()
        return rest
