"""Jobs whose workers' vitals and stacks are asked for, as an operator does."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.job_files import running_jobs
from elastic_driver.worker.engine import native_loader
from tests.support.paths import PROGRAMS
from tests.support.processes.jobs import PATIENCE_S, Job

pytestmark = pytest.mark.integration

try:
    native_loader.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture
def asks() -> Iterator[Callable[[Job], RendezvousClient]]:
    """Gives the operator's client of a job."""
    clients: list[RendezvousClient] = []

    def client(job: Job) -> RendezvousClient:
        (started,) = job.wait_for("its start", lambda: job.events("job_started"))
        (file,) = job.wait_for(
            "its file", lambda: [each for each in running_jobs() if each.job_id == started["job_id"]]
        )
        clients.append(RendezvousClient(file.url, Credential(Identity(Role.OPERATOR)), patience_s=PATIENCE_S))
        return clients[-1]

    yield client
    for each in clients:
        each.close()


def workers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return sorted(status["workers"], key=lambda worker: worker["rank"] or 0)


def test_a_call_that_holds_the_lock_is_seen_and_is_no_frozen_worker(
    tmp_path: Path, asks: Callable[[Job], RendezvousClient]
) -> None:
    command = [sys.executable, str(PROGRAMS / "vitals_program.py"), str(tmp_path)]
    with Job(tmp_path, None, "-np", "2", "--heartbeat-timeout", "5", command=command) as job:
        client = asks(job)

        def trains() -> Any:
            status = client.status()
            known = [worker["vitals"] for worker in workers(status) if worker["vitals"] is not None]
            return status if len(known) == 2 and all(each["steps_per_s"] for each in known) else None

        status = job.wait_for("its steps a second", trains)
        for worker in workers(status):
            vitals = worker["vitals"]
            assert vitals["rss_bytes"] > 1 << 20
            assert vitals["steps"] > 0
            assert abs(vitals["commits"] - vitals["steps"]) <= 1, "one is counted after the other"
            assert vitals["can_dump"]
            assert not vitals["traced"]
            assert vitals["cpu"] < 2
            assert vitals["pulse_s"] < PATIENCE_S
        assert status["steps_per_s"] > 0
        assert status["steps"] > 0
        (allreduces,) = [each for each in status["collectives"] if each["kind"] == "allreduce"]
        assert allreduces["operations"] > 0
        assert allreduces["payload_bytes"] >= 8 * allreduces["operations"]

        os.mkfifo(tmp_path / "hold")
        with (tmp_path / "hold").open("wb"):  # rank 1 has opened it, too

            def stands() -> Any:
                status = client.status()
                waits, holds = (worker["vitals"] for worker in workers(status))
                return status if waits["waits_s"] >= 8 and holds["waits_s"] == 0 and status["waiting"] else None

            status = job.wait_for("who lacks, for longer than a heartbeat may take", stands)
            (lacks,) = status["waiting"]
            assert (lacks["name"], lacks["missing"]) == ("allreduce 'is it over'", [1])
            answer = client.stacks()
            assert answer["waiting"][0]["missing"] == [1]
            stacks = sorted(answer["stacks"], key=lambda one: one["rank"])
            assert [one["reason"] for one in stacks] == ["", ""]
            assert "in holds_the_lock" in stacks[1]["text"]
            assert "in allreduce" in stacks[0]["text"]
            assert [one["pid"] for one in stacks] == [worker["pid"] for worker in workers(status)]
        waits = workers(status)[0]["vitals"]

        def goes_on() -> Any:
            # Each worker's last look is of another moment: only one that has made steps since has booked that wait.
            status = client.status()
            return status if workers(status)[0]["vitals"]["steps"] > waits["steps"] + 5 else None

        status = job.wait_for("the rest", goes_on)
        assert (
            status["waited_s"]
            >= workers(status)[0]["vitals"]["waited_s"]
            >= waits["waited_s"] + waits["waits_s"] - 0.01
        )
        assert (status["round_id"], job.events("worker_hung")) == (1, []), "its pulse beat all the time"
        (tmp_path / "end").touch()
        assert job.wait() == 0


