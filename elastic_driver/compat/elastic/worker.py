"""``horovod.runner.elastic.worker``: what a change of hosts is called. Loads nothing else: workers import it too."""

from __future__ import annotations

__all__ = ["HostUpdateResult"]


class HostUpdateResult:
    """What has changed between two answers of discovery: bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
