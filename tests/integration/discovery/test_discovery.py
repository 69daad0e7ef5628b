"""Host discovery with real scripts: good, bad, slow, loud, and those that leave processes behind."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from elastic_driver.discovery import script as script_module
from elastic_driver.discovery.script import ScriptDiscovery, _Pipe
from elastic_driver.discovery.source import FixedHosts
from elastic_driver.errors import DiscoveryError
from elastic_driver.hosts import Host
from elastic_driver.launch.local import locality
from elastic_driver.launch.local.locality import is_local_host
from elastic_driver.system.job_clock import JobClock
from tests.support.clusters.config_volume import ConfigVolume
from tests.support.processes.carriers import carriers_of
from tests.support.processes.jobs import FAULTY, PATIENCE_S, Job, capture_elasticrun

pytestmark = [pytest.mark.integration]

MARK = "DISCOVERY_TEST"


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "discover.sh"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def find(command: str, *, slots: int | None = None, timeout_s: float = PATIENCE_S) -> tuple[Host, ...]:
    return asyncio.run(ScriptDiscovery(command, slots, timeout_s, job_id="a-test").find_hosts())


def fails(command: str, *, timeout_s: float = PATIENCE_S) -> str:
    with pytest.raises(DiscoveryError) as caught:
        find(command, timeout_s=timeout_s)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 3000
    return text


def marked(mark: str) -> list[int]:
    """Living processes that a script of this mark left."""
    return [process.pid for process in carriers_of(MARK, mark.__eq__)]


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(MARK, str(tmp_path))
    return str(tmp_path)


def gone(mark: str) -> bool:
    """Whether all of them end; the kernel may take a moment over a kill."""
    end = time.monotonic() + PATIENCE_S
    while marked(mark):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_list_with_everything_that_may_stand_in_it(tmp_path: Path) -> None:
    hostname = socket.gethostname()
    lines = ["# mine", "", "  127.0.0.1:3   # old", "localhost", "\t[::1]:2", f"{hostname}:1\r", "127.0.0.2"]
    (tmp_path / "hosts").write_text("\n".join(lines))
    assert find(f"cat {tmp_path}/hosts", slots=4) == (
        Host("127.0.0.1", 3),
        Host("localhost", 4),
        Host("::1", 2),
        Host(hostname, 1),
        Host("127.0.0.2", 4),
    )


@pytest.mark.parametrize("body", ["", "echo", "echo '# nothing yet'", "true"])
def test_no_hosts_is_an_answer(tmp_path: Path, body: str) -> None:
    assert find(script(tmp_path, body)) == ()


def test_a_host_without_slots_is_as_good_as_none(tmp_path: Path) -> None:
    """As an object's host is. It cost the whole list."""
    assert find(script(tmp_path, "echo 127.0.0.1:0 rack=r1; echo localhost:2; echo a:000")) == (Host("localhost", 2),)
    assert find(script(tmp_path, "echo localhost:0")) == ()


def test_a_script_that_is_killed() -> None:
    assert "was killed by SIGKILL: its standard error is empty" in fails("kill -KILL $$")


