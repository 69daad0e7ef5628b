"""Tracebacks of workers that fail in their start: one that many of them print is shown once.

A mistake at a script's top fails in every process alike, and sixty tracebacks, interleaved, hide the one. So while the
job has no round, what a worker prints on its standard error from a traceback's first line on is held, until its process
has ended (then it is compared) or a moment has passed (then it was a message, and the worker goes on). Files under
``--output-filename`` have all of it. What is held is also shown behind the line that says who was killed, where the
others' collectives fail for that. Owns what is held; writes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A process that prints its last traceback is gone within milliseconds, with exit handlers within tenths of a second.
_HOLD_S = 1.0
_MOST_BYTES = 65536
_MOST_KNOWN = 100
_MARK = b"]<stderr>:"
# Before each line of a traceback, where torch.distributed is initialized.
_RANK = re.compile(rb"^\[rank\d+\]: ", re.MULTILINE)
# The last two: a script that Python cannot compile, or find.
_FIRST_LINE = re.compile(
    re.escape(_MARK) + rb"(\[rank\d+\]: )?(Traceback \(most recent call last\):|  File \"|\S+: can't open file )"
)


@dataclass(slots=True)
class _Held:
    since: float
    data: bytes


class Tracebacks:
    """What is held, and what has been shown already."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._shown: dict[bytes, str] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not self._held

    def take(self, data: bytes, now: float) -> bytes:
        """Takes whole lines of one worker's standard error, prefixed with its label. Returns what is shown at once."""
        head, mark, _ = data.partition(_MARK)
        label = head.rpartition(b"[")[2].decode(errors="replace")
        held = self._held.get(label)
        if held is not None and mark:
            held.data += data
            return self._held.pop(label).data if len(held.data) > _MOST_BYTES else b""
        first = _FIRST_LINE.search(data)
        if first is None:
            return data
        start = data.rfind(b"\n", 0, first.start()) + 1
        self._held[label] = _Held(now, data[start:])
        return data[:start]

    def overdue(self, now: float) -> bytes:
        """What has been held for long enough: its worker goes on."""
        late = [label for label, held in self._held.items() if now - held.since >= _HOLD_S]
        return b"".join(self._held.pop(label).data for label in late)

    def ended(self, label: str, *, compares: bool = True) -> tuple[bytes, str]:
        """The worker's process has ended.

        Args:
            label: of the worker.
            compares: whether what another has printed before is not to be shown again.

        Returns:
            What is to be shown of it, and the label of the worker that printed the same before; "" for none.
        """
        held = self._held.pop(label, None)
        if held is None:
            return b"", ""
        text = _RANK.sub(b"", b"\n".join(line.partition(_MARK)[2] for line in held.data.splitlines()))
        first = self._shown.get(text)
        if first is not None and compares:
            return b"", first
        if len(self._shown) < _MOST_KNOWN:
            self._shown[text] = label
        return held.data, ""

    def rest(self) -> bytes:
        """All that is held: nothing more is, from here on."""
        return b"".join(self._held.pop(label).data for label in tuple(self._held))
