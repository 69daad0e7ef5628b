"""``horovod.runner.elastic.worker``: the names of changes of hosts. Imports no other module: workers import it, too."""

from __future__ import annotations

__all__ = ["HostUpdateResult"]


class HostUpdateResult:
    """The kinds of changes between two answers of discovery, as bits."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added
