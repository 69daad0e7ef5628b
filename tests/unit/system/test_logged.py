"""Warnings of the package's modules, told to the user."""

from __future__ import annotations

import contextlib
import logging

import pytest

from elastic_driver.system.logged import warnings_told

pytestmark = pytest.mark.unit


def test_warnings_are_told_meanwhile_and_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    log, told = logging.getLogger("elastic_driver.some.module"), list[str]()
    with contextlib.suppress(ZeroDivisionError), warnings_told(told.append):
        log.warning("no room for %s", "this")
        log.info("all is well")
        raise ZeroDivisionError
    log.warning("nobody listens any more")
    assert told == ["no room for this"]
    assert caplog.messages == ["nobody listens any more"]
