"""Whether all workers run the same script: a copy on one host may be older than those on the others.

Owns what each living worker's script was when it was started. Reads no file (agents do), and decides nothing.
"""

from __future__ import annotations

from collections import Counter

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import Worker

# Where each host has a copy of its own, as from a template, more lines would say nothing more.
_MOST_TOLD = 3


class Scripts:
    """See above. Used on the event loop only."""

    def __init__(self) -> None:
        self._digests: dict[WorkerId, str] = {}
        self._hosts: dict[str, Counter[str]] = {}  # by digest, how many workers of each host have it
        self._told: set[str] = set()

    def started(self, worker: Worker) -> str:
        """A worker runs. Returns what the user is to be told of its script, once of each other one; mostly ""."""
        if not worker.digest:
            return ""
        self.ended(worker.id)
        hostname, digest = worker.id.hostname, worker.digest
        self._digests[worker.id] = digest
        self._hosts.setdefault(digest, Counter())[hostname] += 1
        if len(self._hosts) == 1 or digest in self._told or len(self._told) >= _MOST_TOLD:
            return ""
        others = ((known, host) for known, hosts in self._hosts.items() if known != digest for host in hosts)
        found = next((each for each in others if each[1] != hostname), None)
        if found is None:
            return ""
        self._told |= {digest, found[0]}
        return (
            f"{worker.script} is not the same file on hosts {found[1]} and {hostname}: their workers run different "
            "code (it was not copied to all hosts, or has been changed while the job runs)"
        )

    def ended(self, worker: WorkerId) -> None:
        """It runs no more: one that is started in its place may have another script."""
        digest = self._digests.pop(worker, None)
        if digest is None:
            return
        hosts = self._hosts[digest]
        hosts[worker.hostname] -= 1
        if not hosts[worker.hostname]:
            del hosts[worker.hostname]
        if not hosts:
            del self._hosts[digest]
