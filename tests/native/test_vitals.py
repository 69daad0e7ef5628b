"""The page of vitals: who writes it, what stands there, and that its pulse needs no lock of the interpreter's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import psutil
import pytest

from elastic_driver.launch.agent.vitals_page import PAGE_BYTES, PageFacts, VitalsPage
from elastic_driver.vitals import Traffic
from elastic_driver.worker.rounds import stacks, vitals

from .conftest import native
from .engines import Kind, Operation, allreduce, each_rank, engines, spec

LIMIT_S = 150.0


@pytest.fixture
def page() -> Iterator[VitalsPage]:
    made = VitalsPage()
    yield made
    native.vitals_close()
    made.close()


def facts(page: VitalsPage) -> PageFacts:
    found = page.read(time.monotonic_ns())
    assert found is not None
    return found


def until(page: VitalsPage, is_so: Callable[[PageFacts], bool]) -> PageFacts:
    end = time.monotonic() + LIMIT_S
    while not is_so(found := facts(page)):
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


@contextlib.contextmanager
def running(program: str, page: VitalsPage) -> Iterator[subprocess.Popen[str]]:
    """Python with the page, whose path is its only argument. It is in its program once it has printed a line."""
    command = [sys.executable, "-c", program, page.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def until_taken(process: subprocess.Popen[str] | subprocess.Popen[bytes], number: int) -> None:
    """Waits until no thread of it has the signal to take any more: one that is sent twice before may come once."""
    end = time.monotonic() + LIMIT_S
    while True:
        assert time.monotonic() < end
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
        if not any(each >> (number - 1) & 1 for each in pending):
            return
        time.sleep(0.01)


BEGIN = "import sys; from elastic_driver.worker.rounds import vitals; vitals.begin(sys.argv[1])\n"


def test_what_is_told_stands_there(page: VitalsPage) -> None:
    assert page.read(time.monotonic_ns()) is None, "nobody has written"
    native.vitals_step()
    assert native.vitals_open(page.path)
    assert native.vitals_open(page.path)
    found = facts(page)
    assert (found.pid, found.round_id, found.rank, found.steps, found.committed_s) == (os.getpid(), 0, -1, 0, None)
    native.vitals_round(7, 3)
    native.vitals_step()
    native.vitals_commit(42)
    native.vitals_dumps_at(60)
    found = facts(page)
    assert (found.round_id, found.rank, found.steps, found.commits, found.dump_signal) == (7, 3, 1, 42, 60)
    assert found.committed_s is not None
    assert found.committed_s < LIMIT_S
    first = found.pulse_s
    assert first is not None
    beaten = until(page, lambda now: now.pulse_s is not None and now.pulse_s < 0.01)
    assert beaten.steps == 1
    native.vitals_close()
    native.vitals_step()
    assert facts(page).steps == 1, "it is nobody's any more"


def test_what_steps_take_of_their_own_stands_there(page: VitalsPage) -> None:
    """Not what the process has waited in collectives for others, and nothing of the round before."""
    assert native.vitals_open(page.path)
    native.vitals_round(1, 0)
    for _ in range(20):
        native.vitals_step()
    assert facts(page).own_s is None, "the round began in one of them"
    native.vitals_step()
    own_s = facts(page).own_s
    assert own_s is not None
    assert 0 < own_s < LIMIT_S
    for _ in range(20):
        time.sleep(0.01)
        native.vitals_step()
    slower_s = facts(page).own_s
    assert slower_s is not None
    assert slower_s >= 0.01
    native.vitals_round(2, 0)
    native.vitals_step()
    assert facts(page).own_s is None, "of the present round nothing is known yet"


def test_what_a_rank_waits_for_others_is_not_its_own(page: VitalsPage) -> None:
    assert native.vitals_open(page.path)
    native.vitals_round(1, 0)
    took = []
    with engines(2) as made:
        began = time.monotonic()
        native.vitals_step()
        for _ in range(20):

            def late(engine: object, rank: int) -> None:
                if rank:
                    until(page, lambda now: now.waits_s > 0.03)
                allreduce(made[rank], np.ones(1, np.float32))

            each_rank(made, late)
            ended = time.monotonic()
            native.vitals_step()
            took.append(time.monotonic() - began)
            began = ended
    own_s = facts(page).own_s
    assert own_s is not None
    assert own_s < fmean(took) - 0.03, "both are this process, and one of them waited for the other"


def test_collectives_are_counted_and_who_lacks_is_named(page: VitalsPage) -> None:
    assert native.vitals_open(page.path)
    with engines(3) as made:
        each_rank(made, lambda engine, rank: allreduce(engine, np.ones(100, np.float32), "one"))
        rows = [np.ones((rank + 1, 2), np.int64) for rank in range(3)]

        def gather(engine: object, rank: int) -> None:
            made[rank].submit(Operation(Kind.ALLGATHER, (spec(rows[rank]),), name="rows")).result()

        assert each_rank(made, gather) == {}
        # Who waits for an operation goes on before it is counted.
        traffic = (Traffic("allreduce", 3, 3 * 400), Traffic("allgather", 3, 16 * (1 + 2 + 3)))
        found = until(page, lambda now: (now.finished, now.traffic, now.waiting) == (6, traffic, ()))
        assert found.submitted == 6
        assert found.waits_s == 0.0
        before = found.waited_s
        waits = [threading.Thread(target=allreduce, args=(made[rank], np.ones(2), "a\tname\n")) for rank in (1, 0, 2)]
        waits[0].start()
        found = until(page, lambda now: bool(now.waiting) and now.waits_s >= 1.0)
        (lacks,) = found.waiting
        assert (lacks.name, lacks.missing) == ("allreduce 'a name '", (0, 2))
        assert lacks.since_s >= 1.0
        assert found.waits_s < LIMIT_S
        for each in waits[1:]:
            each.start()
        for each in waits:
            each.join(LIMIT_S)
        found = until(page, lambda now: now.finished == 9 and not now.waiting)
        assert found.waits_s == 0.0
        assert found.waited_s - before >= 1.0


def test_a_mismatch_is_over_but_carries_nothing(page: VitalsPage) -> None:
    assert native.vitals_open(page.path)
    with engines(2) as made:
        errors = each_rank(made, lambda engine, rank: allreduce(engine, np.ones(2 + rank), "one"))
        assert sorted(errors) == [0, 1]
        found = until(page, lambda now: now.finished == 2)
        assert (found.submitted, found.traffic) == (2, ())


def test_a_forked_child_has_neither_page_nor_pulse(page: VitalsPage) -> None:
    assert native.vitals_open(page.path)
    came, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            native.vitals_step()
            native.vitals_round(9, 9)
            names = {Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task")}
            # The page is its living parent's.
            os.write(came[1], b"no" if native.vitals_open(page.path) or "elastic-pulse\n" in names else b"ok")
            os.read(go[0], 1)
        os._exit(0)
    try:
        assert os.read(came[0], 2) == b"ok"
        found = facts(page)
        assert (found.pid, found.steps, found.round_id) == (os.getpid(), 0, 0)
        native.vitals_step()
        assert facts(page).steps == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        for each in (*came, *go):
            os.close(each)


def test_the_pulse_beats_while_a_c_call_holds_the_lock(page: VitalsPage) -> None:
    held = BEGIN + "import ctypes; print('held', flush=True); ctypes.PyDLL(None).usleep(600_000_000)"
    with running(held, page) as process:
        end = time.monotonic() + 1.5
        beats = set()
        while time.monotonic() < end or len(beats) < 4:
            found = facts(page)
            assert found.pid == process.pid
            assert found.pulse_s is not None
            beats.add(round(time.monotonic() - found.pulse_s, 1))
            assert time.monotonic() < end + LIMIT_S
            time.sleep(0.02)
        process.send_signal(signal.SIGSTOP)
        until(page, lambda now: now.pulse_s is not None and now.pulse_s > 0.6)
        process.send_signal(signal.SIGCONT)
        until(page, lambda now: now.pulse_s is not None and now.pulse_s < 0.3)


# A call that holds the lock, and that no signal ends.
HOLDS = "ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"


@pytest.mark.parametrize(
    ("how", "signals"),
    [(HOLDS, 2), ("time.sleep(600)", 1)],
)
def test_stacks_come_whoever_holds_the_lock(page: VitalsPage, how: str, signals: int) -> None:
    """Where a call holds it, at a second signal."""
    program = BEGIN + (
        f"import ctypes, os, time\ndef hangs_here():\n    print('there', flush=True)\n    {how}\nhangs_here()"
    )
    with running(program, page) as process:
        assert facts(page).dump_signal == stacks.DUMP_SIGNAL
        for _ in range(2):
            for _ in range(signals):
                process.send_signal(stacks.DUMP_SIGNAL)
                until_taken(process, stacks.DUMP_SIGNAL)
            end = time.monotonic() + LIMIT_S
            while "in <module>" not in page.stacks():
                assert time.monotonic() < end, page.stacks()
                time.sleep(0.01)
            assert page.stacks().count("in hangs_here") == 1, "nothing is left of the last time"
            page.forget_stacks()
            assert page.stack_bytes() == 0
        assert process.poll() is None


# Other threads run Python meanwhile: to read their frames without the lock ends the process at one of a dozen signals.
BUSY = (
    BEGIN
    + """
