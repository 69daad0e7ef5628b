"""The end of a worker is the end of everything it started."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import time
from collections.abc import Sequence

import psutil
import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local import process_tree
from elastic_driver.launch.local.process_tree import ProcessTree
from elastic_driver.launch.processes import death, guard
from elastic_driver.launch.words import ExitStatus
from elastic_driver.system import kernel
from elastic_driver.system.process_name import name_of
from tests.support.processes.launching import EACH_LOOP, NEVER_S, PATIENCE_S, WORKER, Job, job, run, stopped

pytestmark = pytest.mark.integration

# A worker with five kinds of children; each prints a line when it is up. The daemon left session and parent, the orphan
# has the session only, the nameless one has neither mark nor session but is a descendant.
FAMILY = r"""
import os, signal, subprocess, sys, time

def child(name, *, setsid=False, double=False, stubborn=False):
    if os.fork():
        return
    if setsid:
        os.setsid()
    if double and os.fork():
        os._exit(0)
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, f"{name} {os.getpid()}\n".encode())
    time.sleep(3600)
    os._exit(0)

stubborn = "stubborn" in sys.argv
child("plain", stubborn=stubborn)
child("grouped", setsid=True, stubborn=stubborn)
child("daemon", setsid=True, double=True, stubborn=stubborn)
child("orphan", double=True, stubborn=stubborn)
if "nameless" in sys.argv:
    ignore = "signal.signal(15, signal.SIG_IGN); " if stubborn else ""
    text = "import os, signal, time; " + ignore + "print('nameless', os.getpid(), flush=True); time.sleep(3600)"
    subprocess.Popen([sys.executable, "-I", "-c", text], env={}, start_new_session=True)
os.write(1, f"worker {os.getpid()}\n".encode())
if "exit" in sys.argv:
    sys.exit(int(sys.argv[-1]))
time.sleep(3600)
"""


@pytest.fixture(params=EACH_LOOP)
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def family(one: Job, *arguments: str, worker: WorkerId = WORKER) -> tuple[ProcessTree, list[psutil.Process]]:
    """A worker and its living descendants, once all are up."""
    process = await one.python(FAMILY, *arguments, worker=worker)
    names = ["plain", "grouped", "daemon", "orphan", "worker", *(["nameless"] if "nameless" in arguments else [])]
    for name in names:
        await one.sink.has(f":{name} ")
    # All of them live: the test would prove nothing otherwise.
    pids = dict(line.split(":", 1)[1].split() for line in one.sink.lines())
    return process, [psutil.Process(int(pids[name])) for name in names if name != "worker"]


def alive(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    return [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_stop_ends_the_whole_tree(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            process, children = await family(one, "nameless")
            assert len(alive(children)) == 5
            assert await stopped(process, NEVER_S) == ExitStatus(-signal.SIGTERM)
            assert alive(children) == []

    run(loop, main)


def test_what_ignores_sigterm_is_killed_after_the_grace(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            process, children = await family(one, "stubborn", "nameless")
            stopping = asyncio.create_task(stopped(process, NEVER_S))
            # The worker itself heeds the signal; its children keep the grace of the stop.
            await process.exited
            assert len(alive(children)) == 5
            begin = time.perf_counter()
            assert await stopped(process, 1.0) == await stopping == ExitStatus(-signal.SIGTERM)
            assert time.perf_counter() - begin > 0.95
            assert alive(children) == []

    run(loop, main)


def test_a_worker_that_handles_sigterm_keeps_its_exit_code_and_last_words() -> None:
    source = r"""
import signal, sys, time
def end(*_):
    print("saved")
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(3600)
"""

    async def main() -> None:
        async with job() as one:
            process = await one.python(source)
            await one.sink.has("up")
            assert await stopped(process, NEVER_S) == ExitStatus(7)
            assert one.sink.lines()[-1] == "[0]<stdout>:saved"

    run("asyncio", main)


def test_sigterm_comes_once_to_each_process() -> None:
    source = r"""
import os, signal, time
count = 0
def note(*_):
    global count
    count += 1
signal.signal(signal.SIGTERM, note)
os.write(1, b"up\n")
while not count:
    time.sleep(0.01)
end = time.monotonic() + 0.7
while time.monotonic() < end:
    time.sleep(0.05)
