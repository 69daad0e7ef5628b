"""The state of the checkup's hosts according to the job's events, in addition to the workers' reports.

Owns the reading of these events. Pure: the records are those of the event log (docs/events.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_driver.hosts import WorkerId

# Mentions of flags and of a script that the user of the doctor has not given.
_DRIVERS_WORDS = (
    (re.compile(r" \(--(?:start|elastic|heartbeat|hang)-timeout\)"), ""),
    (re.compile(r"\. Does the script call it\?.*", re.DOTALL), ""),
    (re.compile(r"no worker called hvd\.init\(\)"), "no worker was ready"),
    (re.compile(r"did not call hvd\.init\(\)"), "was not ready"),
)


@dataclass(frozen=True, slots=True)
class Link:
    """The network between two hosts, measured between their workers' addresses.

    Attributes:
        hosts: the two hosts.
        rtt_ms: shortest round trip, milliseconds.
        mbit_s: bandwidth of the slower direction, Mbit/s.
    """

    hosts: tuple[str, str]
    rtt_ms: float
    mbit_s: float


@dataclass(slots=True)
class Seen:
    """The state so far.

    Attributes:
        addresses: from which the hosts' agents have connected, by host.
        unready: hosts that are not used, and why.
        lost: hosts whose agent is lost, and why.
        members: hosts with a worker in the present round.
        hung: hosts whose worker hung and was therefore killed, and how.
        ended: hosts whose worker has ended unexpectedly, and how.
        interrupted: hosts that were lost, hung or ended, and have returned since: the last reason.
        links: by pair of hosts.
        slow: warnings of the network check.
        round_size: the number of workers in the present round; 0 before the first.
        causes: of all rounds, as text.
        message: how the job has ended; "" while it runs.
    """

    addresses: dict[str, str] = field(default_factory=dict)
    unready: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    hung: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    interrupted: dict[str, str] = field(default_factory=dict)
    links: dict[tuple[str, str], Link] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    round_size: int = 0
    causes: list[str] = field(default_factory=list)
    message: str = ""

    def take_all(self, records: Iterable[Mapping[str, Any]]) -> Seen:
        """Apply all records, see :meth:`take`. Returns itself."""
        for record in records:
            self.take(record)
        return self

    def take(self, record: Mapping[str, Any]) -> None:
        """Apply one more event."""
        match record:
            case {"event": "host_ready", "host": host, "address": address}:
                self.addresses[host] = address
                self.unready.pop(host, None)
                # Clears only consequences of the loss: a worker that failed by itself is not restarted there.
                if host in self.lost:
                    self._is_back(host)
            case {"event": "host_unready", "host": host, "reason": reason}:
                self.unready[host] = reason
            case {"event": "host_lost", "host": host, "reason": reason}:
                self.lost[host] = reason
            case {"event": "network_checked", "links": links, "barred": barred, "slow": slow, "admitted": admitted}:
                for link in links:
                    one, other = link["hosts"]
                    self.links[one, other] = Link((one, other), link["rtt_ms"], link["mbit_s"])
                self.slow += [line for line in slow if line not in self.slow]
                self.unready |= barred
                for host in admitted:
                    self.unready.pop(host, None)
            case {"event": "round_formed", "size": size, "members": members, "cause": cause}:
                self.round_size = size
                self.causes.append(cause)
                self.members = {_host_of(member["worker"]) for member in members}
                for host in sorted(self.members):
                    self._is_back(host)
            case {"event": "worker_exited", "worker": worker, "returncode": returncode} if returncode:
                if not record.get("expected"):
                    how = f"by signal {-returncode}" if returncode < 0 else f"with exit code {returncode}"
                    self.ended[_host_of(worker)] = f"its worker ended {how}"
            case {"event": "worker_hung", "worker": worker, "reason": reason}:
                self.hung[_host_of(worker)] = f"its worker hangs: {_in_own_words(reason)}"
            case {"event": "first_failure", "worker": worker, "how": how, "last_lines": lines, "alike": alike}:
                last = f": {lines[-1].strip()}" if lines else ""
                how = _in_own_words(how)
                self.ended |= {_host_of(each): f"its worker {how}{last}" for each in (worker, *alike)}
            case {"event": "job_ended", "message": message}:
                self.message = _in_own_words(message)
            case _:
                pass

    def why_not(self, host: str) -> str:
        """Return why a host takes no part now; "" if there is no known reason."""
        for reasons in (self.lost, self.unready, self.hung, self.ended):
            if host in reasons:
                return reasons[host]
        # A worker that could not be started has no event of its own, but is named in the cause of the others' next
        # round.
        named = (cause for cause in (*self.causes, self.message) if f"worker {host}[" in cause)
        return next((cause for cause in named if "could not be started" in cause), "")

    def _is_back(self, host: str) -> None:
        """Move the reason against a host to ``interrupted``, since it no longer holds."""
        for reasons in (self.ended, self.hung, self.lost):  # the last is the cause of the others
            if host in reasons:
                self.interrupted[host] = reasons.pop(host)


def _in_own_words(text: str) -> str:
    """Reword the driver's messages to users of a job for users of the doctor."""
    for words, ours in _DRIVERS_WORDS:
        text = words.sub(ours, text)
    return text


def _host_of(worker: str) -> str:
    return WorkerId.parse(worker).hostname
