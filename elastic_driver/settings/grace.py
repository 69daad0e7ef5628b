"""How long a machine, or a pod, lives on after a SIGTERM, set by a variable in the environment.

Owns the variable and its parsing. A pod cannot query its own terminationGracePeriodSeconds: its manifest sets both.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic_driver.errors import SettingsError
from elastic_driver.settings.settings import check_seconds

ENV_GRACE = "ELASTIC_DRIVER_GRACE"


def grace_s(environ: Mapping[str, str]) -> float:
    """Return the variable's seconds; 0 if it is not set.

    Raises:
        SettingsError: the value is not a duration.
    """
    text = environ.get(ENV_GRACE, "").strip()
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        raise SettingsError(f"the variable {ENV_GRACE} is {text[:40]!r}, not a number of seconds") from None
    check_seconds(f"the variable {ENV_GRACE}:", seconds)
    return seconds
