"""Whether all workers run the same script: a copy on one host may be older than those on the others.

Owns what each living worker's script was when it was started. Reads no file (agents do), and decides nothing.
"""

from __future__ import annotations

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.fleet.worker import Worker

# Where each host has a copy of its own, as from a template, more lines would say nothing more.
_MOST_TOLD = 3


class Scripts:
    """See above. Used on the event loop only."""

    def __init__(self) -> None:
        self._digests: dict[WorkerId, str] = {}
        self._told: set[str] = set()

    def started(self, worker: Worker) -> str:
        """A worker runs. Returns what the user is to be told of its script, once of each other one; mostly ""."""
        if not worker.digest:
            return ""
        hostname, digest = worker.id.hostname, worker.digest
        self._digests[worker.id] = digest
        others = (id for id, known in self._digests.items() if known != digest and id.hostname != hostname)
        other = next(others, None)
        if other is None or digest in self._told or len(self._told) >= _MOST_TOLD:
            return ""
        self._told |= {digest, self._digests[other]}
        return (
            f"{worker.script} is not the same file on hosts {other.hostname} and {hostname}: their workers run "
            "different code (it was not copied to all hosts, or has been changed while the job runs)"
        )

    def ended(self, worker: WorkerId) -> None:
        """It runs no more: one that is started in its place may have another script."""
        self._digests.pop(worker, None)
