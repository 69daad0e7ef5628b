"""elasticrun in a forked process (tests/support/processes/forked.py), which forks its own machine's agent, too."""

from __future__ import annotations

import sys

from elastic_driver.cli.main import main
from tests.support.processes.forked_agent import fork_first_agent

if __name__ == "__main__":
    fork_first_agent()
    sys.orig_argv = [sys.executable, "-m", "elastic_driver", *sys.argv[1:]]  # as which it is started again
    sys.exit(main())