def test_a_shell_command_is_a_script(tmp_path: Path) -> None:
    assert find(f"cd {tmp_path} && for n in 1 2; do echo 127.0.0.$n:1; done | sort -r") == (
        Host("127.0.0.2", 1),
        Host("127.0.0.1", 1),
    )


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("echo no route >&2; exit 7", "failed with exit code 7: no route"),
        ("echo one >&2; echo two >&2; exit 1", "failed with exit code 1: one | two"),
        ("echo localhost:2; exit 1", "failed with exit code 1: its standard error is empty"),
        ("sh -c 'kill -KILL $$'; exit 137", "failed with exit code 137 (SIGKILL)"),
        ("no-such-program", "failed with exit code 127: "),
        ("head -c 3000000 /dev/zero | tr '\\0' x >&2; exit 3", "failed with exit code 3: xxx"),
        ("echo '<html>'", "did not print a valid list of hosts: line 1: cannot read '<html>' as a host"),
        ("echo localhost:2; echo 'localhost 2'", "line 2: host 'localhost': cannot read '2' as a label"),
        ("echo localhost:-1", "slots must be at least 0, not -1"),
        ("echo localhost:-0", "slots must be at least 0, not -0"),
        ("echo a:0; echo a:1", "line 2: host 'a' is named twice (first on line 1)"),
        ("echo localhost:x", "slots 'x' is not an integer"),
        ("echo localhost:100000", "slots must be at most 4096"),
        ("echo localhost", "write localhost:SLOTS, or give --slots-per-host"),
        ("echo ::1:2", "write an IPv6 address in brackets"),
        ("echo a:1; echo '#'; echo b:1; echo a:2", "line 4: host 'a' is named twice (first on line 1)"),
        ("printf 'localhost:2\\n\\377\\376'", "printed bytes that are not UTF-8: b'localhost:2"),
        ("head -c 5000 /dev/zero", "did not print a valid list of hosts"),
        ("yes localhost:1", "printed more than 1048576 bytes"),
        ("yes localhost:1 | tr -d '\\n'", "printed more than 1048576 bytes"),
    ],
)
def test_bad_answers(tmp_path: Path, mark: str, body: str, complaint: str) -> None:
    assert complaint in fails(script(tmp_path, body))
    assert gone(mark)


def test_a_script_without_an_interpreter_line(tmp_path: Path) -> None:
    path = tmp_path / "discover.sh"
    path.write_text("echo localhost:2\n")
    path.chmod(0o755)
    assert find(str(path)) == (Host("localhost", 2),)
    path.write_text("#!/no/such/interpreter\n")
    assert "failed with exit code 12" in fails(str(path))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("sleep 1000", "did not end within 0.5 s (--discovery-timeout) and was killed"),
        ("trap '' TERM INT HUP; while :; do sleep 1; done", "did not end within 0.5 s"),
        ("exec >&- 2>&-; sleep 1000", "did not end within 0.5 s"),
        ("cat; sleep 1000", "did not end within 0.5 s"),
        ("echo localhost:2; sleep 1000 & sleep 1000 & wait", "did not end within 0.5 s"),
        ("echo localhost:2; sleep 1000 &", "did not close its output (held open by a child process) within 3 s"),
        ("echo localhost:2; (sleep 1000 &) >&-", "did not close its output (held open by a child process) within 3 s"),
        ("yes >&2", "did not end within 0.5 s"),
        ("setsid -f sleep 1000; sleep 1000", "did not end within 0.5 s"),
    ],
)
def test_a_script_that_hangs_is_killed_with_all_it_started(
    tmp_path: Path, mark: str, body: str, complaint: str
) -> None:
    # The script itself has to end within the longer one.
    assert complaint in fails(script(tmp_path, body), timeout_s=3 if "within 3 s" in complaint else 0.5)
    assert gone(mark)


@pytest.mark.parametrize("ending", ["", "; echo broken >&2; exit 1"])
def test_what_a_script_leaves_in_the_background_does_not_pile_up(tmp_path: Path, mark: str, ending: str) -> None:
    command = script(tmp_path, f"sleep 1000 >/dev/null 2>&1 & echo localhost:2{ending}")
    if ending:
        assert "failed with exit code 1: broken" in fails(command)
    else:
        assert find(command) == (Host("localhost", 2),)
    assert gone(mark)


def test_a_scripts_group_is_killed_before_its_number_can_be_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    killpg = os.killpg

    def kill(group: int, number: int) -> None:
        # A process that was reaped has no entry any more; one that is dead and not reaped has.
        assert Path(f"/proc/{group}").exists(), "the group's number may be another's by now"
        killed.append(group)
        killpg(group, number)

    monkeypatch.setattr(os, "killpg", kill)
    assert find(script(tmp_path, "echo localhost:2")) == (Host("localhost", 2),)
    fails(script(tmp_path, "exit 3"))
    fails(script(tmp_path, "sleep 1000 & exit 3"), timeout_s=0.2)
    fails(script(tmp_path, "yes"))
    assert len(set(killed)) == 4
    assert not any(Path(f"/proc/{group}").exists() for group in killed), "it is not reaped"


