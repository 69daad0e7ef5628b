"""The page of a real job, over real HTTP: how its links are given, and where it listens."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import urllib3

from tests.support.paths import ROOT
from tests.support.processes.jobs import FORKING, PROGRAM, Job
from tests.support.processes.subcommands import Ran, elasticrun

pytestmark = pytest.mark.integration


def elasticrun_page(job: Job, *flags: str, **environment: str) -> Ran:
    job.wait_for_steps(1)  # it can be found by then
    job_id = job.events("job_started")[0]["job_id"]
    return elasticrun("page", job_id, *flags, **environment)


def test_a_link_leads_to_the_job_and_is_written_nowhere(tmp_path: Path) -> None:
    flags = ("-np", "1", "--page-address", "0.0.0.0")
    with Job(tmp_path, "localhost:1\n", *flags) as job, requests.Session() as browser:
        job.wait_for_steps(1)
        elsewhere, here = elasticrun_page(job).stdout.split()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/login\?code=[\w-]{32}", here)
        assert elsewhere.startswith("https://0.0.0.0:")
        page = browser.get(here, timeout=150)
        token = page.history[0].headers["Location"].partition("#token=")[2]
        assert (page.status_code, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
        url = here.partition("/login")[0]
        state = browser.get(f"{url}/state", timeout=150).json()
        assert [worker["rank"] for worker in state["workers"].values()] == [0]
        assert requests.get(f"{url}/state", timeout=150).status_code == 401
        with browser.get(f"{url}/feed", stream=True, timeout=150) as feed:
            lines = feed.iter_lines(chunk_size=1)
            assert next(lines) == b"event: you"
            you = json.loads(next(lines).partition(b": ")[2])
            assert not you["may_act"]
        asked = {"Origin": url, "X-Elastic-Token": token}
        assert browser.post(f"{url}/action", json={"do": "end"}, headers=asked, timeout=150).status_code == 403
        with requests.Session() as other:
            link = elasticrun_page(job, "--operator").stdout.split()[0]
            with pytest.warns(urllib3.exceptions.InsecureRequestWarning):  # nobody has signed it
                entered = other.get(link, timeout=150, verify=False, allow_redirects=False)
            assert entered.status_code == 303
            assert "; Secure" in entered.headers["Set-Cookie"]
        job.process.terminate()
        job.process.wait(150)
        for code in (here[-32:], link[-32:], token):
            assert code not in job.event_log.read_text() + job.said()


def test_a_browser_is_given_a_file_and_no_link(tmp_path: Path) -> None:
    browser, given = tmp_path / "browser", tmp_path / "given"
    browser.write_text(f'#!/bin/sh\necho "$@" > {given}\n')
    browser.chmod(0o755)
    with Job(tmp_path, "localhost:1\n", "-np", "1") as job:
        told = elasticrun_page(job, "--open", BROWSER=str(browser))
        assert told.returncode == 0, told.stderr
        # Any user of the machine can read a command line.
        url = given.read_text().strip()
        assert url.startswith("file:///")
        assert told.stdout.strip()[-32:] not in url
        file = Path(url.removeprefix("file://"))
        assert (file.stat().st_mode & 0o777, file.stat().st_uid) == (0o600, os.getuid())
        link = told.stdout.strip()
        assert f'content="0; url={link}"' in file.read_text()
        arrived = requests.get(link, timeout=150, allow_redirects=False, headers={"Sec-Fetch-Site": "cross-site"})
        assert (arrived.status_code, "Set-Cookie" in arrived.headers) == (200, True)
        elasticrun_page(job, "--open", BROWSER=str(browser))
        assert link not in file.read_text()
        job.process.terminate()
        job.process.wait(150)
        assert not file.exists()


def test_without_a_page_there_is_none(tmp_path: Path) -> None:
    key = tmp_path / "operator"
    key.write_text("0123456789abcdef" * 4)
    flags = ("-np", "1", "--no-page", "--operator-token-file", str(key))
    with Job(tmp_path, "localhost:1\n", *flags) as job:
        refused = elasticrun_page(job)
        assert refused.returncode == 2
        assert "no page" in refused.stderr
        url = job.events("job_started")[0]["rendezvous"]
        assert requests.get(f"{url}/", timeout=150).status_code == 404
        assert requests.get(f"{url}/healthz", timeout=150).text == "ok\n", "probes have no credential, and need none"


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "[::1", ":80", "192.0.2.1:80"])
def test_an_address_that_cannot_be_had_is_bad_usage(address: str) -> None:
    ran = elasticrun("-np", "1", "--page-address", address, "true")
    assert ran.returncode == 2
    assert "cannot" in ran.stderr


def test_a_terminal_gets_a_link(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        command = [sys.executable, *FORKING, "-np", "1", sys.executable, str(PROGRAM)]
        environ = {**os.environ, "STEP_LOG": str(tmp_path / "steps"), "STEPS": "3"}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stderr=theirs, stdout=theirs, env=environ, cwd=ROOT
        )
        try:
            said = b""
            while b"\n" not in said.partition(b"/login?code=")[2]:
                said += os.read(ours, 4096)
            assert re.search(rb"elasticrun: page: http://127\.0\.0\.1:\d+/login\?code=[\w-]{32}\r\n", said)
            os.set_blocking(ours, False)
        finally:
            process.terminate()
            process.wait(150)
    finally:
        os.close(ours)
        os.close(theirs)
