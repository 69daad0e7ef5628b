"""Puts this folder on the import path, for what tests of several kinds share (``membership_job``).

The tests run side by side (pytest-xdist): those that share something costly have one ``xdist_group``.
"""

from __future__ import annotations

import signal

import pytest

# A shell starts jobs in the background with SIGINT ignored, nohup does so with SIGHUP, and what is ignored stays so in
# every process that a test starts. Tests send these signals.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What takes long comes first: begun last, it would run alone at the end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
