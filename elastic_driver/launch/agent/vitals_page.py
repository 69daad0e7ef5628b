"""The page on which a worker reports its own state: a file in memory that the agent makes and the worker writes.

Owns the file, its layout (native/vitals/page.h writes it), and reading both the page and the stacks after it. Knows
nothing of processes. A worker may write anything into it: an invalid page is ignored.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from statistics import median_low

from elastic_driver.system.kernel import memory_file
from elastic_driver.vitals import OWN_CAP, OWN_STEPS, Traffic, Waiting

PAGE_BYTES = 8192
_MAGIC, _VERSION = b"ELVITALS", 2
_HEAD = struct.Struct("<8sII3Qq10Q")
_TRAFFIC_AT, _SEQUENCE_AT, _STEPS_AT, _TEXT_AT = 128, 256, 288, 416
_SEQUENCE = struct.Struct("<3Q")  # of the text, its size, of the steps
_STEPS = struct.Struct("<32I")  # own times of the last steps, microseconds
# By number, as in elastic_driver.worker.engine.Kind.
KINDS = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join")
_TRAFFIC = struct.Struct(f"<{2 * len(KINDS)}Q")
# Beyond that not every integer is a float, and no real count is that large.
_WHOLE = 1 << 53
_MOST_RANKS = 64
_MOST_WAITING = 8
_MOST_NAME = 240
# Two processes of one machine share this clock, so a later time than now was written since now was read.
_AHEAD_NS = 1_000_000_000
# Less than a hundred threads of a hundred frames need; people read the beginning.
MOST_STACK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class PageFacts:
    """The content of a worker's page. Fields as in :class:`~elastic_driver.vitals.Vitals`.

    Attributes:
        dump_signal: the signal that makes it write its stacks; 0 if there is none.
    """

    pid: int
    pulse_s: float | None
    round_id: int
    rank: int
    steps: int
    own_s: float | None
    submitted: int
    finished: int
    waits_s: float
    waited_s: float
    commits: int
    committed_s: float | None
    dump_signal: int
    traffic: tuple[Traffic, ...]
    waiting: tuple[Waiting, ...]


class VitalsPage:
    """The page of one worker.

    Attributes:
        path: where the worker finds it, as long as this process lives.
        dumps_begun, dumps_ended: how often its stacks were requested, and how often they came or were given up.

    Raises:
        OSError: no file is available.
    """

    def __init__(self) -> None:
        self._descriptor = memory_file("elastic-driver-vitals")
        try:
            os.ftruncate(self._descriptor, PAGE_BYTES)
            os.pwrite(self._descriptor, _MAGIC + struct.pack("<II", _VERSION, PAGE_BYTES), 0)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._forgotten_bytes = 0
        self.dumps_begun = self.dumps_ended = 0

    def close(self) -> None:
        """Close it; the memory is freed once the worker has closed it, too. Harmless when repeated."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def read(self, now_ns: int) -> PageFacts | None:
        """Return the content; None before the worker has written, and for an invalid page.

        Args:
            now_ns: the present, by CLOCK_MONOTONIC.
        """
        if self._descriptor < 0:
            return None
        try:
            sequence = os.pread(self._descriptor, _SEQUENCE.size, _SEQUENCE_AT)
            page = os.pread(self._descriptor, PAGE_BYTES, 0)
            after = os.pread(self._descriptor, _SEQUENCE.size, _SEQUENCE_AT)
        except OSError:
            return None
        if len(sequence) != len(after) or len(after) != _SEQUENCE.size:
            return None
        # Parts that are being written are read the next time.
        before, now = _SEQUENCE.unpack(sequence), _SEQUENCE.unpack(after)
        return parse_page(page, now_ns, text=before[:2] == now[:2], last_steps=before[2] == now[2])

    # --- stacks ----------------------------------------------------------------------------------------------------

    def stack_bytes(self) -> int:
        """Return the size of the stacks after the page."""
        with contextlib.suppress(OSError):
            return max(0, os.fstat(self._descriptor).st_size - PAGE_BYTES)
        return 0

    def stacks(self) -> str:
        """Return the stacks after the page."""
        with contextlib.suppress(OSError):
            return os.pread(self._descriptor, MOST_STACK_BYTES, PAGE_BYTES).decode("utf-8", "replace")
        return ""

    def written_bytes(self) -> int:
        """Return how many bytes of stacks the worker has written so far: they do not count as its own work."""
        return self._forgotten_bytes + self.stack_bytes()

    def forget_stacks(self) -> None:
        """Make room for the next stacks, which are written after those already there."""
        self._forgotten_bytes += self.stack_bytes()
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, PAGE_BYTES)


