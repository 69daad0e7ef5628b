"""What is left of a job that is over: the page that stays open, its page in a file, and the report's picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.health.sampler import Sampled
from elastic_driver.reporting.happenings import JobEnded, ProcessEnded, Summary
from elastic_driver.reporting.page.recorded import recorded_page
from elastic_driver.reporting.picture import page, svg
from elastic_driver.reporting.story import Reader, Story
from tests.browser.browsing import complaints, dressed, enter, size, text, until, violations
from tests.support.fakes.rendezvous_service import Service
from tests.support.fakes.shown_job import JOB, ShownJob

pytestmark = pytest.mark.browser

HOSTILE = "</script><img src=x onerror=\"document.title='taken'\"><!--\u2028\x1b[31m"


def tiles(browser: Any) -> dict[str, str]:
    cells = text(browser, "#tiles").split("\n")
    return dict(zip(cells[::2], cells[1::2], strict=False))


def end(job: ShownJob) -> None:
    """Its workers end, one of them is killed, and then it is over."""
    first, *others = job.workers
    job.feed.hear(ProcessEnded(first, 1, "0", -9, "killed by SIGKILL", expected=False, foretold=False))
    for worker in others:
        job.feed.hear(ProcessEnded(worker, 1, "0", 0, "exited with code 0", expected=True, foretold=False))
    job.workers = []
    job.more |= {"steps_per_s": None, "history": True}
    job.feed.hear(JobEnded(0, "all workers ended with 0", Summary()))


def record(job: ShownJob) -> None:
    for at in range(20):
        figures = {"loss": 1 / (at + 1), HOSTILE: 1.0}
        job.curves.add(job.clock() - 40 + 2 * at, Sampled(steps_per_s=20.5, cpu=3.9, figures=figures))


def recorded(job: ShownJob) -> dict[str, Any]:
    """As the history keeps it."""
    return {"version": 1, "frame": json.loads(job.feed.state()), "outputs": {"node000[0]#0": ["last words", HOSTILE]}}


def show_output(browser: Any, worker: str) -> str:
    browser.find_element("css selector", f'#ended [aria-label="Last output of worker {worker}"]').click()
    until(browser, "its output", lambda: text(browser, "#shown-text") not in ("", "…"))
    said = text(browser, "#shown-text")
    browser.find_element("id", "shown-close").click()
    return said


def test_an_open_page_keeps_what_it_has_and_says_how_to_come_back(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    running, job = service
    running.call(lambda: record(job))
    enter(browser, running, job)
    until(browser, "its figures", lambda: tiles(browser).get("Workers") == "4")
    running.call(lambda: end(job))
    running.call(lambda: job.feed.close({"node000[0]#0": ["last words", HOSTILE]}))
    until(browser, "the driver's end", lambda: "To open it again" in text(browser, "#banner"))
    assert text(browser, "#banner").endswith(f"elasticrun page {JOB}")
    assert text(browser, "#phase") == "finished"
    shown = tiles(browser)
    assert (shown["Workers"], shown["Goodput"]) == ("4", "93.0 %")
    assert float(shown["Steps/s"]) >= 20  # 20.04 is shown as 20.0
    assert "loss" in text(browser, "#curves")
    rows = text(browser, "#ended").split("\n")
    assert sum("exited with code 0" in row for row in rows) == 3
    assert any("node000[0]" in row and "killed by SIGKILL" in row for row in rows)
    assert show_output(browser, "node000[0]").startswith("last words\n</script><img")
    assert "no longer available" in show_output(browser, "node001[1]")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_its_page_in_a_file_needs_no_driver_and_loads_nothing(
    browser: Any, service: tuple[Service, ShownJob], tmp_path: Path, scheme: str, width: int
) -> None:
    running, job = service
    running.call(lambda: record(job))
    job.explain = HOSTILE
    running.call(job.feed.state)
    running.call(lambda: end(job))
    file = tmp_path / "page.html"
    file.write_text(recorded_page(running.call(lambda: recorded(job))), "utf-8")
    complaints(browser)
    size(browser, width)
    with dressed(browser, scheme):
        browser.get(file.as_uri())
        until(browser, "the page", lambda: text(browser, "#live") == "recorded")
        banner = text(browser, "#banner")
        assert "This job ended on " in banner
        assert " with exit code 0" in banner
        assert f"elasticrun report {JOB}" in banner
        assert f"elasticrun page {JOB}" in banner
        assert tiles(browser)["Workers"] == "4"
        until(browser, "its curves", lambda: "0.05" in text(browser, "#curves"))
        assert browser.execute_script("return document.querySelectorAll('#ended tr.worker').length") == 4
        assert show_output(browser, "node000[0]").startswith("last words\n</script><img")
        assert show_output(browser, "node001[1]") == "The output of this worker was not kept."
        assert not browser.find_element("id", "logout").is_displayed()
        assert browser.execute_script("return document.querySelectorAll('img').length") == 0
        assert "taken" not in browser.title
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert violations(browser) == []
    assert complaints(browser) == [], "nothing was asked for, and nothing forbidden"


def test_of_a_driver_that_was_killed_it_says_so(
    browser: Any, service: tuple[Service, ShownJob], tmp_path: Path
) -> None:
    running, job = service
    file = tmp_path / "page.html"
    file.write_text(recorded_page(running.call(lambda: recorded(job))), "utf-8")
    browser.get(file.as_uri())
    until(browser, "the page", lambda: text(browser, "#live") == "recorded")
    assert "The end of this job was not recorded: its driver was killed." in text(browser, "#banner")
    assert text(browser, "#phase") == "was running"
    assert text(browser, "#fleet").count("rank ") == 4


def test_a_record_that_lacks_much_is_a_page_still(browser: Any, tmp_path: Path) -> None:
    complaints(browser)
    for frame in (
        {},
        {"job": {"job_id": "x", "ended": {}}},
        {"at": 1e300, "curves": {"t": [1], "series": {"cpu": []}}},
    ):
        file = tmp_path / "page.html"
        file.write_text(recorded_page({"version": 1, "frame": frame, "outputs": {}}), "utf-8")
        browser.get(file.as_uri())
        until(browser, "the page", lambda: text(browser, "#live") == "recorded")
    assert complaints(browser) == []


def a_story() -> Story:
    """A job of three hosts, one of which is lost, with samples."""
    lines: list[bytes] = []

    def add(event: str, at_s: float, **fields: object) -> None:
        lines.append(json.dumps({"event": event, "time": 1.7e9 + at_s, "at_s": at_s, **fields}).encode())

    def form(at_s: float, round_id: int, old: int, cause: str, workers: list[str]) -> None:
        members = [{"rank": rank, "worker": worker, "pid": 1} for rank, worker in enumerate(workers)]
        costs = {"commits": 5, "backend": "torch", "formed_in_s": 1.0, "lost_s": 2.0, "since_commit_s": 2.0}
        add("phase", at_s, doing="forming", on_change="in-place")
        add("round_formed", at_s, round_id=round_id, old_size=old, cause=cause, members=members, **costs)
        add("phase", at_s, doing="training", on_change="in-place")

    hosts = [f"gpu-{index:04}.rack-7.cluster.example.org" for index in range(3)]
    workers = [f"{host}[{slot}]#0" for host in hosts for slot in range(2)]
    add("job_started", 0, job_id=JOB, url="http://127.0.0.1:1", version="0.1.0")
    add("hosts_discovered", 0, hosts=dict.fromkeys(hosts, 2))
    for worker in workers:
        add("worker_started", 1, worker=worker, pid=1)
    form(5, 1, 0, "start", workers)
    for index in range(60):
        at_s, figures = 10.0 + 10 * index, {"loss": 2 / (index + 1), HOSTILE: float(index)}
        known = {"steps_per_s": 20.0, "waiting": 0.1, "cpu": 6.0, "memory_bytes": 9 << 30}
        add("sampled", at_s, **known, gpu=0.9, gpu_memory_bytes=None, workers=6, figures=figures)
    add("host_lost", 650, host=hosts[2], reason=f"its agent is not heard any more {HOSTILE}")
    form(660, 2, 6, f"host {hosts[2]} lost: its agent is not heard any more {HOSTILE}", workers[:4])
    add("job_ended", 700, exit_code=0, message="all workers of round 2 exited with code 0")
    story = Reader().read(lines)
    assert story is not None
    return story


LETTERS = """
return Math.min(...[...document.querySelectorAll("text, td, th, h2")].filter(each => each.getClientRects().length)
  .map(each => parseFloat(getComputedStyle(each).fontSize) * (each.ownerSVGElement ? each.getScreenCTM().a : 1)));