import email.parser, threading
def works():
    while True:
        email.parser.Parser().parsestr("A: b\\r\\n\\r\\n", headersonly=True)
def waits_here():
    print("there", flush=True)
    threading.Event().wait()
for _ in range(3): threading.Thread(target=works, daemon=True).start()
"""
)


def test_who_asks_for_stacks_ends_no_process(page: VitalsPage) -> None:
    with running(BUSY + "waits_here()", page) as process:
        for _ in range(50):
            page.forget_stacks()
            process.send_signal(stacks.DUMP_SIGNAL)
            end = time.monotonic() + LIMIT_S
            while not page.stacks().endswith(" in <module>\n"):
                assert process.poll() is None, page.stacks()
                assert time.monotonic() < end, page.stacks()
                time.sleep(0.001)
            assert page.stacks().count("in works") == 3
            assert page.stacks().count("in waits_here") == 1


def test_who_asks_one_that_ends_does_not_change_how_it_ends(page: VitalsPage) -> None:
    """The thread that answers is none any more: the interpreter unwinds it."""
    program = BEGIN + (
        "import os, time\n"
        "class Last:\n"
        "    def __del__(self, os=os, time=time, sys=sys):\n"
        "        os.write(1, b'ends\\n' if sys.is_finalizing() else b'too early\\n')\n"
        "        os.read(0, 1)\n"
        "        os.write(1, b'goes on\\n')\n"
        "last = Last()"
    )
    with running(program, page) as process:
        tasks = Path(f"/proc/{process.pid}/task")
        threads = len(os.listdir(tasks))
        process.send_signal(stacks.DUMP_SIGNAL)
        end = time.monotonic() + LIMIT_S
        # From Python 3.14 on it stands still instead.
        while process.poll() is None and len(os.listdir(tasks)) == threads and sys.version_info < (3, 14):
            assert time.monotonic() < end
            time.sleep(0.01)
        out, _ = process.communicate("\n", LIMIT_S)
        assert (out, process.returncode) == ("goes on\n", 0)


@pytest.mark.parametrize("how", ["waits_here()", f"print('there', flush=True); {HOLDS}", "os.abort()"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_last_words_are_whole(page: VitalsPage, tmp_path: Path, how: str, elsewhere: bool) -> None:
    """Of a process that is told to end, be it at the second signal, and of one that ends itself.

    They are on standard error, or where the script has said.
    """
    busy = BUSY if how == "waits_here()" else BEGIN
    chosen = "open(sys.argv[2], 'w')" if elsewhere else ""
    program = f"import ctypes, faulthandler, os, sys\nfaulthandler.enable({chosen})\n{busy}\ndef main(): {how}\nmain()"
    words = tmp_path / "words"
    with (tmp_path / "stderr" if elsewhere else words).open("wb") as file:
        command = [sys.executable, "-c", program, page.path, str(words)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file)
    try:
        assert process.stdout is not None
        if process.stdout.readline():
            process.send_signal(signal.SIGABRT)
            if how != "waits_here()":
                # One that was not in its call yet ends at the first.
                until_taken(process, signal.SIGABRT)
                process.send_signal(signal.SIGABRT)
        assert process.wait(LIMIT_S) == -signal.SIGABRT
    finally:
        process.kill()
        process.communicate()
    said = words.read_text()
    assert said.startswith("Fatal Python error: Aborted\n\n")
    assert " in main\n" in said
    assert " in <module>\n" in said
    assert said.count("Fatal") == 1


def test_a_forked_child_has_nobody_who_answers(page: VitalsPage, tmp_path: Path) -> None:
    """The handler before ours has."""
    program = BEGIN + (
        "import os\nchild = os.fork()\nif child == 0:\n    print(os.getpid(), flush=True)\n    time.sleep(600)\n"
        "os.waitpid(child, 0)"
    )
    command = [sys.executable, "-c", "import time\n" + program, page.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            os.kill(int(process.stdout.readline()), stacks.DUMP_SIGNAL)
            end = time.monotonic() + LIMIT_S
            while " in <module>" not in page.stacks():
                assert time.monotonic() < end, page.stacks()
                time.sleep(0.01)
        finally:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()


def test_who_has_come_first_has_it_until_its_end_and_exec_begins_anew(page: VitalsPage) -> None:
    again = BEGIN + (
        "from elastic_driver.worker.rounds import vitals as v; import os\n"
        "v.note_commit(3); v.note_step(); v.note_step(); v.note_commit(4)\n"
        "print('first', flush=True); sys.stdin.readline()\n"
        "os.execv(sys.executable, [sys.executable, '-c', sys.argv[2] if len(sys.argv) > 2 else "
        '"import sys; from elastic_driver.worker.rounds import vitals; vitals.begin(sys.argv[1]); '
        "print('second', flush=True); sys.stdin.readline()\", sys.argv[1]])"
    )
    with running(again, page) as process:
        found = facts(page)
        assert (found.pid, found.steps, found.commits) == (process.pid, 3, 4), "a commit is a step until one is told"
        assert not native.vitals_open(page.path)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "second\n"
        found = facts(page)
        assert (found.pid, found.steps, found.commits) == (process.pid, 0, 0)
    assert native.vitals_open(page.path), "it is dead"
    assert facts(page).pid == os.getpid()


def test_what_is_no_page_is_left_alone(tmp_path: Path) -> None:
    other, short, folder = tmp_path / "other", tmp_path / "short", tmp_path / "folder"
    other.write_bytes(b"x" * (2 * PAGE_BYTES))
    short.write_bytes(b"ELVITALS")
    folder.mkdir()
    version = tmp_path / "version"
    version.write_bytes((b"ELVITALS" + b"\x63\0\0\0" + b"\0\x20\0\0").ljust(PAGE_BYTES, b"\0"))
    os.mkfifo(tmp_path / "fifo")
    for path in (other, short, folder, version, tmp_path / "fifo", tmp_path / "none", Path("/dev/null")):
        before = path.read_bytes() if path.is_file() else b""
        assert not native.vitals_open(str(path)), path
        assert (path.read_bytes() if path.is_file() else b"") == before
    vitals.begin(str(other))
    vitals.note_step()
    vitals.note_commit(1)
