"""``python -m elastic_driver.kubernetes``: the controller."""

from __future__ import annotations

import sys

from elastic_driver.kubernetes.controller import main

if __name__ == "__main__":
    sys.exit(main())
