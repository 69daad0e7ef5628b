"""Serves the workers of a checkup: collects their reports, and decides whether to wait for further hosts.

Owns the routes ``checkup`` and ``facts``, and the reading of the job's event log. Called by the event loop and by the
thread that ends a checkup; the results are read when the job has ended.
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
    """Collects the facts and the events of one checkup.

    Args:
        hosts: the expected hosts.
        folders: see CheckupReply.
        events: the job's event log, which exists once the job runs.
        limit_s: how long to wait for the hosts, seconds.

    Attributes:
        facts: the last report of each host's worker.
        seen: the state according to the events.
    """

    def __init__(self, hosts: Collection[str], folders: Mapping[str, str], events: Path, limit_s: float) -> None:
        self._hosts = hosts
        self._folders = dict(folders)
        self._events = _Tail(events)
        self._until = time.monotonic() + limit_s
        self.facts: dict[str, HostFacts] = {}
        self.seen = Seen()
        self._lock = threading.Lock()  # guards the log and ``seen``

    @property
    def routes(self) -> Routes:
        """The routes ``GET checkup`` and ``POST facts``."""
        return Route("GET", "checkup", WORKER, self._answer), Route("POST", "facts", WORKER, self._take)

    def look(self) -> None:
        """Read the events since the last call."""
        with self._lock:
            self.seen.take_all(self._events.records())

    def expects_no_more_hosts(self) -> bool:
        """Return whether no host takes part and none is worth waiting for. Reads new events, too."""
        self.look()
        is_late = time.monotonic() >= self._until
        with self._lock:
            return all(self.seen.why_not(host) or (is_late and host not in self.seen.addresses) for host in self._hosts)

    def close(self) -> None:
        """Close the event log."""
        self._events.close()

    def _answer(self, request: RouteRequest) -> CheckupReply:
        self.look()
        return CheckupReply(time.time(), self._is_over(), self._folders)

    def _take(self, request: RouteRequest) -> None:
        worker = request.identity.worker
        assert worker is not None  # the route is for workers
        self.facts[worker.hostname] = HostFacts.from_json(request.body)

    def _is_over(self) -> bool:
        if time.monotonic() >= self._until:
            return True
        with self._lock:
            return all(self._has_met(host) or self.seen.why_not(host) for host in self._hosts)

    def _has_met(self, host: str) -> bool:
        """Return whether the host's worker has done an allreduce with all present members."""
        facts = self.facts.get(host)
        met = None if facts is None else facts.meeting
        return met is not None and host in self.seen.members and met.size == self.seen.round_size


class _Tail:
    """Reads whole lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""

    def records(self) -> list[dict[str, Any]]:
        """Return the records appended since the last call."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
