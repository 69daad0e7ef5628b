"""The driver of ``elastic_driver.run`` in a forked process (tests/support/processes/forked_function.py), which forks
its own machine's agent and all workers, too: ``forked_function_driver.py FOLDER``.
"""

from __future__ import annotations

import os
import sys

from elastic_driver.function.driver import main
from tests.support.processes.forked_agent import fork_first_agent, fork_first_workers

if __name__ == "__main__":
    os.setsid()
    fork_first_agent(warms=True)
    fork_first_workers()
    sys.exit(main([sys.argv[1], str(os.getppid())]))  # what it was forked from ends with the test's process
