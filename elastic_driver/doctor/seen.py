"""What the events of the checkup's job say of its hosts, beside what their workers say.

Owns how these events are read. Pure: the records are those of the event log (docs/events.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastic_driver.hosts import WorkerId

# Of flags and of a script that the user of the doctor has not given.
_DRIVERS_WORDS = (
    (re.compile(r" \(--(?:start|elastic|heartbeat|hang)-timeout\)"), ""),
    (re.compile(r"\. Does the script call it\?.*", re.DOTALL), ""),
    (re.compile(r"no worker called hvd\.init\(\)"), "no worker was ready"),
    (re.compile(r"did not call hvd\.init\(\)"), "was not ready"),
)


@dataclass(frozen=True, slots=True)
class Link:
    """The network between two hosts, where their workers listen.

    Attributes:
        hosts: both.
        rtt_ms: shortest round trip, milliseconds.
        mbit_s: megabits a second in the slower direction.
    """

    hosts: tuple[str, str]
    rtt_ms: float
    mbit_s: float


@dataclass(slots=True)
class Seen:
    """What has happened so far.

    Attributes:
        addresses: where the agents of hosts have come from.
        unready: hosts that are not used, and why.
        lost: hosts whose agent is lost, and why.
        members: hosts with a worker in the present round.
        hung: hosts whose worker stood still, and how; it was ended for that.
        ended: hosts whose worker has ended as it should not, and how.
        interrupted: hosts that were lost, hung or ended, and have come back since: why they were away last.
        links: by both hosts.
        slow: warnings of the network's check.
        round_size: workers of the present round; 0 before the first.
        causes: of all rounds, in words.
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
        """See :meth:`take`."""
        for record in records:
            self.take(record)
        return self

    def take(self, record: Mapping[str, Any]) -> None:
        """One more event."""
        match record:
            case {"event": "host_ready", "host": host, "address": address}:
                self.addresses[host] = address
                self.unready.pop(host, None)
                # Only what has come of the loss: a worker that has failed by itself is not started again there.
                if host in self.lost:
                    self._is_back(host)
            case {"event": "host_unready", "host": host, "reason": reason}:
                self.unready[host] = reason
            case {"event": "host_lost", "host": host, "reason": reason}:
                self.lost[host] = reason
            case {"event": "network_checked", "links": links, "barred": barred, "slow": slow, "admitted": admitted}:
                for each in links:
                    one, other = each["hosts"]
                    self.links[one, other] = Link((one, other), each["rtt_ms"], each["mbit_s"])
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
        """Why a host takes no part now; "" where nothing says that it does not."""
        for reasons in (self.lost, self.unready, self.hung, self.ended):
            if host in reasons:
                return reasons[host]
        # A worker that could not be started is no event of its own: the others' next round is for that.
        named = (cause for cause in (*self.causes, self.message) if f"worker {host}[" in cause)
        return next((cause for cause in named if "could not be started" in cause), "")

    def _is_back(self, host: str) -> None:
        """What was said against it holds no longer, and is not forgotten."""
        for reasons in (self.ended, self.hung, self.lost):  # the last is what came of the others
            if host in reasons:
                self.interrupted[host] = reasons.pop(host)


def _in_own_words(text: str) -> str:
    """What the driver says to users of a job, for those of the doctor."""
    for words, ours in _DRIVERS_WORDS:
        text = words.sub(ours, text)
    return text


def _host_of(worker: str) -> str:
    return WorkerId.parse(worker).hostname