def test_a_search_that_is_cancelled_kills_its_script(tmp_path: Path, mark: str) -> None:
    started = tmp_path / "started"
    command = script(tmp_path, f"touch {started}; sleep 1000 & wait")

    async def cancel_it() -> None:
        search = asyncio.create_task(ScriptDiscovery(command, None, 100.0).find_hosts())
        async with asyncio.timeout(PATIENCE_S):
            while not started.exists():
                await asyncio.sleep(0.01)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

    asyncio.run(cancel_it())
    assert gone(mark)


def test_many_runs_leave_no_descriptors_behind(tmp_path: Path) -> None:
    good = script(tmp_path, "echo localhost:2")

    async def run_them() -> tuple[int, int]:
        async def each_kind() -> None:
            await ScriptDiscovery(good, None, PATIENCE_S).find_hosts()
            for bad, timeout_s in (
                ("echo x:-1", PATIENCE_S),
                ("yes", PATIENCE_S),
                ("yes >&2", 0.05),
                ("sleep 1000", 0.05),
            ):
                with pytest.raises(DiscoveryError):
                    await ScriptDiscovery(bad, None, timeout_s).find_hosts()

        await each_kind()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(10):
            await each_kind()
        return before, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(run_them())
    assert after <= before


def test_a_machine_without_room_keeps_no_run_from_being_closed(
    tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is neither a descriptor to look into /proc with, nor a thread for it."""

    def no_descriptor(pid: int) -> psutil.Process:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def run_them() -> tuple[int, int]:
        before = len(os.listdir("/proc/self/fd"))
        with monkeypatch.context() as patched:
            patched.setattr("elastic_driver.discovery.script.psutil.Process", no_descriptor)
            patched.setattr("elastic_driver.discovery.script.asyncio.to_thread", no_thread)
            with pytest.raises(DiscoveryError, match="did not end within"):
                await ScriptDiscovery("sleep 1000", None, 0.05).find_hosts()
        await asyncio.sleep(0)  # what reads the pipes is closed by the loop
        return before, len(os.listdir("/proc/self/fd"))

    before, after = asyncio.run(run_them())
    assert after <= before
    assert gone(mark)


def test_what_fails_while_output_is_read_is_told_to_who_waits_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    async def read_one() -> bool:
        ours, theirs = os.pipe()
        with open(ours, "rb", buffering=0) as file:
            os.write(theirs, b"a host")
            os.close(theirs)
            pipe = _Pipe(file, fail)
            with pytest.raises(MemoryError):
                await asyncio.wait_for(pipe.ended, PATIENCE_S)
            return asyncio.get_running_loop().remove_reader(ours)

    def fail(data: bytes) -> None:
        raise MemoryError

    assert asyncio.run(read_one()) is False, "nobody reads it any more"
    assert not capfd.readouterr().err


def test_fixed_hosts_stay() -> None:
    hosts = (Host("b", 1), Host("a", 2))
    assert asyncio.run(FixedHosts(hosts).find_hosts()) == hosts


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1", "127.8.9.1", "::1", socket.gethostname()])
def test_names_of_this_machine(name: str) -> None:
    assert is_local_host(name)


@pytest.mark.parametrize("name", ["192.0.2.1", "2001:db8::1", "host.invalid", "x" * 300, "a..b", "0.0.0.1"])
def test_names_of_others(name: str) -> None:
    assert not is_local_host(name)


def test_a_full_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher pod that trains, too: its own name is listed, and no name server has it yet."""

    def look_up(name: str, *_: Any, flags: int = 0, **__: Any) -> list[Any]:
        if name == "pi-launcher" and flags & socket.AI_CANONNAME:
            full = "pi-launcher.pi.default.svc.cluster.local"
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, full, ("192.0.2.7", 0))]
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(locality, "_known_local", {"localhost"})
    monkeypatch.setattr(socket, "gethostname", lambda: "pi-launcher")
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in ("pi-launcher.pi.default.svc", "PI-launcher.pi.default.svc.cluster.local.", "pi-launcher"):
        assert is_local_host(name), name
    for name in ("pi-launcher.pi.default.sv", "pi-launcher.po.default.svc", "pi-worker-0.pi.default.svc", "pi-launch"):
        assert not is_local_host(name), name


