"""Looks at workers (:class:`~elastic_driver.vitals.Vitals`) as an agent sends them: short, and checked on arrival.

Owns both directions. A worker is an array of the fields in their order: a driver of thousands hears of each once a
second.
"""

from __future__ import annotations

import json
import math
from typing import Any

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.vitals import Traffic, Vitals, Waiting

_WHOLE = 1 << 53
_MOST_ROWS = 16
_MOST_RANKS = 64
_MOST_TEXT = 256


def vitals_to_json(seen: dict[str, Vitals]) -> bytes:
    """Of workers, by their keys."""
    return json.dumps({key: _row_of(vitals) for key, vitals in seen.items()}, separators=(",", ":")).encode()


def vitals_from_json(data: bytes) -> dict[str, Vitals]:
    """The inverse of :func:`vitals_to_json`.

    Raises:
        RendezvousProtocolError: for anything else.
    """
    try:
        rows = json.loads(data)
        if not isinstance(rows, dict):
            raise ValueError("no object")
        return {key: _vitals_of(row) for key, row in rows.items()}
    except (ValueError, TypeError, RecursionError) as error:
        raise RendezvousProtocolError(f"cannot read message vitals: {error}") from None


def _row_of(vitals: Vitals) -> list[object]:
    return [
        vitals.at_s,
        vitals.pid,
        vitals.state,
        int(vitals.traced),
        round(vitals.cpu_s, 3),
        vitals.io_bytes,
        vitals.rss_bytes,
        _short(vitals.pulse_s),
        vitals.round_id,
        vitals.rank,
        vitals.steps,
        vitals.submitted,
        vitals.finished,
        round(vitals.waits_s, 3),
        round(vitals.waited_s, 3),
        vitals.commits,
        _short(vitals.committed_s),
        [[each.kind, each.operations, each.payload_bytes] for each in vitals.traffic],
        [[each.name, round(each.since_s, 3), list(each.missing)] for each in vitals.waiting],
        int(vitals.can_dump),
        None if vitals.own_s is None else round(vitals.own_s, 6),
        vitals.wakes,
        vitals.awaits[:_MOST_TEXT],
        vitals.peer[:_MOST_TEXT],
    ]


def _vitals_of(row: Any) -> Vitals:
    at_s, pid, state, traced, cpu_s, io, rss, pulse, round_id, rank, steps, submitted, finished, *rest = row
    waits_s, waited_s, commits, committed, traffic, waiting, can_dump, own, *later = rest
    # Agents of earlier versions do not send these.
    added: list[Any] = [*later, *(0, "", "")[len(later) :]]
    wakes, awaits, peer = added
    if len(traffic) > _MOST_ROWS or len(waiting) > _MOST_ROWS:
        raise ValueError("too much of a worker")
    return Vitals(
        at_s=_seconds(at_s),
        pid=_count(pid),
        state=_text(state)[:1],
        traced=bool(_count(traced)),
        cpu_s=_seconds(cpu_s),
        io_bytes=_count(io),
        rss_bytes=_count(rss),
        pulse_s=None if pulse is None else _seconds(pulse),
        round_id=_count(round_id),
        rank=-1 if rank == -1 else _count(rank),
        steps=_count(steps),
        submitted=_count(submitted),
        finished=_count(finished),
        waits_s=_seconds(waits_s),
        waited_s=_seconds(waited_s),
        commits=_count(commits),
        committed_s=None if committed is None else _seconds(committed),
        traffic=tuple(Traffic(_text(kind), _count(number), _count(payload)) for kind, number, payload in traffic),
        waiting=tuple(Waiting(_text(name), _seconds(since), _ranks(missing)) for name, since, missing in waiting),
        can_dump=bool(_count(can_dump)),
        own_s=None if own is None else _seconds(own),
        wakes=_count(wakes),
        awaits=_text(awaits),
        peer=_text(peer),
    )


def _short(age_s: float | None) -> float | None:
    return None if age_s is None else round(age_s, 3)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _WHOLE:
        raise ValueError("a count is none")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < _WHOLE or not math.isfinite(value):
        raise ValueError("a time is none")
    return float(value)


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MOST_TEXT:
        raise ValueError("a text is none")
    return value if value.isascii() else value.encode("utf-8", "replace").decode()


def _ranks(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > _MOST_RANKS:
        raise ValueError("ranks are none")
    return tuple(map(_count, value))
