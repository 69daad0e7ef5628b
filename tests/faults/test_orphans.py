"""No worker outlives its driver, however the driver ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest

from elastic_driver.launch.processes.guard import find_processes
from tests.support.processes.jobs import PATIENCE_S

pytestmark = pytest.mark.faults

# What was started goes on for an hour: it has not ended by itself where a test ends.

# A worker as training scripts are: children in its session (data loader), one that ignores SIGTERM, and a daemon that
# left both session and parent.
WORKER = r"""
import os, signal, sys, time
for kind in ("loader", "stubborn", "daemon"):
    if os.fork():
        continue
    if kind == "daemon":
        os.setsid()
        if os.fork():
            os._exit(0)
    if kind != "loader":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(3600)
    os._exit(0)
time.sleep(3600)
"""

# What a driver is to its workers: it starts them, one after the other, and says so; and which guard is another's
# successor, as soon as that has been told of them.
DRIVER = r"""
import asyncio, os, sys, uvloop
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local.keeper import Launch, ProcessKeeper

class Sink:
    def begin(self, worker, pid, rank, label):
        pass
    def write(self, worker, stream, data):
        pass
    def bar(self, worker, bar):
        pass
    def end(self, worker):
        pass

class Listener:
    def __init__(self):
        self.runs = asyncio.Queue()
    def started(self, worker, process):
        self.runs.put_nowait(process)
    def dying(self, worker, process, status):
        pass
    def exited(self, worker, process, status):
        pass
    def finished(self, worker):
        pass

async def main():
    job_id, count, worker = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    listener = Listener()
    keeper = ProcessKeeper(Sink(), listener, prefix_timestamp=False, mark=job_id)
    async def launch():
        return Launch([sys.executable, "-S", "-c", worker], os.environ)
    for slot in range(count):
        keeper.start(WorkerId("localhost", slot, 0), "0", launch)
        process = await listener.runs.get()
        print(process.pid, keeper.guard_pid, flush=True)
    if "close" in sys.argv:
        await keeper.close()
        return
    guard = keeper.guard_pid
    while True:
        await asyncio.sleep(0.01)
        if keeper.guard_pid not in (None, guard):
            guard = keeper.guard_pid
            print(guard, flush=True)

