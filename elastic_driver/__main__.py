"""``python -m elastic_driver`` is ``elasticrun``."""

from __future__ import annotations

import sys

from elastic_driver.cli.main import main

sys.exit(main())
