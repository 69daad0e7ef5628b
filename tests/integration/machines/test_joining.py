"""Hosts that join a job by themselves: an empty job begins with them, they leave without a lost step, or are lost."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.network.machines import MachinesJob, command_of, is_dead, made_machines, marks, wait_for
from tests.support.network.namespaces import NamespaceHost
from tests.support.processes.jobs import check_agreement

pytestmark = marks

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a token of the test's own"


def joining(host: NamespaceHost, folder: Path, driver: str, *words: str, token: str = TOKEN) -> subprocess.Popen[Any]:
    """An agent on a machine; what it says is in a file of the machine's name."""
    file = folder / f"token-{host.name}"
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    flags = ("--driver", driver, "--slots", "2", "--join-token-file", str(file), "--agent-timeout", "4", *words)
    with (folder / f"{host.name}.txt").open("w") as said:
        # Its workers are to see what is set on their host, and not on the driver's.
        env = host.environment() | {"ONLY_ON": host.name, "HOME": f"/home-of-{host.name}"}
        command = [sys.executable, "-m", "elastic_driver", "join", *flags]
        return host.popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL, env=env)


def test_hosts_join_leave_and_vanish(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    flags = ("-np", "4", "--min-np", "1", "--accept-agents", "--join-token-file", str(token))
    with (
        made_machines(sshd=False) as machines,
        MachinesJob(machines, tmp_path, None, *flags, env={"HOME": "/home-of-driver", "FROM_DRIVER": "yes"}) as job,
    ):
        node0, node1, node2 = machines
        driver: str = job.wait_for("where to join", lambda: job.said().partition("join --driver ")[2]).split()[0]
        assert driver.startswith(f"https://{node0.ipv4}:")

        # A stranger is told so in one line, and costs nobody anything.
        stranger = joining(node2, tmp_path, driver, token="the token of another job")
        first = joining(node1, tmp_path, driver)
        job.wait_for_event("host_ready", host="node1", joined=2)
        assert stranger.wait(60) == 2
        refusal = (tmp_path / "node2.txt").read_text()
        assert refusal.count("\n") == 1, refusal
        assert not job.events("round_formed"), "two slots are too few"
        second = joining(node2, tmp_path, driver)
        job.wait_for_steps(4)
        assert first.poll() is None
        for host in (node1, node2):
            env = Path(f"/proc/{job.workers(host)[0]}/environ").read_text().split("\0")
            assert {f"ONLY_ON={host.name}", f"HOME=/home-of-{host.name}", "FROM_DRIVER=yes"} <= set(env)
        assert TOKEN not in "".join(command_of(pid) for host in machines for pid in host.pids())
        descriptors = job.descriptors()

        # The driver's own machine may join as well, and leaves on SIGTERM.
        at = job.mark()
        third = joining(node0, tmp_path, driver)
        job.wait_for_steps(6, after=at)
        at = job.mark()
        third.send_signal(signal.SIGTERM)
        assert third.wait(60) == 0
        job.wait_for_steps(4, after=at)
        # It has left when the command has ended.
        left = job.here("leave", host=node2)
        assert (left.returncode, left.stderr) == (0, "")
        assert second.wait(60) == 0
        job.wait_for_steps(2, after=job.mark())
        job.check_no_step_is_lost()
        assert not [event for event in job.events("worker_exited") if event["returncode"]]

        # The same host again; and killed, it is lost.
        at = job.mark()
        second = joining(node2, tmp_path, driver)
        job.wait_for_steps(4, after=at)
        victims, at = job.workers(node2), job.mark()
        second.kill()
        job.wait_for_event("host_lost", host="node2")
        job.wait_for_steps(2, after=at)
        check_agreement(job.steps())
        wait_for("its workers' end", lambda: all(map(is_dead, victims)))
        second = joining(node2, tmp_path, driver)
        job.wait_for_steps(4, after=job.mark())
        job.check_descriptors(descriptors)
        job.end()
        assert first.wait(60) == second.wait(60) == 75
        assert TOKEN not in job.said() + "".join(path.read_text() for path in tmp_path.glob("node*.txt"))


def test_the_example_of_the_readme_trains_on_both_machines(tmp_path: Path) -> None:
    """Its commands as they stand there, but for the driver's address; its numpy script is quicker than PyTorch's."""
    blocks = re.findall(r"^```(?:text|python)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (script,) = (block for block in blocks if block.startswith("# train_numpy.py\n"))
    (tmp_path / "train.py").write_text(script)
    (example,) = (block for block in blocks if "elasticrun join " in block)
    make_token, start, join, _ = (
        [str(Path(sys.executable).with_name(word)) if word in ("elasticrun", "python") else word for word in words]
        for words in (shlex.split(line, comments=True) for line in example.splitlines())
    )
    said = tmp_path / "said.txt"
    with made_machines(2, sshd=False) as (node0, node1), said.open("w") as file:
        assert node0.run(make_token, cwd=tmp_path).returncode == 0
        driver = node0.popen(start, cwd=tmp_path, stdout=file, stderr=file)
        url = wait_for("where to join", lambda: said.read_text().partition("join --driver ")[2]).split()[0]
        join[join.index("--driver") + 1] = url
        joined = node1.run(join, cwd=tmp_path)
        assert driver.wait(150) == 0, said.read_text()
    assert joined.returncode == 0, joined.stderr
    assert "4 workers on localhost:2, node1:2" in said.read_text()
    assert len(re.findall(r"rank \d of 4: weights", said.read_text())) == 4, said.read_text()
