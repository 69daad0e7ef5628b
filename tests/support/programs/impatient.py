"""elasticrun with short pauses after setbacks."""

from __future__ import annotations

import sys
from dataclasses import replace

from elastic_driver.cli import main as cli
from elastic_driver.core.state import Policy
from elastic_driver.driver import build
from elastic_driver.settings.settings import Settings
from elastic_driver.words import OnChange

_patient = build.policy_of


def _impatient(settings: Settings, on_change: OnChange) -> Policy:
    return replace(_patient(settings, on_change), pause_range_s=(0.01, 0.1))


build.policy_of = _impatient

if __name__ == "__main__":
    sys.exit(cli.main())
