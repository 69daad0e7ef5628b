"""Curves over time and the help on each word, as people read them: by mouse, by touch, by keys, by ear."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_driver.health.sampler import Sampled
from tests.browser.browsing import complaints, dressed, enter, size, text, until, violations
from tests.support.fakes.rendezvous_service import Service
from tests.support.fakes.shown_job import ShownJob

pytestmark = pytest.mark.browser

HOSTILE = "<img src=x onerror=\"document.title='taken'\"></script>\x1b[31m"
CURVES = "[...document.querySelectorAll('#curves .panel')]"


def record(job: ShownJob, seconds: int = 120) -> None:
    """Points of the last minutes, one in two seconds; for a while nobody knew."""
    now = job.clock()
    job.began = now - seconds
    for at in range(0, seconds, 2):
        known = not 40 <= at < 60
        job.curves.add(
            now - seconds + at,
            Sampled(
                steps_per_s=20.0 + at / 60 if known else None,
                waiting=0.25,
                cpu=3.9,
                memory_bytes=3 << 30,
                figures={"loss": 2.0 - at / 100} if known else {},
            ),
        )


def panels(browser: Any) -> list[str]:
    names: list[str] = browser.execute_script(f"return {CURVES}.map(each => each.querySelector('h3').innerText)")
    return [name.replace("\n", " ") for name in names]


def path(browser: Any, name: str) -> str:
    script = "return document.querySelector(`#curves [data-name=\"${arguments[0]}\"] path.line`).getAttribute('d')"
    return str(browser.execute_script(script, name))


def hairs(browser: Any) -> int:
    return int(browser.execute_script("return document.querySelectorAll('.hair line, line.hair').length"))


def spoken(browser: Any) -> str:
    return str(browser.find_element("id", "cross").get_attribute("aria-valuetext"))


def move_to(browser: Any, share: float, kind: str) -> None:
    """Points at a place of the first curve, as browsers say it."""
    script = """
    const chart = document.querySelector("#curves svg.curve"), rect = chart.getBoundingClientRect();
    const more = { clientX: rect.left + rect.width * arguments[0], clientY: rect.top + 30, pointerType: arguments[1],
      bubbles: true };
    chart.dispatchEvent(new PointerEvent(arguments[1] === "touch" ? "pointerdown" : "pointermove", more));
    if (arguments[1] === "touch") for (const name of ["pointerup", "pointerleave"])
      chart.dispatchEvent(new PointerEvent(name, more));
    """
    browser.execute_script(script, share, kind)


def show_curves(browser: Any, service: tuple[Service, ShownJob], seconds: int = 120) -> None:
    """Opens the page of a job with points of so long."""
    running, job = service
    running.call(lambda: record(job, seconds))
    enter(browser, running, job)
    until(browser, "the curves", lambda: len(panels(browser)) == 5)


def test_each_series_has_a_curve_with_a_gap_where_nobody_knew(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    running.call(lambda: record(job))
    complaints(browser)
    enter(browser, running, job)
    until(browser, "the curves", lambda: len(panels(browser)) == 5)
    assert [name.split()[0] for name in panels(browser)] == ["Steps/s", "Waiting", "CPU", "Memory", "loss"]
    assert panels(browser)[1] == "Waiting of the workers' time 25 %"
    assert panels(browser)[3] == "Memory of all workers 3 GB"
    assert [path(browser, name).count("M") for name in ("steps_per_s", "waiting", "figure loss")] == [2, 1, 2]
    assert browser.execute_script("return document.querySelectorAll('#curves .change').length") >= 1, (
        "rounds are marked"
    )
    labels = browser.execute_script(f"return {CURVES}[1].querySelector('svg').getAttribute('aria-label')")
    assert labels.endswith(": between 25 % and 25 %")
    assert complaints(browser) == []


def test_points_come_one_by_one_and_a_figure_that_is_new_has_none_before(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    running, job = service
    show_curves(browser, service)
    running.call(lambda: job.curves.add(job.clock(), Sampled(steps_per_s=33.0, figures={"accuracy": 0.875})))
    until(browser, "the new figure", lambda: len(panels(browser)) == 6)
    assert panels(browser)[0] == "Steps/s 33"
    assert panels(browser)[5] == "accuracy 0.875"
    assert browser.execute_script("return curves.t.length === curves.series.get('figure accuracy').length")
    assert browser.execute_script("return curves.series.get('figure accuracy').filter(x => x !== null).length") == 1


def test_the_cross_is_moved_by_mouse_touch_and_keys_and_read_aloud(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show_curves(browser, service)
    assert text(browser, "#cross-time") == "now"
    assert (hairs(browser), spoken(browser).startswith("now: Steps/s ")) == (0, True)

    chart = browser.find_element("css selector", "#curves svg.curve")
    ActionChains(browser).move_to_element_with_offset(chart, -20, 0).perform()
    until(browser, "the cross", lambda: text(browser, "#cross-time").startswith("at "))
    assert hairs(browser) >= 3, "in all curves, and in the timeline"
    at_mouse = text(browser, "#cross-time")
    assert spoken(browser).startswith(at_mouse.removeprefix("at "))
    ActionChains(browser).move_to_element(browser.find_element("id", "job")).perform()
    until(browser, "no cross", lambda: text(browser, "#cross-time") == "now")

    move_to(browser, 0.5, "touch")
    until(browser, "the cross stays when the finger is gone", lambda: text(browser, "#cross-time").startswith("at "))

    slider = browser.find_element("id", "cross")
    slider.send_keys(Keys.HOME)
    until(browser, "the first point", lambda: "Steps/s 20;" in spoken(browser))
    slider.send_keys(Keys.ARROW_RIGHT)
    until(browser, "the next one", lambda: "loss 1.98" in spoken(browser))
    assert "Memory 3 GB" in spoken(browser)
    slider.send_keys(*[Keys.ARROW_RIGHT] * 24)
    until(browser, "a time of which nobody knew", lambda: "Steps/s no data" in spoken(browser))
    slider.send_keys(Keys.ESCAPE)
    until(browser, "no cross", lambda: (text(browser, "#cross-time"), hairs(browser)) == ("now", 0))


def test_curves_have_the_span_of_the_timeline(browser: Any, service: tuple[Service, ShownJob]) -> None:
    show_curves(browser, service, 400)
    shown = "return view.last - view.first + 1"
    assert browser.execute_script(shown) == 200
    browser.find_element("css selector", "#spans [data-s='60']").click()
    until(browser, "a minute", lambda: 20 <= browser.execute_script(shown) <= 31)
    assert browser.execute_script("return [view.t1 - view.t0 - 60, 0].map(Math.round)") == [0, 0]


def test_each_word_is_explained_by_hovering_focus_and_touch_and_nothing_moves(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    show_curves(browser, service)
    words = browser.find_elements("css selector", "button.word")
    told = {word.text: browser.find_element("id", word.get_attribute("aria-describedby")) for word in words}
    headings = {
        "Workers",
        "Goodput",
        "Resets",
        "Timeline",
        "Curves",
        "Phase",
        "Restarts",
        "Events",
        "loss",
        "recomputed",
    }
    assert headings <= told.keys()
    assert all(each.get_attribute("textContent") for each in told.values())

    def where() -> list[float]:
        return list(browser.execute_script(f"return {CURVES}.map(each => each.getBoundingClientRect().top + scrollY)"))

    def word(name: str) -> Any:
        return next(each for each in words if each.text == name)

    def shown() -> str:
        return text(browser, "#help") if browser.find_element("id", "help").is_displayed() else ""

    places = where()
    ActionChains(browser).move_to_element(word("Goodput")).perform()
    until(browser, "by hovering", lambda: "share of the job's time" in shown())
    assert where() == places
    ActionChains(browser).move_to_element(browser.find_element("id", "help")).perform()
    assert "share of the job's time" in shown(), "one may go there, and read"
    ActionChains(browser).send_keys(Keys.ESCAPE).perform()
    until(browser, "nothing", lambda: shown() == "")
    browser.execute_script("arguments[0].focus()", word("Resets"))
    until(browser, "by focus", lambda: "interrupted to form another round" in shown())
    ActionChains(browser).send_keys(Keys.TAB).perform()
    until(browser, "the next word", lambda: "since the job started" in shown())
    size(browser, 390)
    word("Events").click()
    until(browser, "by a touch", lambda: "newest first" in shown())
    edges = browser.execute_script("const r = $('help').getBoundingClientRect(); return [r.left, r.right]")
    assert 0 <= edges[0] < edges[1] <= 390


def test_counts_do_not_fall(browser: Any, service: tuple[Service, ShownJob]) -> None:
    """Nor with a frame that was under way for long, nor with a driver that has counted less."""
    running, job = service
    job.more |= {"steps": 1000, "resets": 3, "newest_commit": 50}
    enter(browser, running, job)

    def tile(name: str) -> str:
        cells = text(browser, "#tiles").split("\n")
        return dict(zip(cells[::2], cells[1::2], strict=False)).get(name, "")

    until(browser, "its steps", lambda: tile("Steps") == "1000")
    job.more |= {"steps": 900, "resets": 2, "newest_commit": 40}
    job.round_id = 0
    until(browser, "a commit that was lost", lambda: tile("Commit") == "40")
    assert (tile("Steps"), tile("Resets"), tile("Round")) == ("1000", "3", "1")
    browser.execute_script("applyFrame({ at: Date.now() / 1000 + skew - 20, whole: false }); renderJob()")
    assert browser.execute_script("return Math.abs(now() - Date.now() / 1000) < 5")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_hostile_training_neither_breaks_the_curves_nor_makes_them_slow(
    browser: Any, service: tuple[Service, ShownJob], width: int
) -> None:
    running, job = service
    names = [f"{HOSTILE}{index}" for index in range(4)] + ["__proto__", "constructor", "x" * 64]
    names += [f"figure {index}" for index in range(64 - len(names))]
    values = [1e308, -1e308, 5e-324, 0.0, float("nan"), float("inf"), 1e15, -1e-9]

    def tell() -> None:
        now = job.clock()
        job.began = now - 4000
        for at in range(2000):
            figures = {name: values[(at + index) % len(values)] for index, name in enumerate(names)}
            plain = {name: value if abs(value) < float("inf") else None for name, value in figures.items()}
            job.curves.add(now - 4000 + 2 * at, Sampled(steps_per_s=1e300, memory_bytes=1 << 80, figures=plain))
        job.hosts.append(HOSTILE)
        job.tell_hosts()

    running.call(tell)
    size(browser, width)
    complaints(browser)
    enter(browser, running, job)
    until(browser, "some curves", lambda: len(panels(browser)) == 2 + 12)
    browser.find_element("id", "curves-all").click()
    until(browser, "all curves", lambda: len(panels(browser)) == 2 + 64)
    assert browser.execute_script("return document.querySelectorAll('img, script').length") == 1
    assert "taken" not in browser.title
    assert complaints(browser) == []
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    drawn = browser.execute_script("return [...inView].map(each => each.chart.innerHTML.length)")
    assert len(drawn) < 40, "curves that nobody sees are not drawn"
    assert max(drawn) < 60_000
    assert not browser.execute_script("return document.querySelector('#curves').innerHTML.includes('NaN')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_wrong_with_the_cross_and_the_help(
    browser: Any, service: tuple[Service, ShownJob], scheme: str
) -> None:
    running, job = service
    running.call(lambda: record(job))
    with dressed(browser, scheme):
        enter(browser, running, job)
        until(browser, "the curves", lambda: len(panels(browser)) == 5)
        move_to(browser, 0.5, "mouse")
        browser.execute_script("document.querySelector('#curves .word').focus()")
        until(browser, "the help", lambda: browser.find_element("id", "help").is_displayed())
        assert violations(browser) == []
