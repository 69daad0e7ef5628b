"""What the workers of a checkup ask of its driver, and what they have said: who is there, and who is still to come.

Owns the routes ``checkup`` and ``facts``, and the reading of the job's event log. The event loop asks, and the thread
that ends a checkup; what is known is read when the job has ended.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import IO, Any

from elastic_driver.doctor.facts import HostFacts
from elastic_driver.doctor.seen import Seen
from elastic_driver.rendezvous.messages import CheckupReply
from elastic_driver.rendezvous.routes import WORKER, Route, RouteRequest, Routes


class Attendance:
    """See above.

    Args:
        hosts: that are to come.
        folders: see CheckupReply.
        events: the job's event log, which is there once the job runs.
        limit_s: how long they are waited for.

    Attributes:
        facts: what was said last, by host.
        seen: what the events have said.
    """

    def __init__(self, hosts: Collection[str], folders: Mapping[str, str], events: Path, limit_s: float) -> None:
        self._hosts = hosts
        self._folders = dict(folders)
        self._events = _Tail(events)
        self._until = time.monotonic() + limit_s
        self.facts: dict[str, HostFacts] = {}
        self.seen = Seen()
        self._lock = threading.Lock()  # of the log and of what it has said

    @property
    def routes(self) -> Routes:
        """``GET checkup``, ``POST facts``."""
        return Route("GET", "checkup", WORKER, self._answer), Route("POST", "facts", WORKER, self._take)

    def look(self) -> None:
        """Reads what has happened since the last time."""
        with self._lock:
            self.seen.take_all(self._events.records())

    def is_in_vain(self) -> bool:
        """Whether no host takes part, and none is to be waited for any longer. Reads what has happened, too."""
        self.look()
        is_late = time.monotonic() >= self._until
        with self._lock:
            return all(self.seen.why_not(host) or (is_late and host not in self.seen.addresses) for host in self._hosts)

    def close(self) -> None:
        """Nothing more happens."""
        self._events.close()

    def _answer(self, request: RouteRequest) -> CheckupReply:
        self.look()
        return CheckupReply(time.time(), self._is_over(), self._folders)

    def _take(self, request: RouteRequest) -> None:
        worker = request.identity.worker
        assert worker is not None  # the route is the workers'
        self.facts[worker.hostname] = HostFacts.from_json(request.body)

    def _is_over(self) -> bool:
        if time.monotonic() >= self._until:
            return True
        with self._lock:
            return all(self._has_met(host) or self.seen.why_not(host) for host in self._hosts)

    def _has_met(self, host: str) -> bool:
        """Whether its worker was in an allreduce with all who are there now."""
        facts = self.facts.get(host)
        met = None if facts is None else facts.meeting
        return met is not None and host in self.seen.members and met.size == self.seen.round_size


class _Tail:
    """Reads whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def records(self) -> list[dict[str, Any]]:
        """Those that have come since the last time."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        """Nothing more is read."""
        if self._file is not None:
            self._file.close()