"""
OUTSIDE = """
return [...document.querySelectorAll("text, rect, td")].filter(each => each.getClientRects().length)
  .filter(each => { const r = each.getBoundingClientRect(); return r.left < -1 || r.right > arguments[0] + 1; })
  .map(each => each.textContent);
"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_report_can_be_read_on_a_desk_and_on_a_telephone(
    browser: Any, tmp_path: Path, scheme: str, width: int
) -> None:
    complaints(browser)
    file = tmp_path / "report.html"
    file.write_text(page(a_story()), "utf-8")
    size(browser, width)
    with dressed(browser, scheme):
        browser.get(file.as_uri())
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script(OUTSIDE, width) == []
        assert browser.execute_script(LETTERS) >= 11
        assert violations(browser) == []
    assert complaints(browser) == []


def test_a_picture_alone_has_a_layout_for_each_screen(browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.svg"
    file.write_text(svg(a_story()), "utf-8")
    browser.get(file.as_uri())
    shown = 'return [...document.querySelectorAll("svg > svg")].filter(e => e.getClientRects().length).map(e => e.id)'
    shown = shown.replace("e.id", "e.getAttribute('class')")
    assert browser.execute_script(shown) == ["wide"]
    assert browser.execute_script(LETTERS) >= 11
    size(browser, 390)
    browser.get(file.as_uri())
    assert browser.execute_script(shown) == ["narrow"]
    # A telephone shows it as if on a screen of some other width, and that on its own.
    seen = browser.execute_script("return innerWidth")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= seen
    assert browser.execute_script(OUTSIDE, seen) == []
    assert browser.execute_script(LETTERS) * 390 / seen >= 11