def test_scripts_without_the_library_and_such_that_become_another_program(
    tmp_path: Path, asks: Callable[[Job], RendezvousClient]
) -> None:
    program = (
        "import os, sys, time\n"
        "if os.environ['HOROVOD_RANK'] == '1':\n"
        "    import elastic_driver.worker.rounds.vitals as vitals\n"
        "    vitals.begin(os.environ['ELASTIC_DRIVER_VITALS'])\n"
        "    while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
        "    os.execvp('sleep', ['sleep', '600'])\n"
        "time.sleep(600)"
    )
    go = tmp_path / "go"
    with Job(tmp_path, None, "-np", "2", command=[sys.executable, "-c", program, str(go)]) as job:
        client = asks(job)

        def taken() -> list[dict[str, Any]]:
            return sorted(client.stacks()["stacks"], key=lambda one: one["worker"])

        def both_are_there() -> list[dict[str, Any]] | None:
            now = taken()
            # Before it sleeps, the first one's interpreter starts.
            return now if len(now) == 2 and now[0]["state"] == "S" and now[1]["text"] else None

        first, second = job.wait_for("stacks", both_are_there)
        assert first["reason"] == "its script does not use elastic_driver"
        assert (first["text"], first["rank"]) == ("", 0)
        go.touch()
        # Not by asking for stacks: a signal that was sent to the old program would end the new one.
        job.wait_for("its exec", lambda: Path(f"/proc/{second['pid']}/comm").read_text() == "sleep\n")
        job.wait_for("another program", lambda: taken()[1]["reason"] == "it has replaced itself with another program")
        assert taken()[1]["pid"] == second["pid"]

        def states() -> list[str | None]:
            seen = [worker["vitals"] for worker in client.status()["workers"]]
            return [None if vitals is None else vitals["state"] for vitals in seen]

        # The last look may be from the time of its exec.
        job.wait_for("both asleep", lambda: states() == ["S", "S"])
        assert job.process.poll() is None


def test_stacks_are_the_operators_only(tmp_path: Path) -> None:
    program = (
        "import elastic_driver as hvd\nfrom elastic_driver.rendezvous.client import RendezvousClient\n"
        "from elastic_driver.worker.settings import way_to_driver\nhvd.init()\n"
        "client = RendezvousClient(*way_to_driver(), patience_s=150)\n"
        "try:\n    client.stacks()\nexcept Exception as error:\n    print('refused:', error, flush=True)"
    )
    with Job(tmp_path, None, "-np", "1", command=[sys.executable, "-c", program]) as job:
        assert job.wait() == 0
        assert "refused:" in job.stdout.read_text()


def test_a_worker_that_is_forked_from_a_warmed_process_has_a_page_of_its_own(
    tmp_path: Path, asks: Callable[[Job], RendezvousClient]
) -> None:
    command = [sys.executable, str(PROGRAMS / "vitals_program.py"), str(tmp_path)]
    flags = ("-np", "1", "--min-np", "1", "--max-np", "2", "--preload", "numpy,elastic_driver")
    with Job(tmp_path, "localhost:1\n", *flags, command=command, env={"OMP_NUM_THREADS": "1"}) as job:
        client = asks(job)
        job.wait_for("a warmed process", lambda: job.events("warmed"))
        job.set_hosts("localhost:2\n")

        def trains() -> Any:
            known = workers(client.status())
            return known if len(known) == 2 and all((each["vitals"] or {}).get("steps") for each in known) else None

        first, second = job.wait_for("steps of both", trains)
        # A forked worker's environment ends with the room that its process kept for it.
        assert Path(f"/proc/{second['pid']}/environ").read_bytes().endswith(b"\0\0")
        pages = [psutil.Process(each["pid"]).environ()["ELASTIC_DRIVER_VITALS"] for each in (first, second)]
        assert len(set(pages)) == 2
        assert second["vitals"]["pulse_s"] < PATIENCE_S
        assert second["vitals"]["can_dump"]
        (tmp_path / "end").touch()
        assert job.wait() == 0
