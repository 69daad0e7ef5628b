"""Check that all workers run the same script: a copy on one host may be older than those on the others.

Owns the digest of each living worker's script at its start. Reads no file (agents do), and decides nothing.
"""

from __future__ import annotations

from collections import Counter

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import Worker

# If each host has its own copy, as from a template, more warnings would not help.
_MOST_TOLD = 3


class Scripts:
    """Compares the scripts of one job's workers. Used on the event loop only."""

    def __init__(self) -> None:
        self._digests: dict[WorkerId, str] = {}
        self._hosts: dict[str, Counter[str]] = {}  # by digest, the number of workers with it on each host
        self._told: set[str] = set()

    def started(self, worker: Worker) -> str:
        """Record that a worker runs. Return a warning about its script, once for each different one; mostly ""."""
        if not worker.digest:
            return ""
        self.ended(worker.id)
        hostname, digest = worker.id.hostname, worker.digest
        self._digests[worker.id] = digest
        self._hosts.setdefault(digest, Counter())[hostname] += 1
        if len(self._hosts) == 1 or digest in self._told or len(self._told) >= _MOST_TOLD:
            return ""
        others = ((known, host) for known, hosts in self._hosts.items() if known != digest for host in hosts)
        found = next((other for other in others if other[1] != hostname), None)
        if found is None:
            return ""
        self._told |= {digest, found[0]}
        return (
            f"{worker.script} is not the same file on hosts {found[1]} and {hostname}: their workers run different "
            "code (it was not copied to all hosts, or was changed while the job was running)"
        )

    def ended(self, worker: WorkerId) -> None:
        """Forget a worker that has ended: its replacement may have another script."""
        digest = self._digests.pop(worker, None)
        if digest is None:
            return
        hosts = self._hosts[digest]
        hosts[worker.hostname] -= 1
        if not hosts[worker.hostname]:
            del hosts[worker.hostname]
        if not hosts:
            del self._hosts[digest]