os.write(1, f"count {count}\n".encode())
"""

    async def main() -> None:
        async with job() as one:
            process = await one.python(source)
            await one.sink.has("up")
            statuses = await asyncio.gather(*(stopped(process, NEVER_S) for _ in range(5)))
            assert statuses == [ExitStatus(0)] * 5
            assert one.sink.lines()[-1] == "[0]<stdout>:count 1"
            assert await stopped(process, NEVER_S) == ExitStatus(0)

    run("asyncio", main)


def test_a_second_stop_can_shorten_the_grace_and_kill_ends_it(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            for end in ("stop", "kill"):
                process = await one.python(
                    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
                )
                await one.sink.has("up")
                one.sink.data["stdout"] = b""
                first = asyncio.create_task(stopped(process, NEVER_S))
                await asyncio.sleep(0)
                if end == "stop":
                    assert await stopped(process, 0.2) == ExitStatus(-signal.SIGKILL)
                else:
                    process.kill()
                assert await first == ExitStatus(-signal.SIGKILL)

    run(loop, main)


def test_kill_takes_the_whole_tree_at_once(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            process, children = await family(one, "stubborn", "nameless")
            process.kill()
            process.kill()
            # The worker would have heeded a SIGTERM before it.
            assert await process.exited == ExitStatus(-signal.SIGKILL)
            await process.wait()
            process.kill()
            assert alive(children) == []

    run(loop, main)


@pytest.mark.parametrize("code", [0, 3])
def test_children_of_a_worker_that_ends_by_itself_go_too(loop: str, code: int) -> None:
    async def main() -> None:
        async with job() as one:
            process = await one.python(FAMILY, "stubborn", "exit", str(code))
            assert await process.exited == ExitStatus(code)
            assert await process.wait() == ExitStatus(code)
            assert one.processes() == []

    run(loop, main)


def test_the_keepers_kill_reaches_what_a_dead_worker_left(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            process, children = await family(one, "stubborn")
            stopping = asyncio.create_task(stopped(process, NEVER_S))
            await process.exited
            assert len(alive(children)) == 4
            one.keeper.kill_all()
            await stopping
            assert alive(children) == []

    run(loop, main)


def test_close_leaves_a_dead_workers_children_time_to_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "LEFTOVER_GRACE_S", NEVER_S)  # which nobody needs who is quick
    # As multiprocessing's resource tracker: deaf to SIGTERM, ends after its parent and removes what that one left.
    source = r"""
import os, signal, sys, time
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"up\n")
    os.read(read, 1)
    time.sleep(0.2)
    os.write(1, b"cleaned\n")
    os._exit(0)
