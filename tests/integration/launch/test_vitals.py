"""What an agent sees of workers' processes, and the stacks that it takes of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent import proc
from elastic_driver.launch.agent.stacks import StackTaker, take_stacks
from elastic_driver.launch.agent.vitals import VitalsWatch
from elastic_driver.launch.agent.vitals_page import VitalsPage
from elastic_driver.rendezvous.agent_messages import AgentMessage, Stacked, StacksTold, TakeStacks, VitalsSeen
from elastic_driver.system.tasks import Tasks
from elastic_driver.vitals import Vitals
from elastic_driver.worker.engine import native_loader

pytestmark = pytest.mark.integration

ONE = WorkerId("a", 0, 0)
LIMIT_S = 150.0
BEGIN = "import os, sys, time; from elastic_driver.worker.rounds import vitals; vitals.begin(sys.argv[1])\n"
SAY = "print('there', flush=True)\n"

try:
    native_loader.load()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)


class Worker:
    """One worker: a process with a page, in a session of its own. It says a line when it is in its program."""

    def __init__(self, program: str, *prefix: str) -> None:
        self.page = VitalsPage()
        command = [*prefix, sys.executable, "-c", program, self.page.path]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()

    def watched(self) -> list[tuple[WorkerId, int, VitalsPage | None]]:
        return [(ONE, self.process.pid, self.page)]

    def say(self) -> str:
        """Has it go on, and returns its next line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def stacks(self) -> Stacked:
        """As the driver is told."""
        sent: list[AgentMessage] = []

        async def ask() -> None:
            tasks = Tasks()
            taker = StackTaker(self, sent.append, tasks)
            assert taker.take(TakeStacks(5, []))
            while not isinstance(sent[-1:] and sent[-1], StacksTold):
                await asyncio.sleep(0.01)
            await tasks.end()

        asyncio.run(asyncio.wait_for(ask(), LIMIT_S))
        told, end = sent
        assert isinstance(told, Stacked)
        assert (told.number, told.worker, end) == (5, ONE.key, StacksTold(5))
        return told


@contextlib.contextmanager
def worker(program: str, *prefix: str) -> Iterator[Worker]:
    made = Worker(program, *prefix)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()
        made.page.close()


STILL_S = 0.2
TICKS = os.sysconf("SC_CLK_TCK")  # a second's


def looks(of: Worker | Both, is_so: Callable[[Vitals], bool], *, still_s: float = STILL_S) -> Vitals:
    """Looks at it until it is so. What is seen arrives as it was."""

    async def look() -> Vitals:
        watch = VitalsWatch(of, lambda message: None, is_heard=lambda: True, still_s=still_s)
        end = time.monotonic() + LIMIT_S
        while True:
            seen = watch.look(everybody=True).get(ONE)
            if seen is not None and is_so(seen):
                return seen
            assert time.monotonic() < end, seen
            await asyncio.sleep(0.02)

    return asyncio.run(look())


def test_a_process_at_work_stopped_and_gone() -> None:
    busy = BEGIN + SAY + "f = open('/dev/zero', 'rb', buffering=0)\nwhile True: f.read(1000)"
    with worker(busy) as one:
        first = looks(one, lambda seen: seen.cpu_s > 0.1)
        assert (first.pid, first.traced, first.can_dump) == (one.process.pid, False, True)
        assert first.rss_bytes > 1 << 20
        later = looks(one, lambda seen: seen.cpu_s > first.cpu_s and seen.io_bytes > first.io_bytes)
        assert later.pulse_s is not None
        one.process.send_signal(signal.SIGSTOP)
        stopped = looks(one, lambda seen: seen.state == "T" and (seen.pulse_s or 0) > 0.6)
        assert looks(one, lambda seen: True).cpu_s == stopped.cpu_s
        told = one.stacks()
        assert (told.reason, told.state, told.blob) == ("stopped (state T): it cannot respond", "T", b"")
        one.process.send_signal(signal.SIGCONT)
        looks(one, lambda seen: seen.state != "T" and (seen.pulse_s or 9) < 0.5)
        one.process.kill()
        one.process.wait()
        assert one.stacks().reason == "it has ended"

        async def look() -> object:
            return VitalsWatch(one, lambda message: None, is_heard=lambda: True).look(everybody=True)

        assert asyncio.run(look()) == {}


