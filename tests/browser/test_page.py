"""The page in Chromium: what is seen and done there, as people see and do it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_driver.health.findings import StragglerFound
from elastic_driver.health.sampler import Sampled
from elastic_driver.reporting.happenings import JobEnded, Summary
from tests.browser.browsing import Late, address, complaints, dressed, enter, size, text, until, violations
from tests.support.fakes.rendezvous_service import Service, serving
from tests.support.fakes.shown_job import ShownJob
from tests.support.network.relay import relaying
from tests.support.processes.jobs import Job

pytestmark = pytest.mark.browser


def test_it_is_shown_changes_by_itself_and_the_link_is_good_once(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    running, job = service
    complaints(browser)
    link = enter(browser, running, job)
    assert "code" not in browser.current_url
    assert text(browser, "#explain") == "round 1 runs with 4 workers"
    assert text(browser, "#fleet").count("rank ") == 4
    assert browser.execute_script("return document.querySelectorAll('#chart rect.round').length") == 1
    assert complaints(browser) == []  # nothing that the policy forbids
    running.call(lambda: job.lose_host("node001"))
    until(browser, "the loss", lambda: "round 2 runs with 2 workers" in text(browser, "#explain"))
    until(browser, "its cool-down", lambda: "blacklisted" in text(browser, "#fleet"))
    assert browser.execute_script("return document.querySelectorAll('#chart path.dead').length") >= 1
    assert "killed by SIGKILL" in text(browser, "#warns")
    browser.delete_all_cookies()
    browser.get(link)
    assert "has already been used" in text(browser)
    browser.get(address(running))
    assert "Not logged in" in text(browser)
    assert "node000" not in browser.page_source


def test_what_others_write_is_text(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    bad = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
    job.output["node000[0]#0"] = ["\x1b[31mred\x1b[0m", bad]
    job.hosts.append(bad)
    running.call(job.tell_hosts)
    job.explain = bad
    enter(browser, running, job)
    assert text(browser, "#explain") == bad
    until(browser, "the host", lambda: bad in text(browser, "#fleet"))
    browser.find_element("css selector", '[aria-label="Output of worker node000[0]"]').click()
    until(browser, "the output", lambda: bad in text(browser, "#shown-text"))
    assert text(browser, "#shown-text").startswith("red\n")
    assert browser.execute_script("return document.querySelectorAll('img, script').length") == 1
    assert "taken" not in browser.title


def test_who_may_only_look_is_offered_nothing_else(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    enter(browser, running, job)
    assert "--operator" in text(browser, "#may")
    assert not browser.find_element("id", "end").is_displayed()
    script = (
        "return fetch('action', {method: 'POST', headers: {'X-Elastic-Token': you.token}, body: '{\"do\":\"end\"}'})"
    )
    assert browser.execute_script(f"{script}.then(answer => answer.status)") == 403
    assert job.done == []


def test_a_host_is_drained_with_the_keyboard_alone(browser: Any, service: tuple[Service, ShownJob]) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    running, job = service
    enter(browser, running, job, may_act=True)

    def press(key: str) -> None:
        ActionChains(browser).send_keys(key).perform()

    def focused() -> str:
        return str(browser.execute_script("const e = document.activeElement; return e.ariaLabel || e.innerText"))

    def go_to(label: str) -> None:
        for _ in range(80):
            if focused() == label:
                return
            press(Keys.TAB)
        raise AssertionError(f"the keyboard does not reach {label!r}")

    go_to("Drain host node000")
    press(Keys.ENTER)
    until(browser, "a question", lambda: "Its 2 workers leave at their next commit" in text(browser, "#ask"))
    assert focused() == "Cancel"
    press(Keys.ESCAPE)
    until(browser, "no question", lambda: not browser.find_element("id", "ask").is_displayed())
    assert job.done == []
    go_to("Drain host node000")
    press(Keys.ENTER)
    until(browser, "a question", lambda: browser.find_element("id", "ask").is_displayed())
    go_to("Drain")
    press(Keys.ENTER)
    until(browser, "it is done", lambda: job.done == [("drain", "node000")])
    until(browser, "it is said", lambda: "host node000 is drained" in text(browser, "#shown-text"))
    until(browser, "it is shown", lambda: "drained" in text(browser, "#fleet"))


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_it_fits_and_is_dark_where_that_is_wanted(browser: Any, service: tuple[Service, ShownJob], width: int) -> None:
    running, job = service
    job.drained.add("node001")
    job.more["suspected"] = [
        {"worker": job.workers[3].key, "rank": 3, "why": "has done no step", "since_s": 31.0, "limit_s": 60.0}
    ]
    size(browser, width)
    enter(browser, running, job, may_act=True)
    until(browser, "all that makes rows wide", lambda: "(suspected)" in text(browser, "#fleet"))
    edges = "return ['fleet', 'fleet-card'].map(id => document.getElementById(id).getBoundingClientRect().right)"
    table, card = browser.execute_script(edges)
    assert table < card, "nothing sticks out of the card"
    backs = []
    for scheme in ("light", "dark"):
        with dressed(browser, scheme):
            backs.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert backs == ["rgb(246, 247, 249)", "rgb(14, 17, 22)"]


def test_a_job_that_is_stopped_goes_on_and_ends(browser: Any, tmp_path: Path) -> None:
    env = {"ELASTIC_DRIVER_RUNTIME_DIR": str(tmp_path)}
    with Job(tmp_path, "localhost:1\n127.0.0.1:1\n", "-np", "2", "--min-np", "1", env=env) as job:
        job.wait_for_steps(2)
        started = job.events("job_started")[0]
        command = [sys.executable, "-m", "elastic_driver", "page", started["job_id"]]
        link = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60, env={**os.environ, **env}
        )
        browser.get(link.stdout.split()[0])
        until(browser, "two workers", lambda: text(browser, "#fleet").count("rank ") == 2)
        os.kill(job.process.pid, signal.SIGSTOP)
        try:
            until(browser, "the silence", lambda: "No data from the driver" in text(browser, "#banner"))
            assert text(browser, "#fleet").count("rank ") == 2
        finally:
            os.kill(job.process.pid, signal.SIGCONT)
        until(browser, "it is live again", lambda: text(browser, "#live") == "live")
        pid = next(event["pid"] for event in job.events("worker_started") if "127.0.0.1" in event["worker"])
        os.kill(pid, signal.SIGKILL)
        until(browser, "the loss", lambda: text(browser, "#fleet").count("rank ") == 1)
        job.process.send_signal(signal.SIGTERM)
        until(browser, "its end", lambda: "the last known state" in text(browser, "#banner"))
        until(browser, "how it ended", lambda: "failed (143)" in text(browser, "#phase"))
        assert link.stdout.split("code=")[1][:20] not in job.event_log.read_text() + job.said()


def operators_link(job: Job, env: dict[str, str]) -> str:
    started = job.events("job_started")[0]
    command = [sys.executable, "-m", "elastic_driver", "page", "--operator", started["job_id"]]
    given = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env={**os.environ, **env})
    return given.stdout.split()[0]


def test_an_operator_asks_for_stacks_drains_undoes_and_ends_a_real_job(browser: Any, tmp_path: Path) -> None:
    env = {"ELASTIC_DRIVER_RUNTIME_DIR": str(tmp_path)}
    hosts = "localhost:1\n127.0.0.1:1\n"
    with Job(tmp_path, hosts, "-np", "2", "--min-np", "1", env=env) as job:
        job.wait_for_steps(2)
        browser.get(operators_link(job, env))

        def answered(words: str) -> None:
            until(browser, f"the answer {words!r}", lambda: words in text(browser, "#shown-text"))
            browser.find_element("id", "shown-close").click()

        def confirm(label: str, word: str) -> None:
            css = f'[aria-label="{label}"]'
            until(browser, label, lambda: browser.find_elements("css selector", css))
            browser.find_element("css selector", css).click()
            until(browser, "a question", lambda: text(browser, "#ask-yes") == word)
            browser.find_element("id", "ask-yes").click()

        until(browser, "two workers", lambda: text(browser, "#fleet").count("rank ") == 2)
        browser.find_element("id", "stacks").click()
        until(browser, "the stacks", lambda: "step_program.py" in text(browser, "#shown-text"))
        assert "rank" in text(browser, "#shown-text")
        browser.find_element("id", "shown-close").click()

        confirm("Drain host 127.0.0.1", "Drain")
        answered("127.0.0.1")
        until(browser, "one worker", lambda: "drained" in text(browser, "#fleet").lower())
        job.wait_for_steps(1)
        until(browser, "one member", lambda: text(browser, "#tiles").startswith("Workers\n1"))
        confirm("Undo the drain of host 127.0.0.1", "Undo the drain")
        answered("127.0.0.1")
        until(browser, "both again", lambda: text(browser, "#tiles").startswith("Workers\n2"))
        assert "drained" not in text(browser, "#fleet").lower()

        browser.find_element("id", "end").click()
        until(browser, "a question", lambda: text(browser, "#ask-yes") == "End the job")
        browser.find_element("id", "ask-yes").click()
        until(browser, "its end", lambda: "the last known state" in text(browser, "#banner"))
        assert not browser.find_element("id", "end").is_displayed()
        assert job.wait() == 143


def test_the_file_that_page_open_writes_logs_the_browser_in_once(browser: Any, tmp_path: Path) -> None:
    """Also under another site's name, which it comes from for the browser: a file's."""
    opened, opener = tmp_path / "opened", tmp_path / "opener"
    opener.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
    opener.chmod(0o755)
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with Job(tmp_path, "localhost:1\n", "-np", "1", env=env) as job:
        job.wait_for_steps(1)
        command = [sys.executable, "-m", "elastic_driver", "page", "--open", job.events("job_started")[0]["job_id"]]
        env |= {"BROWSER": f"{opener} %s"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **env})
        assert (done.returncode, done.stderr) == (0, "")
        url = opened.read_text()
        assert "code=" not in url, "what is on the browser's command line is no link that logs in"
        file = Path(url.removeprefix("file://"))
        assert file.stat().st_mode & 0o777 == 0o600
        browser.get(url)
        until(browser, "the page is live", lambda: text(browser, "#live") == "live")
        assert browser.current_url.startswith("http://127.0.0.1:")
        assert "code" not in browser.current_url
        browser.delete_all_cookies()
        browser.get(url)
        until(browser, "it is good once", lambda: "has already been used" in text(browser))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)])
def test_axe_finds_nothing_wrong_with_it(
    browser: Any, service: tuple[Service, ShownJob], scheme: str, width: int
) -> None:
    """Contrast as WCAG AA asks for it, names, roles, and the rest of what it knows."""
    running, job = service
    job.drained.add("node001")
    suspect = {"worker": job.workers[3].key, "rank": 3, "why": "has done no step", "since_s": 31.0, "limit_s": 60.0}
    job.more |= {"suspected": [suspect], "discovery_fails": {"reason": "exit code 1", "age_s": 3.0}}
    running.call(lambda: job.curves.add(job.clock(), Sampled(cpu=1.0, waiting=0.2, figures={"loss": 0.5})))
    size(browser, width)
    with dressed(browser, scheme):
        enter(browser, running, job, may_act=True)
        running.call(lambda: job.feed.hear(StragglerFound(job.workers[1], 1, 0.2, 0.1, 0.5, 0.5, 100)))
        until(browser, "who is slow", lambda: "training (slow)" in text(browser, "#fleet"))
        assert violations(browser) == []
        job.more["stalled"] = {"since_s": 5.0, "waits_for": []}
        running.call(lambda: job.lose_host("node001"))
        until(browser, "a stall", lambda: text(browser, "#phase") == "stalled")
        assert violations(browser) == []
        running.call(lambda: job.feed.hear(JobEnded(1, "a worker failed", Summary())))
        until(browser, "its end", lambda: text(browser, "#phase") == "failed (1)")
        assert violations(browser) == []


def test_text_in_pictures_that_can_hardly_be_read_is_found(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    enter(browser, running, job)
    until(browser, "the timeline", lambda: browser.find_elements("css selector", "#chart .round"))
    assert violations(browser) == []
    for name in ("text", ".label"):
        sheet = f"const sheet = new CSSStyleSheet(); sheet.replaceSync('#chart {name} {{ fill: #888 !important; }}');"
        browser.execute_script(f"{sheet} document.adoptedStyleSheets = [sheet];")
        assert any("in a picture" in each for each in violations(browser)), name


def test_a_job_that_has_failed_keeps_what_there_is_to_say_of_it(browser: Any, tmp_path: Path) -> None:
    """The driver ends with the job, and nobody can be asked any more."""

    def has_trained() -> bool:
        tiles = text(browser, "#tiles").split("\n")
        shown = dict(zip(tiles[::2], tiles[1::2], strict=False))
        return all(shown.get(name, "0") not in ("0", "–") for name in ("Commit", "Steps"))

    when = tmp_path / "when"
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "FAULT": "exception 0 0", "WHEN": str(when)}
    with Job(tmp_path, "localhost:2\n", "-np", "2", env=env) as job:
        job.wait_for_steps(2)
        browser.get(operators_link(job, env))
        until(browser, "commits and steps", has_trained)
        when.touch()
        assert job.wait() == 1
        until(browser, "its end", lambda: "the last known state" in text(browser, "#banner"))
    assert has_trained()
    assert "failed first" in text(browser, "#h-failure")
    assert "a bug in the training script" in text(browser, "#failure-text")
    browser.find_element("css selector", '#warns [aria-label^="Output of worker"]').click()
    until(browser, "its output", lambda: "a bug in the training script" in text(browser, "#shown-text"))


def test_slots_that_are_drained_are_no_drained_host(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    job.drained_slots["node001"] = [1]
    enter(browser, running, job, may_act=True)
    until(browser, "the slot", lambda: "slot 1 drained" in text(browser, "#fleet"))

    def shown(label: str) -> list[bool]:
        return [each.is_displayed() for each in browser.find_elements("css selector", f'[aria-label="{label}"]')]

    assert shown("Drain host node001") == shown("Undo the drain of host node001") == [True]
    assert (shown("Drain host node000"), shown("Undo the drain of host node000")) == ([True], [False])


def test_who_logs_out_sees_nothing_more(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    with relaying(running.port) as relay:
        code = running.call(lambda: job.sessions.new_code(may_act=False))
        browser.get(f"https://127.0.0.1:{relay.port}/login?code={code}")
        until(browser, "the page is live", lambda: text(browser, "#live") == "live")
        relay.cut()
        browser.find_element("id", "logout").click()
        until(browser, "it says so", lambda: "still logged in" in text(browser, "#shown-text"))
        browser.find_element("id", "shown-close").click()
        relay.mend()
        until(browser, "the page is live", lambda: text(browser, "#live") == "live")
        browser.find_element("id", "logout").click()
        until(browser, "the login", lambda: "Not logged in" in text(browser))
        assert "node000" not in browser.page_source
        browser.back()
        assert "node000" not in browser.page_source
        browser.get(f"https://127.0.0.1:{relay.port}/")
        assert "Not logged in" in text(browser)


def test_a_lost_connection_is_told_and_what_was_missed_is_shown(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    running, job = service
    with relaying(running.port) as relay:
        code = running.call(lambda: job.sessions.new_code(may_act=False))
        browser.get(f"https://127.0.0.1:{relay.port}/login?code={code}")
        until(browser, "the page is live", lambda: text(browser, "#live") == "live")
        relay.silence()
        until(browser, "the silence", lambda: "No data from the driver" in text(browser, "#banner"))
        running.call(lambda: job.lose_host("node001"))
        relay.cut()
        until(browser, "the loss", lambda: "Cannot reach" in text(browser, "#banner"))
        assert text(browser, "#live") == "connecting"
        assert text(browser, "#explain") == "round 1 runs with 4 workers"  # what it has stays
        relay.mend()
        until(browser, "the page is live", lambda: text(browser, "#live") == "live")
        until(browser, "what was missed", lambda: text(browser, "#explain") == "round 2 runs with 2 workers")
        assert "killed by SIGKILL" in text(browser, "#story")
        assert not browser.find_element("id", "banner").is_displayed()


def test_another_driver_at_the_same_port_is_not_taken_for_the_first(
    browser: Any, service: tuple[Service, ShownJob]
) -> None:
    running, job = service
    late = Late()
    with serving(web=late) as other:
        late.job = other.call(lambda: ShownJob(2, call_later=asyncio.get_running_loop().call_later))
        with relaying(running.port) as relay:
            code = running.call(lambda: job.sessions.new_code(may_act=False))
            browser.get(f"https://127.0.0.1:{relay.port}/login?code={code}")
            until(browser, "the page is live", lambda: text(browser, "#live") == "live")
            relay.cut()
            relay.lead_to(other.port)
            relay.mend()
            until(browser, "it is said", lambda: "no longer logged in" in text(browser, "#banner"))
            assert text(browser, "#explain") == "round 1 runs with 4 workers"


def test_the_page_shows_who_is_slow_and_who_is_suspected(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    job.more["suspected"] = [
        {"worker": job.workers[3].key, "rank": 3, "why": "has done no step", "since_s": 31.0, "limit_s": 60.0}
    ]
    enter(browser, running, job)
    running.call(lambda: job.feed.hear(StragglerFound(job.workers[1], 1, 0.2, 0.1, 0.5, 0.5, 100)))
    until(browser, "who is slow", lambda: "training (slow)" in text(browser, "#fleet"))
    assert "training (suspected)" in text(browser, "#fleet")
    # When it is ended, and whether, is not known from this: it is told where it is.
    wanted = f"Worker {job.workers[3]} (rank 3) may hang: has done no step (suspected after 60 s)"
    assert text(browser, "#suspects") == wanted
    assert "is slow" in text(browser, "#warns")
    running.call(lambda: job.feed.hear(JobEnded(0, "all workers ended with 0", Summary())))
    until(browser, "its end", lambda: text(browser, "#phase") == "finished")
    assert "suspected" not in text(browser, "#fleet")
    assert not browser.find_element("id", "suspects").is_displayed()


def test_phases_are_told_in_the_words_of_elasticrun_status(browser: Any, service: tuple[Service, ShownJob]) -> None:
    running, job = service
    job.running = False
    enter(browser, running, job)
    until(browser, "who joins", lambda: text(browser, "#fleet").count("joining") == 4)
    job.more["on_change"] = "restart"
    until(browser, "who runs", lambda: text(browser, "#fleet").count("running") == 4)
    job.running = True
    until(browser, "who trains", lambda: text(browser, "#fleet").count("training") == 4)
    browser.find_element("id", "fold").click()
    until(browser, "how many of them", lambda: text(browser, "#fleet").count("2 training") == 2)
    job.more["chief"] = None
    until(browser, "who serves", lambda: text(browser, "#fleet").count("2 serving") == 2)


@pytest.mark.parametrize(
    ("hosts", "wanted"),
    [
        (["gpu-0017.cluster.example", "gpu-0018.cluster.example"], {"gpu-0017", "gpu-0018"}),
        (["training-job-worker-17", "training-job-worker-18"], {"train…orker-17", "train…orker-18"}),
        (["10.0.0.17", "10.1.0.17"], {"10.0.0.17", "10.1.0.17"}),
    ],
)
def test_hosts_on_the_timeline_can_be_told_apart(
    browser: Any, service: tuple[Service, ShownJob], hosts: list[str], wanted: set[str]
) -> None:
    running, job = service
    job.hosts, job.workers = hosts, []
    running.call(job.tell_hosts)
    enter(browser, running, job)
    script = "return [...document.querySelectorAll('#chart text')].map(t => t.firstChild.data)"
    until(browser, "their names", lambda: wanted <= set(browser.execute_script(script)))
