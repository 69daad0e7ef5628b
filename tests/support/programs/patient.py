"""elasticrun that takes its time, as a busy machine does: it holds tracebacks until their processes have ended, and its
end waits for the event hook.
"""

from __future__ import annotations

import sys

from elastic_driver.cli import main as cli
from elastic_driver.reporting import tracebacks
from elastic_driver.reporting.event_hook import EventHook

_PATIENCE_S = 150.0

tracebacks._HOLD_S = _PATIENCE_S
EventHook.__init__.__kwdefaults__["grace_s"] = _PATIENCE_S

if __name__ == "__main__":
    sys.exit(cli.main())