uvloop.run(main())
"""


@contextlib.contextmanager
def driver(count: int, *arguments: str, worker: str = WORKER) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a keeper of workers; whatever of its job is left at the end is killed."""
    job_id = uuid.uuid4().hex
    command = [sys.executable, "-c", DRIVER, job_id, str(count), worker, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
        try:
            yield process, job_id
        finally:
            process.kill()
            for left in job_processes(job_id):
                left.kill()


def job_processes(job_id: str) -> list[psutil.Process]:
    return [process for processes in find_processes(job_id, {}).values() for process in processes]


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(true: Callable[[], bool]) -> None:
    """Fails when it is never so: the machine may have much else to do."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end, "it did not come true in time"
        # Other processes' ends cannot be waited for here, only looked for.
        time.sleep(0.01)


def read_pids(process: subprocess.Popen[str]) -> tuple[int, int]:
    assert process.stdout is not None
    worker, guard = process.stdout.readline().split()
    return int(worker), int(guard)


def test_sigkill_of_the_driver_ends_all() -> None:
    with driver(3) as (process, job_id):
        guards = {read_pids(process)[1] for _ in range(3)}
        assert len(guards) == 1
        # Worker, loader, stubborn, daemon; three times.
        wait_until(lambda: len(job_processes(job_id)) == 12)
        process.kill()
        wait_until(lambda: not job_processes(job_id))
        # The guard goes as well, and nobody else is to see it off.
        wait_until(lambda: all(is_gone(guard) for guard in guards))


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.002, 0.004, 0.008, 0.016])
def test_sigkill_of_the_driver_while_it_starts_workers(delay_s: float) -> None:
    with driver(200) as (process, job_id):
        _, guard = read_pids(process)
        # Any moment will do; several are tried.
        time.sleep(delay_s)
        process.kill()
        process.wait()
        # A worker that was half started shows only a moment later; what counts is what the guard leaves.
        wait_until(lambda: is_gone(guard))
        assert job_processes(job_id) == []


def test_the_guard_ignores_what_a_terminal_or_a_service_manager_sends() -> None:
    with driver(1) as (process, job_id):
        _, guard = read_pids(process)
        wait_until(lambda: len(job_processes(job_id)) == 4)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(guard, number)
        assert not is_gone(guard)
        assert os.getsid(guard) == guard
        process.kill()
        wait_until(lambda: not job_processes(job_id))


def test_a_dead_guard_is_replaced_and_the_new_one_knows_the_workers() -> None:
    # The worker takes its marks off, so that only a guard that was told of it can find it.
    words = ["sleep", f"3600.{uuid.uuid4().int}"]  # which nobody else's has
    worker = f"import os; os.execve('/bin/sleep', {words}, {{}})"

    def sleepers() -> list[psutil.Process]:
        found = []
        for one in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if one.cmdline() == words and one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
        return found

    with driver(1, worker=worker) as (process, _):
        _, guard = read_pids(process)
        wait_until(lambda: len(sleepers()) == 1)
        os.kill(guard, signal.SIGKILL)
        assert process.stdout is not None
        second = int(process.stdout.readline())
        process.kill()
        wait_until(lambda: not sleepers())
        wait_until(lambda: is_gone(second))


# Holds Python's lock in one long call, and hears no SIGTERM.
DEAF = """
import ctypes, signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ctypes.PyDLL(None).sleep(3600)
"""
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
# The command is a shell script that goes on after the training; neither hears SIGTERM. init() calls this function.
TRAINING = (
    "import time; from elastic_driver.system.tether import tie_this_process; tie_this_process(); time.sleep(3600)"
)
BELOW_A_SHELL = f"""
import os, sys
os.execv("/bin/sh", ["sh", "-c", "trap '' TERM; \\"$0\\" -c \\"$1\\"; sleep 3600", sys.executable, {TRAINING!r}])
"""


def ignores_term(pid: int) -> bool:
    """Not if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        ignored = next(int(line.split()[1], 16) for line in status if line.startswith("SigIgn:"))
        return bool(ignored & 1 << signal.SIGTERM - 1)
    return False


def ties(pid: int) -> int:
    """How many of its descriptors ask for a signal."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fdinfo"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{name}") as facts:
            flags = next(int(line.split()[1], 8) for line in facts if line.startswith("flags:"))
            count += bool(flags & os.O_ASYNC)
    return count


def trains(worker: str, pid: int) -> int:
    """The process id of the training, once it is as the test wants it; else 0."""
    with contextlib.suppress(psutil.Error, OSError):
        if worker is BELOW_A_SHELL:
            return next((child.pid for child in psutil.Process(pid).children() if ties(child.pid) == 3), 0)
        if worker is STOPPED:
            return pid if psutil.Process(pid).status() == psutil.STATUS_STOPPED else 0
        return pid if ignores_term(pid) else 0
    return 0


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("worker", [DEAF, STOPPED, BELOW_A_SHELL], ids=["deaf", "stopped", "below a shell"])
def test_workers_end_with_their_driver_also_when_the_guard_is_stopped_or_dead(worker: str, fate: int) -> None:
    with driver(1, worker=worker) as (process, _):
        pid, guard = read_pids(process)
        wait_until(lambda: trains(worker, pid) > 0)
        training = trains(worker, pid)
        # Stopped first: the driver would start another guard.
        os.kill(process.pid, signal.SIGSTOP)
        os.kill(guard, fate)
        try:
            process.kill()
            process.wait()
            wait_until(lambda: is_gone(training) and is_gone(pid))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(guard, signal.SIGKILL)


def test_a_dead_driver_takes_the_children_of_its_workers_along_without_a_guard() -> None:
    with driver(1) as (process, job_id):
        pid, guard = read_pids(process)
        deaf = lambda: [each for each in job_processes(job_id) if ignores_term(each.pid)]  # noqa: E731
        wait_until(lambda: len(job_processes(job_id)) == 4 and len(deaf()) == 2)
        os.kill(guard, signal.SIGSTOP)
        process.kill()
        process.wait()
        # What hears no SIGTERM is the guard's, as is what has left the group.
        wait_until(lambda: len(job_processes(job_id)) == 2 and is_gone(pid))
        assert len(deaf()) == 2
        os.kill(guard, signal.SIGCONT)
        wait_until(lambda: not job_processes(job_id))


def test_a_normal_close_ends_the_guard_without_delay() -> None:
    with driver(2, "close") as (process, job_id):
        _, guard = read_pids(process)
        assert process.wait(PATIENCE_S) == 0
        assert is_gone(guard)
        assert job_processes(job_id) == []


def test_a_stopped_guard_does_not_hold_up_a_normal_close() -> None:
    with driver(1, "close") as (process, job_id):
        _, guard = read_pids(process)
        with contextlib.suppress(ProcessLookupError):
            os.kill(guard, signal.SIGSTOP)
        assert process.wait(PATIENCE_S) == 0
        assert is_gone(guard)
        assert job_processes(job_id) == []


def test_a_guard_that_was_stopped_does_its_work_when_it_goes_on() -> None:
    with driver(1) as (process, job_id):
        _, guard = read_pids(process)
        os.kill(guard, signal.SIGSTOP)
        process.kill()
        process.wait()
        os.kill(guard, signal.SIGCONT)
        wait_until(lambda: not job_processes(job_id))