# --- in a volume that Kubernetes swaps ----------------------------------------------------------------------------


def test_a_script_that_is_missing_at_first_is_waited_for_where_the_kubelet_puts_it(tmp_path: Path) -> None:
    volume = ConfigVolume(tmp_path / "mpi")
    late = str(tmp_path / "mpi" / "discover_hosts.sh")

    async def first() -> tuple[Host, ...]:
        discovery = ScriptDiscovery(late, 2, PATIENCE_S)
        finding = asyncio.create_task(discovery.find_hosts())
        assert not (await asyncio.wait((finding,), timeout=0.3))[0], "it waits"
        volume.write({"discover_hosts.sh": ""})
        assert not (await asyncio.wait((finding,), timeout=0.3))[0], "an empty file says nothing"
        volume.write({"discover_hosts.sh": "#!/bin/sh\necho a\n"})
        hosts = await finding
        # Later it may fail: the hosts known so far stay.
        volume.write({"discover_hosts.sh": ""})
        with pytest.raises(DiscoveryError, match="is an empty file"):
            await discovery.find_hosts()
        volume.write({"discover_hosts.sh": "#!/bin/sh\n"})
        assert await discovery.find_hosts() == (), "no pod runs"
        return hosts

    assert asyncio.run(first()) == (Host("a", 2),)


def test_a_script_that_stays_away_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_module, "_SWAP_S", 0.3)
    ConfigVolume(tmp_path / "mpi")
    assert "not found" in fails(str(tmp_path / "mpi" / "discover_hosts.sh"))


def test_swaps_are_not_seen(tmp_path: Path) -> None:
    volume = ConfigVolume(tmp_path / "mpi")
    scripts = [f"#!/bin/sh\necho a\necho {name}\n" for name in "bc"]
    volume.write({"discover_hosts.sh": scripts[0]})
    seen = set()

    async def watch() -> None:
        discovery = ScriptDiscovery(str(tmp_path / "mpi" / "discover_hosts.sh"), 1, PATIENCE_S)
        for number in range(60):
            finding = asyncio.create_task(discovery.find_hosts())
            while not finding.done():
                volume.write({"discover_hosts.sh": scripts[number % 2]})
                await asyncio.sleep(0)
            with contextlib.suppress(DiscoveryError):  # for who looks at the wrong moment
                seen.add(await finding)

    asyncio.run(watch())
    assert seen == {(Host("a", 1), Host("b", 1)), (Host("a", 1), Host("c", 1))}


def test_hosts_that_were_sorted_as_texts(tmp_path: Path) -> None:
    names = [f"pi-worker-{number}.pi.default.svc" for number in range(12)]
    command = script(tmp_path, "\n".join(f"echo {name}" for name in ["pi-launcher.pi.default.svc", *sorted(names)]))
    hosts = asyncio.run(ScriptDiscovery(command, 1, PATIENCE_S, orders_hosts=True).find_hosts())
    assert [host.name for host in hosts] == ["pi-launcher.pi.default.svc", *names]
    assert [host.name for host in find(command, slots=1)][1:] == sorted(names)