def parse_page(page: bytes, now_ns: int, *, text: bool = True, last_steps: bool = True) -> PageFacts | None:
    """Parse a page; None if it is empty or invalid.

    Args:
        page: its bytes.
        now_ns: the present, by CLOCK_MONOTONIC.
        text: whether to parse its text.
        last_steps: whether to parse the times of the last steps.
    """
    if len(page) != PAGE_BYTES:
        return None
    magic, version, size, pid, pulse, round_id, rank, steps, submitted, finished, *more = _HEAD.unpack_from(page)
    waits_since, waited, commits, committed_at, dump_signal, *_ = more
    counts = (round_id, steps, submitted, finished, commits)
    if (magic, version, size) != (_MAGIC, _VERSION, PAGE_BYTES) or not 0 < pid < 1 << 31:
        return None
    if max(counts) >= _WHOLE or not -1 <= rank < 1 << 31 or waited >= _WHOLE << 10:
        return None
    if max(pulse, waits_since, committed_at) > now_ns + _AHEAD_NS:
        return None
    numbers = _TRAFFIC.unpack_from(page, _TRAFFIC_AT)
    if max(numbers) >= _WHOLE:
        return None
    return PageFacts(
        pid=pid,
        pulse_s=_age_s(pulse, now_ns),
        round_id=round_id,
        rank=rank,
        steps=steps,
        own_s=_own_s(page, steps) if last_steps else None,
        submitted=submitted,
        finished=finished,
        waits_s=_age_s(waits_since, now_ns) or 0.0,
        waited_s=waited / 1e9,
        commits=commits,
        committed_s=_age_s(committed_at, now_ns),
        dump_signal=dump_signal if 0 < dump_signal < 65 else 0,
        traffic=tuple(
            Traffic(kind, operations, payload)
            for kind, operations, payload in zip(KINDS, numbers[::2], numbers[1::2], strict=True)
            if operations
        ),
        waiting=_waiting(page, now_ns) if text else (),
    )


def _age_s(at_ns: int, now_ns: int) -> float | None:
    return max(0, now_ns - at_ns) / 1e9 if at_ns else None


def _own_s(page: bytes, steps: int) -> float | None:
    """Return a step's own time, see Vitals; None before there are enough steps."""
    if _SEQUENCE.unpack_from(page, _SEQUENCE_AT)[2] % 2 or steps < OWN_STEPS:
        return None
    kept: tuple[int, ...] = _STEPS.unpack_from(page, _STEPS_AT)
    last = [kept[number % len(kept)] for number in range(steps - OWN_STEPS, steps)]
    if not all(last):
        return None  # a round began in one of them
    cap = OWN_CAP * median_low(last)
    return sum(min(each, cap) for each in last) / OWN_STEPS / 1e6


def _waiting(page: bytes, now_ns: int) -> tuple[Waiting, ...]:
    sequence, size, _ = _SEQUENCE.unpack_from(page, _SEQUENCE_AT)
    if sequence % 2 or size > PAGE_BYTES - _TEXT_AT:
        return ()
    found = []
    for line in page[_TEXT_AT : _TEXT_AT + size].decode("utf-8", "replace").split("\n")[:_MOST_WAITING]:
        since, _, rest = line.partition("\t")
        ranks, _, name = rest.partition("\t")
        if not (since.isascii() and since.isdecimal() and len(since) < 20 and name):
            continue
        missing = _ranks(ranks)
        if missing:
            found.append(Waiting(name[:_MOST_NAME], max(0, now_ns - int(since)) / 1e9, missing))
    return tuple(found)


def _ranks(text: str) -> tuple[int, ...]:
    """Parse ranks like "0-2,5"; only the first of them if there are many."""
    ranks: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not all(each.isascii() and each.isdecimal() and len(each) < 10 for each in (first, last)):
            return ()
        ranks += range(int(first), min(int(last), int(first) + _MOST_RANKS) + 1)
        if len(ranks) >= _MOST_RANKS:
            break
    return tuple(ranks[:_MOST_RANKS])
