"""elasticrun whose first workers are forked from a warmed process, too: ``forking_elasticrun.py FLAGS... COMMAND...``.

It does so by itself for workers that it restarts. Elsewhere each of the first ones imports what it needs, side by side
with the others, and the warmed process once more. With PyTorch that is most of what a short test costs. Where this is
forked from a process that has imported all that (tests/support/processes/forked.py), nobody does. For tests that are
not about how workers are started.
"""

from __future__ import annotations

import sys

from elastic_driver.cli.main import main
from tests.support.processes.forked import starts_afresh
from tests.support.processes.forked_again import fork_again
from tests.support.processes.forked_agent import fork_first_agent, fork_first_workers


def run() -> int:
    """Runs it as this process's program. Returns its exit code."""
    if not starts_afresh():
        # Only where this is forked itself: else what its workers need is not imported here.
        fork_first_agent(warms="tests.support.processes.forked_warm" in sys.modules)
        fork_again(main)
    fork_first_workers()
    return main()


if __name__ == "__main__":
    sys.exit(run())
