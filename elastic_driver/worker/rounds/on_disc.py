"""What this process tells the driver of its commits on disc.

:mod:`elastic_driver.worker.durable.commits` knows it, and those who speak to the driver ask for it here: they come
below that.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_driver.rendezvous.messages import DiscReport

_reporter: Callable[[], DiscReport | None] | None = None


def tell(reporter: Callable[[], DiscReport | None]) -> None:
    """Has the driver told what this gives, in whichever thread it is asked for."""
    global _reporter
    _reporter = reporter


def report() -> DiscReport | None:
    """What there is to tell; None for nothing."""
    return None if _reporter is None else _reporter()
