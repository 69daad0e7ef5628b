"""A real job, and a real Prometheus that scrapes it with the files of examples/monitoring."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from tests.support.processes.jobs import Job

pytestmark = [pytest.mark.monitoring]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/monitoring"
PATIENCE_S = 90.0


class Prometheus:
    """One, on loopback."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def ask(self, query: str) -> list[dict[str, Any]]:
        """The samples that a query finds now."""
        url = f"http://127.0.0.1:{self.port}/api/v1/query"
        with contextlib.suppress(requests.ConnectionError):
            answer = requests.get(url, params={"query": query}, timeout=20)
            if answer.status_code == 200:
                found: list[dict[str, Any]] = answer.json()["data"]["result"]
                return found
        return []

    def until(self, query: str) -> list[dict[str, Any]]:
        """Blocks until a query finds something."""
        end = time.monotonic() + PATIENCE_S
        while not (found := self.ask(query)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, f"not seen: {query}\n{self.log.read_text()[-3000:]}"
            time.sleep(0.1)
        return found


def write_reader_token(path: Path, *words: str) -> str:
    command = [sys.executable, "-m", "elastic_driver", "jobs", "--write-reader-token", str(path), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples, quicker than they are."""
    folder = tmp_path / "monitoring"
    shutil.copytree(EXAMPLES, folder)
    (folder / "jobs/example.json").unlink()
    config = (folder / "prometheus.yml").read_text().replace("15s", "250ms")
    (folder / "prometheus.yml").write_text(config)
    return folder


@pytest.fixture
def prometheus(folder: Path) -> Iterator[Prometheus]:
    one = Prometheus(folder)
    yield one
    one.process.send_signal(signal.SIGTERM)
    try:
        one.process.wait(30)
    except subprocess.TimeoutExpired:
        one.process.kill()
        one.process.wait()


def test_prometheus_sees_a_job_lose_a_worker(
    folder: Path, prometheus: Prometheus, tmp_path: Path, runtime: Path
) -> None:
    hosts = "localhost:2\n127.0.0.1:1\n"
    durable = ("--durable-dir", str(tmp_path / "commits"), "--heartbeat-timeout", "6")
    with Job(tmp_path, hosts, "-np", "3", "--min-np", "1", *durable) as job:
        job.wait_for_steps(3)
        url = write_reader_token(folder / "reader.token")
        (folder / "jobs/job.new").write_text(json.dumps([{"targets": [urlsplit(url).netloc]}]))
        (folder / "jobs/job.new").rename(folder / "jobs/job.json")
        prometheus.until('up{job="elastic_driver"} == 1')
        prometheus.until('elastic_driver_workers{phase="member"} == 3')
        prometheus.until('elastic_driver_rounds_total{cause="start"} == 1')
        prometheus.until("elastic_driver_discovery_duration_seconds_count > 3")
        (info,) = prometheus.until("elastic_driver_job_info")
        assert info["metric"]["job_id"] == job.events("job_started")[0]["job_id"]
        victim = next(line["pid"] for line in job.steps() if line["rank"] == 2)
        os.kill(victim, signal.SIGKILL)
        prometheus.until('elastic_driver_rounds_total{cause="worker_failed"} >= 1')
        prometheus.until('elastic_driver_worker_failures_total{cause="signal"} == 1')
        prometheus.until("elastic_driver_reset_duration_seconds_count >= 1")
        prometheus.until("elastic_driver_stall_seconds_total > 0")
        prometheus.until('elastic_driver_hosts{state="blacklisted"} == 1')
        prometheus.until('ALERTS{alertname="ElasticHostsBlacklisted", alertstate="pending"}')
        prometheus.until("elastic_driver_durable_commits > 0 and elastic_driver_commits > 0")
        prometheus.until("elastic_driver_durable_folders_in_trouble == 0")
    prometheus.until('up{job="elastic_driver"} == 0')


def test_one_token_reads_job_after_job(tmp_path: Path, runtime: Path) -> None:
    key, token = tmp_path / "operator", tmp_path / "reader"
    key.write_text("0123456789abcdef" * 4)
    write_reader_token(token, "--token-file", str(key))  # before any job runs
    bearer = {"Authorization": f"Bearer {token.read_text().strip()}"}
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        flags = ("-np", "1", "--operator-token-file", str(key))
        with Job(tmp_path / str(number), "localhost:1\n", *flags, command=["sleep", "1000"]) as job:
            url = job.wait_for("its start", lambda: job.events("job_started"))[0]["rendezvous"]
            answer = requests.get(f"{url}/metrics", headers=bearer, timeout=20)
            assert answer.status_code == 200
            assert f'job_id="{job.events("job_started")[0]["job_id"]}"' in answer.text
            refused = requests.get(
                f"{url}/metrics", headers={"Authorization": f"Bearer {'0123456789abcdef' * 4}"}, timeout=20
            )
            assert refused.status_code == 401, "the operator's key does not travel"
