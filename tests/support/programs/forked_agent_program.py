"""An agent in a forked process (tests/support/processes/forked.py), in a session of its own."""

from __future__ import annotations

import os
import sys

from elastic_driver.launch.agent.__main__ import main

if __name__ == "__main__":
    os.setsid()
    sys.exit(main(sys.argv[1:]))