def test_the_time_of_our_own_threads_is_not_the_scripts() -> None:
    spin = (
        BEGIN
        + "import threading, ctypes\nfrom elastic_driver.system.threads import name_this_thread\n"
        + "def spin():\n    name_this_thread()\n    while True: pass\n"
        + "threading.Thread(target=spin, name='elastic-spinning', daemon=True).start()\n"
        + SAY
        + "time.sleep(600)"
    )
    with worker(spin) as one:
        first = looks(one, lambda seen: True)
        end = time.monotonic() + LIMIT_S
        while sum(map(int, proc.stat(one.process.pid)[11:13])) < TICKS:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert looks(one, lambda seen: True).cpu_s - first.cpu_s < 0.5


SPIN = "import itertools\nfor _ in itertools.count(): pass"
CHILDREN = {
    "a child": f"subprocess.run([sys.executable, '-c', {SPIN!r}])",
    "a child of a child": f"subprocess.run(['sh', '-c', '\"$@\"; true', 'sh', sys.executable, '-c', {SPIN!r}])",
    "one in a session of its own": f"subprocess.run([sys.executable, '-c', {SPIN!r}], start_new_session=True)",
    "one whose parent has ended": f"subprocess.run(['sh', '-c', '\"$@\" &', 'sh', sys.executable, '-c', {SPIN!r}])\n"
    "time.sleep(600)",
    "many short ones": "while True: subprocess.run([sys.executable, '-c', 'sum(range(10**6))'])",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_what_its_children_do_is_the_doing_of_a_worker_that_stands_still(kind: str) -> None:
    with worker(BEGIN + "import subprocess\n" + SAY + CHILDREN[kind]) as one:
        try:
            first = looks(one, lambda seen: True)
            looks(one, lambda seen: seen.cpu_s > first.cpu_s + 0.3)
        finally:
            for child in _descendants(one.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    return [each for each in proc.table() if each != pid and proc.descends_from(each, pid)]


def test_a_worker_that_goes_on_stands_for_itself_and_one_without_children_does_nothing() -> None:
    spins = f"child = subprocess.Popen([sys.executable, '-c', {SPIN!r}])\n"
    steps = "while True:\n    vitals.note_step()\n    time.sleep(0.05)"
    with worker(BEGIN + "import subprocess\n" + spins + SAY + steps) as one:
        (child,) = _descendants(one.process.pid)

        def ticks() -> int:
            return sum(map(int, proc.stat(child)[11:13]))

        first = looks(one, lambda seen: seen.steps > 0)
        before = ticks()
        # Most of the child's would be counted if it stood still.
        later = looks(one, lambda seen: ticks() > before + 3 * TICKS, still_s=1.0)
        assert later.cpu_s - first.cpu_s < 0.5 * (ticks() - before) / TICKS
    with worker(BEGIN + SAY + "time.sleep(600)") as one:
        first = looks(one, lambda seen: True)
        later = looks(one, lambda seen: seen.at_s > first.at_s + 4 * STILL_S)
        assert later.cpu_s - first.cpu_s < 0.05
        assert later.io_bytes == first.io_bytes


@pytest.mark.parametrize("who", ["itself", "its child"])
def test_what_comes_from_a_slow_server_is_counted(who: str) -> None:
    program = (
        "import socket\nserver = socket.create_connection(('127.0.0.1', int({port})))\nwhile server.recv(65536): pass"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        program = program.format(port=listening.getsockname()[1])
        if who == "its child":
            program = f"import subprocess\nsubprocess.run([sys.executable, '-c', {program!r}])"
        with worker(BEGIN + SAY + program) as one:
            connection, _ = listening.accept()
            with connection:
                first = looks(one, lambda seen: True)
                sent = 0

                def has_come(seen: Vitals) -> bool:
                    nonlocal sent
                    connection.sendall(b"x" * 100)
                    sent += 100
                    return seen.io_bytes >= first.io_bytes + 2000

                looks(one, has_come)
                assert sent >= 2000


def lock_of(path: Path, how: str) -> str:
    call = {"flock": "fcntl.flock(file, fcntl.LOCK_EX)", "fcntl": "fcntl.lockf(file, fcntl.LOCK_EX)"}[how]
    return f"import fcntl\nfile = open({str(path)!r}, 'w')\n{call}\n"


@pytest.mark.parametrize("how", ["flock", "fcntl"])
def test_a_lock_of_a_file_that_somebody_else_holds_is_outside(tmp_path: Path, how: str) -> None:
    lock = lock_of(tmp_path / "lock", how)
    holds = lock + SAY + "input()"
    with worker("import sys, time\n" + holds) as holder, worker(BEGIN + SAY + lock + SAY + "input()") as one:
        seen = looks(one, lambda seen: bool(seen.awaits))
        assert seen.awaits == f"a file lock ({how}) that process {holder.process.pid} holds"
        holder.process.kill()
        assert one.line == "there"
        looks(one, lambda seen: not seen.awaits)


def test_a_lock_of_a_file_that_another_worker_holds_is_a_wait_for_a_member(tmp_path: Path) -> None:
    """And one that the process itself holds is its own affair."""
    lock = lock_of(tmp_path / "lock", "flock")
    twice = lock.replace("lock'", "own'") + "other = open(file.name)\n" + SAY + "fcntl.flock(other, fcntl.LOCK_EX)"
    with worker(BEGIN + lock + SAY + "input()") as holder:
        for program in (SAY + lock, twice):
            with worker(BEGIN + program) as one:
                both = Both(one, holder)
                enters(one, "flock")
                assert looks(both, is_settled()).awaits == ""


class Both:
    """Two workers of one host."""

    def __init__(self, one: Worker, other: Worker) -> None:
        self.one, self.other = one, other

    def watched(self) -> list[tuple[WorkerId, int, VitalsPage | None]]:
        other = WorkerId("a", 1, 0)
        return [*self.one.watched(), *((other, pid, page) for _, pid, page in self.other.watched())]


WAITS = {"flock": "locks_lock_inode_wait", "receive": "wait_woken", "pipe": "pipe_read"}


def enters(one: Worker, what: str) -> None:
    """Blocks until the main thread waits there in the kernel."""
    end = time.monotonic() + LIMIT_S
    while WAITS[what] not in Path(f"/proc/{one.process.pid}/wchan").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_settled() -> Callable[[Vitals], bool]:
    """Whether it has been looked at for longer than it takes until its waits are, too."""
    began: list[float] = []

    def settled(seen: Vitals) -> bool:
        began.append(seen.at_s)
        return seen.at_s - began[0] > 4 * STILL_S

    return settled


SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(600)']"
PEER = "import socket\nserver = socket.create_connection(('127.0.0.1', {port}))\n"
OUTSIDE = {
    "time": ("time.sleep(600)", "a sleep to end"),
    "a child": (f"import subprocess\nsubprocess.run({SLEEPER})", "a child process"),
    "a child's output": (
        f"import subprocess\nsubprocess.run({SLEEPER}, capture_output=True)",
        "a pipe to its child process ",
    ),
    "a server": (PEER + "server.recv(1)", "a connection to 127.0.0.1:{port} (on the same host)"),
    "with a timeout": (PEER + "server.settimeout(500)\nserver.recv(1)", "a connection to 127.0.0.1:{port}"),
    "select": (PEER + "import select\nselect.select([server], [], [])", "a connection to 127.0.0.1:{port}"),
    "asyncio": (
        "import asyncio\nasync def main():\n"
        "    reader, _ = await asyncio.open_connection('127.0.0.1', {port})\n    await reader.read()\n"
        "asyncio.run(main())",
        "a connection to 127.0.0.1:{port}",
    ),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_what_the_main_thread_waits_for_outside_its_process(kind: str) -> None:
    program, expected = OUTSIDE[kind]
    # In another process than the agent's, which is the job's.
    server = "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
    serve = "print(server.getsockname()[1], flush=True)\nkept = server.accept()\ninput()"
    with worker(server + serve) as outside:
        names = {"port": outside.line}
        with worker(BEGIN + SAY + program.format(**names)) as one:
            seen = looks(one, lambda seen: bool(seen.awaits))
            assert seen.awaits.startswith(expected.format(**names))
            assert seen.peer == "", "it is on this host"


def test_a_connection_to_another_worker_of_the_host_is_a_wait_for_a_member() -> None:
    server = "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
    serve = "print(server.getsockname()[1], flush=True)\nkept = server.accept()\nprint('taken', flush=True)\ninput()"
    with worker(server + serve) as other, worker(BEGIN + SAY + PEER.format(port=other.line) + "server.recv(1)") as one:
        enters(one, "receive")
        assert other.process.stdout is not None
        assert other.process.stdout.readline() == "taken\n", "until then it has no connection"
        assert looks(Both(one, other), is_settled()).awaits == ""


@pytest.mark.parametrize(
    "program",
    [
        "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()",
        "import threading\nthreading.Event().wait(600)",
        "reader, writer = os.pipe()\nos.read(reader, 1)",
    ],
)
def test_what_the_main_thread_waits_for_inside_its_process_is_nothing(program: str) -> None:
    with worker(BEGIN + SAY + program) as one:
        first = looks(one, is_settled())
        assert first.awaits == ""
        # Taking its stacks wakes it, and that is no doing of its own.
        kept: list[Vitals] = []

        async def look() -> None:
            watch = VitalsWatch(one, lambda message: None, is_heard=lambda: True, still_s=STILL_S)
            kept.append(watch.look(everybody=True)[ONE])
            for _ in range(3):
                assert (await take_stacks(ONE, one.process.pid, one.page)).blob
                kept.append(watch.look(everybody=True)[ONE])
            kept.append(watch.look(everybody=True)[ONE])

        asyncio.run(look())
        assert {seen.wakes for seen in kept} == {0}


def test_a_main_thread_that_sleeps_in_a_loop_wakes_and_other_threads_do_not_count() -> None:
    loop = "while True: time.sleep(0.05)"
    with worker(BEGIN + SAY + loop) as one:
        seen: list[Vitals] = []
        looks(one, lambda now: bool(seen.append(now)) or now.wakes >= 20)
        assert {each.awaits for each in seen} == {""}, "each of its waits is one of a moment"
    thread = f"import threading\ndef run():\n    {loop}\nthreading.Thread(target=run, daemon=True).start()\n"
    with worker(BEGIN + thread + SAY + "threading.Event().wait(600)") as one:
        looks(one, is_settled())
        assert looks(one, is_settled()).wakes == 0


def test_what_a_mapped_file_is_read_for_is_counted(tmp_path: Path) -> None:
    size = 8 << 20
    path = tmp_path / "data"
    with path.open("wb") as file:
        file.write(os.urandom(size))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    program = (
        f"import mmap\nfile = open({str(path)!r}, 'rb')\ndata = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n"
    )
    with worker(BEGIN + program + SAY + "input()\nprint(sum(data[::4096]), flush=True)\ninput()") as one:
        first = looks(one, lambda seen: True)
        before = proc.number(proc.lines(f"/proc/{one.process.pid}/io"), b"read_bytes")
        one.say()
        if proc.number(proc.lines(f"/proc/{one.process.pid}/io"), b"read_bytes") - before < size // 2:
            pytest.skip("the system keeps the file in memory")
        assert looks(one, lambda seen: True).io_bytes - first.io_bytes > size // 2


def test_what_it_was_asked_for_is_no_doing_of_its_own() -> None:
    deep = (
        "def deep(left):\n    if left: deep(left - 1)\n    else:\n        "
        + SAY
        + "        time.sleep(600)\ndeep(90)\n"
    )
    with worker(BEGIN + deep) as one:
        first = looks(one, lambda seen: seen.pulse_s is not None)
        written = sum(len(one.stacks().blob) for _ in range(3))
        assert written > 5_000
        assert looks(one, lambda seen: True).io_bytes == first.io_bytes


def test_stacks_of_one_that_spins_with_the_lock_and_of_one_that_sleeps() -> None:
    held = "import ctypes\ndef holds():\n    read = ctypes.PyDLL(None).read\n    " + SAY
    with worker(BEGIN + held + "    read(os.pipe()[0], ctypes.create_string_buffer(1), 1)\nholds()") as one:
        for _ in range(3):
            told = one.stacks()
            assert told.reason == ""
            assert told.blob.decode().count("in holds") == 1, "nothing of the last time"
        assert one.process.poll() is None
    with worker(BEGIN + "def sleeps():\n    " + SAY + "    while True: time.sleep(600)\nsleeps()") as one:
        told = one.stacks()
        assert b"in sleeps" in told.blob
        assert (told.state, told.pid) == ("S", one.process.pid)


def test_who_cannot_tell_is_left_alone() -> None:
    with worker(SAY + "import time; time.sleep(600)") as one:
        assert one.stacks().reason == "its script does not use elastic_driver"
        assert one.process.poll() is None
    # A program that it becomes has no handler: the signal would end it.
    with worker(BEGIN + SAY + "sys.stdin.readline(); os.execvp('sh', ['sh', '-c', 'echo sh; sleep 600'])") as one:
        assert one.stacks().blob
        assert one.say() == "sh"
        told = one.stacks()
        assert (told.reason, told.blob) == ("it has replaced itself with another program", b"")
        assert one.process.poll() is None
        assert looks(one, lambda seen: (seen.pulse_s or 0) > 0.6).pid == one.process.pid
    blocks = "import signal, threading\nsignal.signal(stacks.DUMP_SIGNAL, lambda *_: None)\n"
    with worker(
        "import sys; from elastic_driver.worker.rounds import stacks\n" + blocks + BEGIN + SAY + "input()"
    ) as one:
        assert "its script handles the signal" in one.stacks().reason
    blocked = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    with worker(BEGIN + blocked + SAY + "input()") as one:
        assert one.stacks().blob, "a thread of ours takes it"
    pending = "iter(lambda: signal.sigtimedwait([signal.SIGRTMAX - 4], 0), None)"
    count = f"print(len(list({pending})), flush=True)"
    with worker(blocked + BEGIN + SAY + "input(); " + count) as one:
        told = one.stacks()
        assert told.reason == "it did not answer within 3 s (state S)"
        assert told.wchan or told.syscall or os.geteuid() != 0
        assert one.say() == "1", "two at once would have faulthandler write while others run"


def test_what_a_script_without_the_library_waits_for_and_what_its_children_do() -> None:
    program = SAY + "import time\nend = time.monotonic() + 0.5\nwhile time.monotonic() < end: pass\ntime.sleep(600)"
    with worker(program) as one:
        seen = looks(one, lambda seen: bool(seen.awaits))
        assert (seen.awaits, seen.pulse_s) == ("a sleep to end", None)
    with worker(SAY + "import time\nwhile True: pass") as one:
        first = looks(one, lambda seen: seen.cpu_s > 0.1)
        assert looks(one, lambda seen: seen.cpu_s > first.cpu_s + 0.5).awaits == ""
    busy = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])"
    with worker(SAY + busy) as one:
        assert looks(one, lambda seen: seen.cpu_s > 1.0).awaits in ("", "a child process")


def test_a_child_speaks_for_the_command_and_a_stranger_does_not() -> None:
    with worker(BEGIN + SAY + "time.sleep(600)", "sh", "-c", '"$@" & wait', "sh") as one:
        seen = looks(one, lambda seen: seen.pulse_s is not None)
        assert seen.pid != one.process.pid
        assert proc.descends_from(seen.pid, one.process.pid)
        assert b"Current thread" in one.stacks().blob
    # Some number of a process that is none of this worker's: it is neither looked at nor sent anything.
    with worker(BEGIN + SAY + "time.sleep(600)") as other, worker(SAY + "import time; time.sleep(600)") as one:
        page = Path(other.page.path).read_bytes()
        Path(one.page.path).write_bytes(page)
        assert looks(one, lambda seen: True).pid == one.process.pid
        assert one.stacks().reason == "its script does not use elastic_driver"
        assert (other.page.stack_bytes(), one.page.stack_bytes()) == (0, 0)


def test_the_driver_hears_once_a_second_and_at_once_of_a_stop() -> None:
    sent: list[AgentMessage] = []

    async def run(one: Worker) -> None:
        heard = True
        watch = VitalsWatch(one, sent.append, is_heard=lambda: heard)
        watch.start()

        async def until(count: int) -> list[Vitals]:
            async with asyncio.timeout(LIMIT_S):
                while len(sent) < count:
                    await asyncio.sleep(0.01)
            assert all(isinstance(each, VitalsSeen) for each in sent)
            return [each.workers[ONE.key] for each in sent if isinstance(each, VitalsSeen)]

        rest = (await until(6))[1:]
        # It looks twice a second; one look or another may be late.
        assert rest[-1].at_s - rest[0].at_s >= 0.75 * (len(rest) - 1), "only counters have moved"
        one.process.send_signal(signal.SIGSTOP)
        while (await until(len(sent) + 1))[-1].state != "T":
            pass
        heard = False
        count = len(sent)
        one.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.2)  # longer than any pause: nothing may come
        assert len(sent) == count
        heard = True
        assert (await until(count + 1))[-1].state != "T"
        watch.close()

    with worker(BEGIN + SAY + "time.sleep(600)") as one:
        asyncio.run(run(one))
