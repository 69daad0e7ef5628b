"""elasticrun in a forked process (tests/support/processes/forked.py), which forks its own machine's agent, too."""

from __future__ import annotations

import sys

from elastic_driver.cli.main import main
from tests.support.processes.forked_again import fork_again
from tests.support.processes.forked_agent import fork_first_agent

if __name__ == "__main__":
    fork_first_agent()
    fork_again(main)
    sys.exit(main())
