"""A real Chromium for the tests of this folder, and a job whose page it shows."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.browsing import Late, size
from tests.support.fakes.rendezvous_service import Service, serving
from tests.support.fakes.shown_job import ShownJob


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is missing: scripts/install-browser")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("chromium is missing: scripts/install-browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.accept_insecure_certs = True  # nobody has signed the driver's
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    chromium.delete_all_cookies()
    size(chromium, 1280)
    yield chromium
    chromium.get("about:blank")


@pytest.fixture
def service() -> Iterator[tuple[Service, ShownJob]]:
    late = Late()
    with serving(web=late) as running:
        late.job = job = running.call(lambda: ShownJob(4, call_later=asyncio.get_running_loop().call_later))
        running.call(job.tell_start)
        yield running, job
