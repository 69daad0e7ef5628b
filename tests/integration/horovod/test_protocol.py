"""Jobs of workers that speak Horovod's older protocol: each endpoint, and the traps for whoever serves it."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import SUPPORT, Job

pytestmark = pytest.mark.integration

WORKER = SUPPORT / "horovod_worker.py"
HERE = "localhost:{0}\n127.0.0.1:{0}\n"
# Horovod's own time limit: whatever waits for it is not helped.
GLOO_S = 30.0


class HorovodJob(Job):
    """See Job; ``flags`` are elasticrun's, ``options`` the worker's."""

    def __init__(self, folder: Path, hosts: str | None, *flags: str, options: str = "", **env: str) -> None:
        (folder / "once").mkdir()
        command = [sys.executable, str(WORKER), *options.split()]
        super().__init__(
            folder,
            hosts,
            "--horovod-protocol",
            "on",
            *flags,
            command=command,
            env={"ONCE": str(folder / "once"), "HOROVOD_GLOO_TIMEOUT_SECONDS": "30", **env},
        )

    def told(self, what: str, **fields: Any) -> list[dict[str, Any]]:
        """What the workers have logged."""
        return [
            line
            for line in self.steps()
            if line["what"] == what and all(line.get(name) == value for name, value in fields.items())
        ]

    def wait_for_told(self, what: str, count: int = 1, **fields: Any) -> list[dict[str, Any]]:
        def found() -> list[dict[str, Any]]:
            lines = self.told(what, **fields)
            return lines if len(lines) >= count else []

        answer: list[dict[str, Any]] = self.wait_for(f"{count} x {what} {fields}", found)
        return answer

    def longest_gap(self, rank: int) -> float:
        """The longest time between two steps of whoever had this rank."""
        times = [line["time"] for line in self.told("step", rank=rank)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.parametrize("asks", ["", "--asks-first"])
def test_a_job(tmp_path: Path, asks: str) -> None:
    with HorovodJob(tmp_path, HERE.format(2), "-np", "4", options=f"--steps 10 --pace 0 {asks}") as job:
        assert job.wait() == 0, job.said()
    assert {(line["rank"], line["size"]) for line in job.told("done")} == {(rank, 4) for rank in range(4)}
    # Held requests instead of polled ones: of each context three, one a lower rank, and two a peer.
    most = max(line["requests"] for line in job.told("done"))
    assert most <= 1 + 1 + 6 * (3 + 3 + 2 * 3)


def test_a_static_job(tmp_path: Path) -> None:
    with HorovodJob(tmp_path, None, "-np", "3", options="--static --steps 5") as job:
        assert job.wait() == 0, job.said()
    assert len(job.told("done")) == 3


def test_a_static_job_fails(tmp_path: Path) -> None:
    with HorovodJob(tmp_path, None, "-np", "3", options="--static --steps 500 --dies 2:1=3") as job:
        assert job.wait() == 1
    assert "exited with code 3" in job.said()


@pytest.mark.parametrize("asks", ["", "--asks-first"])
def test_a_worker_is_killed_and_no_one_waits_for_gloo(tmp_path: Path, asks: str) -> None:
    options = f"--steps 40 --dies 10:3=KILL {asks}"
    with HorovodJob(tmp_path, HERE.format(3), "-np", "6", "--min-np", "3", options=options) as job:
        assert job.wait() == 0, job.said()
    assert {line["size"] for line in job.told("done")} == {3}
    assert [line["step"] for line in job.told("done")] == [40] * 3
    assert job.longest_gap(0) < GLOO_S / 2
    resets = job.told("init", size=3)
    assert {line["pid"] for line in resets} <= {line["pid"] for line in job.told("init", size=6)}


def test_an_exit_code_is_a_failure_too(tmp_path: Path) -> None:
    with HorovodJob(tmp_path, HERE.format(1), "-np", "2", "--min-np", "1", options="--steps 30 --dies 8:1=5") as job:
        assert job.wait() == 0, job.said()
    assert job.longest_gap(0) < GLOO_S / 2
    assert "exited with code 5" in job.said()


@pytest.mark.parametrize("asks", ["", "--asks-first"])
def test_hosts_come_and_go(tmp_path: Path, asks: str) -> None:
    options = f"--steps 100000 {asks}"
    with HorovodJob(tmp_path, "localhost:2\n", "-np", "2", "--min-np", "1", options=options) as job:
        job.wait_for_told("step", 10, size=2)
        job.set_hosts(HERE.format(2))
        job.wait_for_told("step", 20, size=4)
        joined = job.told("step", size=4)
        assert min(line["step"] for line in joined) > 1  # they have the others' state
        job.set_hosts("127.0.0.1:2\n")
        job.wait_for(
            "the others go on",
            lambda: [line for line in job.told("step", size=2) if line["host"] == "127.0.0.1" and line["rank"] == 0],
        )
        assert job.events("host_blacklisted") == []
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
    # All leave at one commit: nobody has lost a step.
    assert job.told("lost") == []
    assert "gets no new workers" not in job.said()


def test_a_joiner_that_takes_long_to_start_costs_the_others_nothing(tmp_path: Path) -> None:
    env = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"}
    options = "--steps 100000 --boot 2.5"
    with HorovodJob(tmp_path, "localhost:1\n", "-np", "1", "--min-np", "1", options=options, **env) as job:
        job.wait_for_told("step", 5, size=1)
        job.set_hosts(HERE.format(1))
        job.wait_for_told("step", 5, size=2)
        assert job.told("aborts") == []
        booted = job.told("start", host="127.0.0.1")[0]["time"]
        assert len([line for line in job.told("step", size=1) if line["time"] > booted]) > 10


def test_one_whose_plan_is_stale_is_started_again_for_its_place(tmp_path: Path) -> None:
    # The second host comes while the worker of the first boots, which was told that there are two of them.
    hosts = "localhost:1\n127.0.0.1:1\n"
    with HorovodJob(tmp_path, "localhost:1\n", "-np", "1", "--min-np", "1", options="--steps 100000 --boot 1") as job:
        job.wait_for_told("step", 5, size=1)
        job.set_hosts(hosts)
        job.wait_for_told("start", 1, host="127.0.0.1")
        job.set_hosts("localhost:2\n127.0.0.1:1\n")
        job.wait_for_told("step", 5, size=3)
        assert job.told("aborts") == []
        assert "gets no new workers" not in job.said()


def test_a_notice_is_repeated_until_it_is_acted_on(tmp_path: Path) -> None:
    options = "--steps 100000 --commit-each 100 --pace 0.03"
    with HorovodJob(tmp_path, "localhost:1\n", "-np", "1", "--min-np", "1", options=options) as job:
        job.wait_for_told("step", 5, size=1)
        job.set_hosts("localhost:2\n")
        job.wait_for_told("step", 5, size=2)
        notices = job.told("notice")
        assert len(notices) >= 2
        assert {line["res"] for line in notices} == {3}
        # The same one, repeated, is none for the next round.
        time.sleep(1.0)
        assert len(job.told("updated")) == 1


def test_one_that_takes_no_notices_is_left_alone(tmp_path: Path) -> None:
    with HorovodJob(tmp_path, "localhost:1\n", "-np", "1", "--min-np", "1", options="--steps 60 --deaf") as job:
        job.wait_for_told("step", 5)
        job.set_hosts("localhost:2\n")
        assert job.wait() == 0, job.said()


def test_rubbish_in_the_registration_runs_nothing(tmp_path: Path) -> None:
    mark = Path("/tmp/elastic_driver_was_here")
    mark.unlink(missing_ok=True)
    with HorovodJob(tmp_path, None, "-np", "1", options="--rubbish") as job:
        assert job.wait() == 1
    assert not mark.exists()
    assert "worker_addresses: not 200" in job.said() + job.stdout.read_text()


def test_rude_requests_harm_nobody(tmp_path: Path) -> None:
    with HorovodJob(tmp_path, None, "-np", "2", options="--steps 10 --rude") as job:
        assert job.wait() == 0, job.said()
    assert {line["status"] for line in job.told("rude")} <= {400, 405, 413, 200}


def test_a_worker_dies_while_they_meet_and_no_other_host_is_blamed(tmp_path: Path) -> None:
    options = "--steps 100000 --dies-meeting 1:2:3"
    with HorovodJob(tmp_path, "localhost:2\n", "-np", "2", "--min-np", "1", options=options) as job:
        job.wait_for_told("step", 5, size=2)
        job.set_hosts("localhost:2\n127.0.0.1:1\n")  # it is rank 2, and dies in the fourth context
        assert job.wait() == 1
    assert "that had the training's state are lost" in job.said()
    assert "host localhost gets no new workers" not in job.said()
    assert job.events("job_ended")[0]["time"] - job.told("step", size=2)[-1]["time"] < GLOO_S / 2


def test_who_does_not_wait_for_the_dead_goes_on(tmp_path: Path) -> None:
    # Of the two on localhost one has nothing to do with it in the contexts that are left.
    options = "--steps 100000 --dies-meeting 1:2:4"
    with HorovodJob(tmp_path, "localhost:2\n", "-np", "2", "--min-np", "1", options=options) as job:
        before = job.wait_for_told("step", 5, size=2)[-1]["step"]
        job.set_hosts("localhost:2\n127.0.0.1:1\n")
        job.wait_for_told("aborts", 1)
        job.wait_for_told("init", 4, size=2)  # in the place of the one that has aborted there is another
        after = job.told("step")[-1]["time"]
        job.wait_for("they go on", lambda: [line for line in job.told("step", size=2) if line["time"] > after])
        assert job.told("step")[-1]["step"] >= before - 1
        assert "host localhost gets no new workers" not in job.said()


def test_one_dies_at_the_start_and_the_rest_begin_again(tmp_path: Path) -> None:
    options = "--steps 10 --dies-meeting 1:1:2"
    with HorovodJob(tmp_path, "localhost:1\n127.0.0.1:1\n", "-np", "2", "--min-np", "1", options=options) as job:
        assert job.wait() == 1  # nobody is left who had begun
    assert "that had the training's state are lost" in job.said()
    assert "host localhost gets no new workers" not in job.said()


def test_a_stopped_worker_is_found(tmp_path: Path) -> None:
    flags = ("-np", "2", "--min-np", "1", "--heartbeat-timeout", "2")
    options = "--steps 30 --dies 8:1=STOP"
    with HorovodJob(tmp_path, HERE.format(1), *flags, options=options) as job:
        assert job.wait() == 0, job.said()
    assert job.longest_gap(0) < GLOO_S / 2


def test_the_end_needs_no_good_will(tmp_path: Path) -> None:
    flags = ("-np", "2", "--grace-time", "0.5")
    with HorovodJob(tmp_path, None, *flags, options="--steps 100000 --stubborn") as job:
        job.wait_for_told("step", 4)
        job.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert job.wait() == 143
        assert time.monotonic() - began < 20


@pytest.mark.parametrize(("limit", "code"), [(0, 1), (1, 0)])
def test_the_limit_of_resets(tmp_path: Path, limit: int, code: int) -> None:
    flags = ("-np", "2", "--min-np", "1", "--reset-limit", str(limit))
    with HorovodJob(tmp_path, HERE.format(1), *flags, options="--steps 20 --dies 5:1=KILL") as job:
        assert (job.wait() != 0) == bool(code), job.said()
    assert ("the limit of 0 unplanned resets" in job.said()) == (limit == 0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_user_gets_no_answer(tmp_path: Path) -> None:
    script = tmp_path / "stranger.py"
    script.write_text(
        "import os, socket\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    with socket.socket() as sock:\n"
        "        sock.connect(('127.0.0.1', int(os.environ['HOROVOD_GLOO_RENDEZVOUS_PORT'])))\n"
        "        sock.sendall(b'DELETE /global/0 HTTP/1.1\\r\\nContent-Length: 0\\r\\n\\r\\n')\n"
        "        answer = sock.recv(100)\n"
        "except OSError:\n"
        "    answer = b''\n"
        "print('answer', answer, flush=True)\n"
    )
    flags = ("-np", "1", "--horovod-protocol", "on", "--on-change", "restart")
    with Job(tmp_path, None, *flags, command=[sys.executable, str(script)]) as job:
        assert job.wait() == 0, job.said()
    assert "answer b''" in job.stdout.read_text()
