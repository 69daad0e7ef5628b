"""What the browser's tests do with a page: open it, look at it, ask axe what is wrong with it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.rendezvous.server.web import WebAnswer, WebRequest, WebStreaming
from tests.support.fakes.rendezvous_service import Service
from tests.support.fakes.shown_job import ShownJob

PATIENCE_S = 40
_VIOLATIONS = """
const done = arguments[0];
axe.run(document, { resultTypes: ["violations"] }).then(
  found => done(found.violations.flatMap(each => each.nodes.map(node => each.id + ": " + node.target.join(" ") + ": "
    + node.failureSummary))),
  error => done(["axe failed: " + error]));
"""

# Texts of pictures whose color is too near to what is painted behind them, of which axe cannot tell.
_PICTURES = """
const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const opaque = text => {
  const c = (text.match(/[\\d.]+/g) ?? []).map(Number);
  return c.length === 3 || c[3] === 1 ? c : null;
};
const around = (node, x, y) => {
  const box = node.getBoundingClientRect();
  return box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
};
const ground = text => {
  for (let node = text.closest("svg").parentElement; node; node = node.parentElement) {
    const found = opaque(getComputedStyle(node).backgroundColor);
    if (found) return found;
  }
  return [255, 255, 255];
};
// All that is painted there before the text, one over the other: bands shine through.
const behind = (text, x, y) => [...text.ownerSVGElement.querySelectorAll("rect")]
  .filter(bar => around(bar, x, y) && text.compareDocumentPosition(bar) & Node.DOCUMENT_POSITION_PRECEDING)
  .reduce((under, bar) => {
    const style = getComputedStyle(bar), color = opaque(style.fill);
    return color ? under.map((v, i) => v + (color[i] - v) * style.opacity * style.fillOpacity) : under;
  }, ground(text));
const found = [];
for (const text of document.querySelectorAll("svg text")) {
  if (!text.textContent.trim() || !text.getClientRects().length) continue;
  const box = text.getBoundingClientRect();
  const front = light(opaque(getComputedStyle(text).fill));
  const back = light(behind(text, box.left + 1, box.top + box.height / 2));
  const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  if (ratio < 4.5) found.push("contrast of " + ratio.toFixed(2) + " in a picture: " + text.textContent);
}
return found;
"""


class Late:
    """The site of a job that is made once the server's loop runs."""

    def __init__(self) -> None:
        self.job: ShownJob | None = None

    def answer(self, request: WebRequest) -> WebAnswer | WebStreaming:
        assert self.job is not None
        return self.job.site.answer(request)


def size(browser: Any, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def until(browser: Any, what: str, found: Callable[[], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, PATIENCE_S, 0.05).until(lambda _: found(), what)


def text(browser: Any, css: str = "body") -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", css))


def address(running: Service) -> str:
    """Where browsers find it."""
    return running.url.partition("#")[0]


def enter(browser: Any, running: Service, job: ShownJob, *, may_act: bool = False) -> str:
    link = f"{address(running)}/login?code={running.call(lambda: job.sessions.new_code(may_act=may_act))}"
    browser.get(link)
    until(browser, "the page is live", lambda: text(browser, "#live") == "live")
    # The first frame is drawn only when the browser draws next.
    until(browser, "the first frame is drawn", lambda: text(browser, "#explain") != "…")
    return link


def complaints(browser: Any) -> list[str]:
    return [entry["message"] for entry in browser.get_log("browser") if "favicon" not in entry["message"]]


@contextmanager
def dressed(browser: Any, scheme: str) -> Iterator[None]:
    """The reader's system is light or dark."""
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@cache
def _axe() -> str:
    found = importlib.util.find_spec("axe_playwright_python")
    if found is None or not found.submodule_search_locations:
        pytest.fail("axe is missing beside selenium: scripts/install-browser")
    return Path(found.submodule_search_locations[0], "axe.min.js").read_text("utf-8")


def violations(browser: Any) -> list[str]:
    """What axe finds wrong with the page as it is: contrast, names, roles, structure; and the contrast in pictures."""
    browser.execute_script(_axe())
    return [*browser.execute_async_script(_VIOLATIONS), *browser.execute_script(_PICTURES)]