time.sleep(3600)
"""

    async def main() -> None:
        async with job() as one:
            process = await one.python(source)
            await one.sink.has("up")
            os.kill(process.pid, signal.SIGKILL)
            await process.exited
            await one.keeper.close()
            assert one.sink.lines()[-1] == "[0]<stdout>:cleaned"

    run("asyncio", main)


def test_a_crashed_worker_loses_its_children() -> None:
    async def main() -> None:
        async with job() as one:
            process, children = await family(one)
            os.kill(process.pid, signal.SIGKILL)
            assert await process.wait() == ExitStatus(-signal.SIGKILL)
            assert alive(children) == []

    run("uvloop", main)


def test_only_the_stopped_worker_loses_its_children() -> None:
    async def main() -> None:
        async with job() as one:
            first, first_children = await family(one)
            one.sink.data["stdout"] = b""
            second, second_children = await family(one, worker=WorkerId("localhost", 1, 0))
            await stopped(first, NEVER_S)
            assert alive(first_children) == []
            assert len(alive(second_children)) == 4
            assert not second.exited.done()
            await stopped(second, NEVER_S)
            assert alive(second_children) == []

    run("asyncio", main)


def test_stop_of_a_stopped_process() -> None:
    async def main() -> None:
        async with job() as one:
            process = await one.start(["sleep", "3600"])
            os.kill(process.pid, signal.SIGSTOP)
            # Of two signals that wait for it, the kernel would take SIGTERM first.
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert await stopped(process, 0.2) == ExitStatus(-signal.SIGKILL)

    run("asyncio", main)


def test_stop_while_it_exits() -> None:
    async def main() -> None:
        async with job() as one:
            for attempt in range(30):
                process = await one.start(["true"], worker=WorkerId("localhost", 0, attempt))
                for _ in range(attempt % 5):
                    await asyncio.sleep(0)
                assert (await stopped(process, NEVER_S)).returncode in (0, -signal.SIGTERM)
                assert (await stopped(process, NEVER_S)) == await process.wait() == process.exited.result()

    run("uvloop", main)


def test_many_stops_at_once_share_their_scans(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scans = []

    def counting(*arguments: object) -> dict[str, list[psutil.Process]]:
        scans.append(arguments)
        return guard.find_processes(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("elastic_driver.launch.local.process_tree.find_processes", counting)

    async def main() -> None:
        async with job() as one:
            workers = [await one.start(["sleep", "3600"], worker=WorkerId("localhost", slot, 0)) for slot in range(20)]
            await asyncio.gather(*(stopped(worker, NEVER_S) for worker in workers))
            # Each takes two. The first ones are one, and so are the others of those who end at once.
            assert len(scans) <= 22

    run(loop, main)


@pytest.mark.parametrize("is_built_with_them", [True, False])
def test_without_pidfds_the_same_happens(is_built_with_them: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the kernel refuses them, or Python was built where they were not known."""

    def unknown(*_: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    for module in (death, kernel):
        monkeypatch.setattr(module, "has_pidfds", lambda: False)
    if is_built_with_them:
        monkeypatch.setattr(os, "pidfd_open", unknown)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(kernel, "_call", unknown)

    async def main() -> None:
        async with job() as one:
            process, children = await family(one, "stubborn", "nameless")
            stopping = asyncio.create_task(stopped(process, NEVER_S))
            await process.exited
            assert await stopped(process, 0.5) == await stopping == ExitStatus(-signal.SIGTERM)
            assert alive(children) == []
            crashed = await one.start(["sh", "-c", "exit 4"])
            assert await crashed.wait() == ExitStatus(4)

    run("asyncio", main)


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_the_death_of_a_process_that_is_no_child_is_seen(has_pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    if not has_pidfds:
        monkeypatch.setattr(death, "pidfd_open", refused)

    async def main() -> None:
        died = asyncio.Event()
        with subprocess.Popen(["sleep", "3600"]) as process:
            close = death.watch_process(name_of(process.pid), died.set)
            process.kill()
            await died.wait()
            close()

    run("asyncio", main)


def test_descriptors_that_run_out_do_not_hide_a_tree() -> None:
    async def main() -> None:
        async with job() as one:
            process, children = await family(one)

            def blind(*_: object) -> dict[str, list[psutil.Process]]:
                raise OSError(24, "Too many open files")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("elastic_driver.launch.local.process_tree.find_processes", blind)
                assert await stopped(process, NEVER_S) == ExitStatus(-signal.SIGTERM)
            assert one.warnings
            # What could not be found then is found when the launcher closes.
            await one.keeper.close()
            psutil.wait_procs(children, timeout=PATIENCE_S)
            assert alive(children) == []

    run("asyncio", main)


def test_a_strangers_session_is_left_alone() -> None:
    """A process id that was given to a stranger: same number, other creation time."""

    async def main() -> None:
        async with job() as one:
            process = await one.start(["sleep", "3600"])
            stranger = psutil.Process(process.pid)
            stranger._ident = (stranger.pid, stranger.create_time() - 100.0)
            assert guard.find_processes("no-such-job", {"a": stranger}) == {}
            assert list(guard.find_processes("no-such-job", {"a": psutil.Process(process.pid)})) == ["a"]

    run("asyncio", main)


def test_who_has_an_id_since_its_owner_was_seen_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "3600"]) as child:
        try:
            seen = guard._look(child.pid)
            assert seen is not None
            assert guard._process(child.pid, seen) == psutil.Process(child.pid)
            seen.began -= 1
            assert guard._process(child.pid, seen) is None
        finally:
            child.kill()


def test_a_process_may_have_any_name() -> None:
    source = "import time; open('/proc/self/comm', 'w').write('a) Z 1 1 1 ('); print('up', flush=True); time.sleep(999)"

    async def main() -> None:
        async with job() as one:
            process = await one.python(source)
            await one.sink.has("up")
            leader = psutil.Process(process.pid)
            try:
                assert guard.find_processes("no-such-job", {"a": leader}) == {"a": [leader]}
            finally:
                leader.kill()

    run("asyncio", main)


def test_what_a_stranger_has_started_is_left_alone_too() -> None:
    async def main() -> None:
        async with job() as one:
            process = await one.start(["sh", "-c", "sleep 3600 & echo up; wait"])
            await one.sink.has("up")
            stranger = psutil.Process(process.pid)
            stranger._ident = (stranger.pid, stranger.create_time() - 100.0)
            assert guard.find_processes("no-such-job", {"a": stranger}) == {}
            assert len(guard.find_processes("no-such-job", {"a": psutil.Process(process.pid)})["a"]) == 2

    run("asyncio", main)


def test_a_wait_for_an_end_bears_that_nobody_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last free descriptor is the one that the wait has taken itself."""

    def no_descriptor(process: psutil.Process) -> bool:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main() -> None:
        waiting = asyncio.create_task(death.wait_gone([psutil.Process(child.pid)], asyncio.Future()))
        await asyncio.sleep(0)
        assert not waiting.done()
        child.kill()
        async with asyncio.timeout(PATIENCE_S):
            await waiting

    with subprocess.Popen(["sleep", "3600"]) as child:
        monkeypatch.setattr(psutil.Process, "is_running", no_descriptor)
        try:
            asyncio.run(main())
        finally:
            child.kill()
