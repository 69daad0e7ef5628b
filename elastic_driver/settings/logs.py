"""The destinations of workers' output: torchrun's notations, as values.

Owns the syntax of ``--redirects``, ``--tee``, ``--local-ranks-filter`` and ``--duplicate-stdout-filters``. Touches no
disk.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

OUT, ERR = 1, 2
"""The bits of torchrun's notation: standard output, standard error."""

# torch accepts only ranks of one digit; a host may have more than ten workers.
_PAIR = re.compile(r"([0-9]{1,4}):([0-3])")


@dataclass(frozen=True, slots=True)
class Streams:
    """Selects streams of some workers of each host.

    Attributes:
        all: bits (OUT, ERR) for each worker not in ``by_rank``.
        by_rank: bits by local rank.
    """

    all: int = 0
    by_rank: Mapping[int, int] = field(default_factory=dict)

    def of(self, local_rank: int) -> int:
        """Return the bits of one worker."""
        return self.by_rank.get(local_rank, self.all)

    def __bool__(self) -> bool:
        return bool(self.all or any(self.by_rank.values()))


@dataclass(frozen=True, slots=True)
class Logs:
    """Destinations of the output beside, or instead of, the terminal.

    Attributes:
        folder: for the files (--log-dir); None for a new temporary one.
        redirects: streams written to files instead (--redirects).
        tee: streams written to files, too (--tee).
        shown: local ranks shown on the terminal (--local-ranks-filter); None for all.
        prefix: of the lines on the terminal (--log-line-prefix-template); None for elasticrun's own.
        stdout_filters, stderr_filters: lines that contain one of these are also collected in a file.
    """

    folder: Path | None = None
    redirects: Streams = field(default_factory=Streams)
    tee: Streams = field(default_factory=Streams)
    shown: frozenset[int] | None = None
    prefix: str | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()

    @property
    def keeps_files(self) -> bool:
        """Whether any output is written to files."""
        return bool(self.redirects or self.tee or self.stdout_filters or self.stderr_filters)

    def filters(self, stream: Literal["stdout", "stderr"]) -> Sequence[str]:
        """Return the filters of one stream."""
        return self.stdout_filters if stream == "stdout" else self.stderr_filters


def read_streams(text: str) -> Streams:
    """Parse ``3`` or ``0:3,1:2``. Raises ValueError with a reason for the user."""
    if text.strip() in ("0", "1", "2", "3"):
        return Streams(int(text))
    by_rank: dict[int, int] = {}
    for part in text.split(","):
        match = _PAIR.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{text[:40]!r} is neither 0 (nothing), 1 (standard output), 2 XX by local rank, as 0:3,1:2"
            )
        if int(match[1]) in by_rank:
            raise ValueError(f"{text[:40]!r} names local rank {int(match[1])} twice")
        by_rank[int(match[1])] = int(match[2])
    return Streams(by_rank=by_rank)


def read_ranks(text: str) -> frozenset[int]:
    """Parse ``0,1,2``. Raises ValueError with a reason for the user."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", word) for word in words):
        raise ValueError(f"{text[:40]!r} is not a list of local ranks such as 0,1,2")
    return frozenset(map(int, words))


def read_filters(text: str) -> tuple[str, ...]:
    """Parse ``apple,orange``; two commas stand for one within a text."""
    # No command line and no variable contains a zero byte.
    parts = text.replace(",,", "\0").split(",")
    return tuple(part.replace("\0", ",") for part in parts if part)