# --- in a job ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("no_such_program", "failed with exit code 127: .*no_such_program: .*not found"),
        (
            "echo a:b",
            "did not print a valid list of hosts: line 1: cannot read 'a:b' as a host: slots 'b' is not an integer",
        ),
    ],
)
def test_a_script_that_never_worked_ends_the_job(tmp_path: Path, body: str, why: str) -> None:
    command = script(tmp_path, body)
    with Job(tmp_path, None, "-np", "2", "--host-discovery-script", command) as job:
        assert job.wait() == 2
    found = f"elasticrun: job failed: the host discovery script '{re.escape(command)}' {why} \\(exit code 2\\)\n"
    assert re.fullmatch(found, job.said()), job.said()


def test_a_failure_that_may_pass_is_waited_for_at_the_first_call_too(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = script(tmp_path, f"test -e {done} || {{ echo no answer >&2; exit 3; }}; echo localhost:2")
    with Job(tmp_path, None, "-np", "2", "--host-discovery-script", command, command=["true"]) as job:
        job.wait_to_say(f"warning: the host discovery script '{command}' failed with exit code 3: no answer; trying ")
        done.touch()
        assert job.wait() == 0
        assert "host discovery works again" in job.said()


def test_later_failures_are_told_and_borne(tmp_path: Path) -> None:
    with Job(tmp_path, "localhost:2\n", "-np", "2") as job:
        job.wait_for_steps(2)
        job.set_hosts("localhost:none\n")
        job.wait_for("the warning", lambda: "slots 'none' is not an integer" in job.said())
        at = time.time()
        job.wait_for_steps(2, 30, after=at)
        assert job.said().count("slots 'none' is not an integer") == 1, "not told again each second"
        job.set_hosts("localhost:3\n")
        job.wait_for_steps(3)
        assert {line["pid"] for line in job.steps() if line["size"] == 2} < {line["pid"] for line in job.steps()}


def test_a_discovery_that_hangs_later_does_not_stop_the_job(tmp_path: Path) -> None:
    mark = str(tmp_path)  # of what the job starts; what it is forked from may be started now, and stays
    hosts, hang = tmp_path / "list", tmp_path / "hang"
    hosts.write_text("localhost:2\n")
    command = script(tmp_path, f"test -e {hang} && sleep 1000\ncat {hosts}")
    flags = ["--host-discovery-script", command, "--discovery-interval", "0.1", "--discovery-timeout", "3"]
    with Job(tmp_path, None, "-np", "2", *flags, env={MARK: mark}) as job:
        job.wait_for_steps(2)
        hang.touch()
        job.wait_for("the warning", lambda: "did not end within 3 s" in job.said())
        hosts.write_text("localhost:3\n")
        hang.unlink()
        job.wait_for_steps(3)
    assert gone(mark)


QUICK = """
from elastic_driver.discovery import script
from elastic_driver.reporting import chronicle
chronicle._WAIT_S, chronicle._WORRY_S, script._SLOW_S = 0.1, 0.2, 0.05  # not 5, 30 and 2
"""


@pytest.mark.parametrize(
    ("body", "flags", "code", "complaint", "end_says"),
    [
        (
            "echo no pods >&2",
            ["--elastic-timeout", "2"],
            3,
            r"waiting for 2 slots \(-np\), slots: 0, no host is listed; \d s left; the host discovery script '.*' "
            "lists no hosts; its standard error: no pods",
            "lists no hosts; its standard error: no pods",
        ),
        (
            "echo localhost:1",
            ["--elastic-timeout", "2"],
            3,
            r"waiting for 2 slots \(-np\), slots: 1 \(localhost:1\); \d s left",
            "gave up after 2 s (--elastic-timeout)",
        ),
    ],
    ids=["lists nobody", "too few"],
)
def test_what_a_job_waits_for_is_told_where_no_status_line_is(
    tmp_path: Path, body: str, flags: list[str], code: int, complaint: str, end_says: str
) -> None:
    command = script(tmp_path, body)
    words = ("-np", "2", "--host-discovery-script", command, *flags, "true")
    ran = capture_elasticrun(*words, elasticrun=(*FAULTY, QUICK))
    *told, end = ran.stderr.splitlines()
    assert ran.returncode == code
    # Before it, that the script has not answered yet, where that takes it a moment.
    assert any(re.fullmatch(rf"elasticrun: (warning: )?for \d s now: {complaint}", line) for line in told), ran.stderr
    assert 1 <= len(told) <= 6, "again, but less and less often"
    assert told[-1].startswith("elasticrun: warning: "), "those who hear only warnings are told too"
    assert end.endswith(f"{end_says} (exit code {code})"), "those who saw a status line are told in the end, too"


def test_a_script_that_hangs_is_told_of_where_no_status_line_is(tmp_path: Path) -> None:
    command = script(
        tmp_path,
        f"test -e {tmp_path}/ran && {{ echo localhost:2; exit; }}; touch {tmp_path}/ran\n"
        "echo connecting >&2; sleep 1000",
    )
    words = ("-np", "2", "--host-discovery-script", command, "--discovery-timeout", "2", "true")
    ran = capture_elasticrun(*words, elasticrun=(*FAULTY, QUICK))
    assert ran.returncode == 0, ran.stderr
    complaint = (
        r"waiting for the first hosts; \d+ s left; the host discovery script '.*' has been running for \d s "
        r"\(limit: 2 s, --discovery-timeout\); its standard error: connecting"
    )
    told = ran.stderr.splitlines()
    assert any(re.fullmatch(rf"elasticrun: (warning: )?for \d s now: {complaint}", line) for line in told), ran.stderr
    assert any(line.endswith("and was killed: connecting; trying again") for line in told), ran.stderr


def test_an_empty_answer_is_waited_on_until_the_elastic_timeout(tmp_path: Path) -> None:
    with Job(tmp_path, "# none yet\n", "-np", "2", "--elastic-timeout", "1") as job:
        assert job.wait() == 3
        assert "waiting for 2 slots (-np), slots: 0" in job.said()
        assert "--elastic-timeout" in job.said()


def test_discovery_that_fails_for_long_ends_a_job_that_lacks_slots(tmp_path: Path) -> None:
    with Job(tmp_path, "localhost:1\n", "-np", "2", "--elastic-timeout", "6") as job:
        job.wait_for("the first answer", lambda: job.events("hosts_discovered"))
        job.set_hosts("rubbish, rubbish\n")
        assert job.wait() == 3
        job.wait_to_say("'rubbish,'")


def test_a_script_whose_driver_stands_still_has_its_time(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = script(tmp_path, f"sleep 0.2; echo localhost:1; touch {done}")

    def stand_still() -> None:
        """As long as the driver is stopped: until the script has ended, and its time is over."""
        while not done.exists():
            time.sleep(0.01)
        time.sleep(1.0)

    async def main() -> None:
        clock = JobClock(most_s=0.05)
        loop = asyncio.get_running_loop()
        keeping = loop.create_task(clock.keep(lambda stood_s: None))
        loop.call_later(0.1, stand_still)
        discovery = ScriptDiscovery(command, None, 0.9, call_later=clock.call_later)
        assert await discovery.find_hosts() == (Host("localhost", 1),)
        keeping.cancel()

    asyncio.run(main())


def test_a_script_that_hangs_is_ended_by_the_jobs_clock_too(tmp_path: Path) -> None:
    async def main() -> None:
        clock = JobClock(most_s=0.05)
        keeping = asyncio.get_running_loop().create_task(clock.keep(lambda stood_s: None))
        discovery = ScriptDiscovery(script(tmp_path, "sleep 60"), None, 0.1, call_later=clock.call_later)
        with pytest.raises(DiscoveryError, match=r"did not end within 0\.1 s"):
            await discovery.find_hosts()
        keeping.cancel()

    asyncio.run(main())
