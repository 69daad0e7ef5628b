"""Workers as processes: how they start, end and speak."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import re
import resource
import signal
import sys
import threading
from pathlib import Path

import psutil
import pytest

from elastic_driver.errors import LaunchError
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.local import keeper, process_tree
from elastic_driver.launch.processes import guard
from elastic_driver.launch.processes.death import heeds_signal
from elastic_driver.launch.words import CommandNotFoundError, ExitStatus
from elastic_driver.rendezvous import environment
from elastic_driver.system import file_writer
from tests.support.processes.launching import EACH_LOOP, PATIENCE_S, WORKER, Job, job, run, stopped

pytestmark = pytest.mark.integration


@pytest.fixture(params=EACH_LOOP)
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_exit_status_in_words() -> None:
    assert str(ExitStatus(0)) == "exited with code 0"
    assert str(ExitStatus(3)) == "exited with code 3"
    assert str(ExitStatus(-9)) == "killed by SIGKILL"
    assert str(ExitStatus(-40)) == "killed by signal 40"
    assert ExitStatus(-15).signal_name == "SIGTERM"
    assert ExitStatus(1).signal_name is None
    assert ExitStatus(0).ok
    assert not ExitStatus(-9).ok


def test_the_guard_looks_for_the_names_that_workers_carry() -> None:
    assert (guard.ENV_MARK, guard.ENV_WORKER) == (environment.ENV_MARK, environment.ENV_WORKER)


def test_output_and_exit_code(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            process = await one.python("import sys; print('out'); sys.stderr.write('a\\nb'); sys.exit(3)", label="5")
            assert await process.exited == ExitStatus(3)
            assert list(process.last_lines) == ["a", "b"]
            assert await process.wait() == ExitStatus(3)
            assert one.sink.data == {"stdout": b"[5]<stdout>:out\n", "stderr": b"[5]<stderr>:a\n[5]<stderr>:b\n"}
            assert one.warnings == []

    run(loop, main)


def test_death_by_a_signal_is_told_at_once(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            # A child that left the session holds the output pipe; it must not hold up the news.
            process = await one.python(
                "import os, time; os.fork() or os.setsid(); os.write(1, b'up\\n'); time.sleep(3600)"
            )
            await one.sink.has("up\n[0]<stdout>:up")
            os.kill(process.pid, signal.SIGKILL)
            assert await process.exited == ExitStatus(-signal.SIGKILL)
            assert not process.finished.done(), "the child is not gone yet"
            await process.wait()

    run(loop, main)


@pytest.mark.parametrize("answers", [[(False, True), (False, False)], [(False, True)] * 3, [(True, True)]])
def test_who_blocks_a_signal_for_a_moment_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[bool, bool]]
) -> None:
    async def main() -> None:
        async with job() as one:
            process = await one.python("import time; time.sleep(3600)")
            left, looked, sent = list(answers), asyncio.Event(), []

            def look(pid: int, number: int) -> tuple[bool, bool]:
                answer = left.pop(0)
                if not left:
                    looked.set()
                return answer

            with monkeypatch.context() as patch:
                patch.setattr(process_tree, "heeds_signal", look)
                patch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
                process.pass_on(signal.SIGUSR1, looks=3)
                await asyncio.wait_for(looked.wait(), PATIENCE_S)
            assert sent == ([] if answers[-1] == (False, False) else [(process.pid, signal.SIGUSR1)])

    run("asyncio", main)


def test_who_is_in_sigwait_gets_what_it_waits_for() -> None:
    source = (
        "import signal; both = {signal.SIGUSR1, signal.SIGUSR2}; signal.pthread_sigmask(signal.SIG_BLOCK, both);"
        "print('up', flush=True); print(signal.sigwait({signal.SIGUSR1}).name)"
    )

    async def main() -> None:
        async with job() as one:
            process = await one.python(source)
            await one.sink.has("up")
            async with asyncio.timeout(PATIENCE_S):
                while not heeds_signal(process.pid, signal.SIGUSR1)[0]:
                    await asyncio.sleep(0.01)  # it is not in there yet
            assert heeds_signal(process.pid, signal.SIGUSR2) == (False, True)
            process.pass_on(signal.SIGUSR1)
            assert (await process.wait()).ok
            assert one.sink.lines()[-1].endswith("SIGUSR1")

    run("asyncio", main)


def test_environment_session_and_input_of_a_worker(loop: str) -> None:
    source = (
        "import os, sys; print(sorted(os.environ)); print(os.getsid(0) == os.getpid()); print(repr(sys.stdin.read()));"
        "print(os.getcwd()); print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"
    )

    async def main() -> None:
        async with job() as one:
            # As a shell's "3<file" leaves it.
            from_outside = os.dup(0)
            os.set_inheritable(from_outside, True)
            process = await one.start([sys.executable, "-c", source], env={"A": "1", "PYTHONCOERCECLOCALE": "0"})
            assert (await process.wait()).ok
            names, session, given, cwd, descriptors = (line.split(":", 1)[1] for line in one.sink.lines())
            wanted = ["A", "PYTHONCOERCECLOCALE", environment.ENV_MARK, environment.ENV_WORKER]
            assert names == repr(sorted(wanted)).replace('"', "'")
            assert (session, given, cwd) == ("True", "''", os.getcwd())
            # Three streams, the listing itself, and what ends it when the driver dies: nothing else is inherited.
            assert descriptors == "[0, 1, 2, 3, 100, 101]"
            os.close(from_outside)

    run(loop, main)


def test_the_label_follows_the_rank_and_the_timestamp_leads() -> None:
    async def main() -> None:
        async with job(prefix_timestamp=True) as one:
            process = await one.python("print('one', flush=True); import time; time.sleep(60)", label="0")
            await one.sink.has("one")
            one.keeper.label(WORKER, "7")
            await stopped(process, 10)
            again = await one.python("print('two')", label="12")
            await again.wait()
            first, second = one.sink.lines()
            date = r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}"
            assert re.fullmatch(date + r"\[0\]<stdout>:one", first)
            assert re.fullmatch(date + r"\[12\]<stdout>:two", second)

    run("asyncio", main)


def test_a_relabeled_worker_speaks_under_its_new_rank(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)

    async def main() -> None:
        async with job() as one:
            process = await one.python(
                "import sys; print('old', flush=True); open(sys.argv[1]).read(); print('new')", str(fifo)
            )
            await one.sink.has("old")
            one.keeper.label(WORKER, "3")
            fifo.write_text("")
            await process.wait()
            assert one.sink.lines() == ["[0]<stdout>:old", "[3]<stdout>:new"]

    run("uvloop", main)


def test_lines_are_passed_on_as_they_end_and_the_last_one_at_the_end(tmp_path: Path) -> None:
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    source = r"""
import os, sys
euro = "€".encode()
os.write(1, b"one\ntwo\r\nab" + euro[:1])
open(sys.argv[1]).read()
os.write(1, euro[1:] + b"\n")
os.write(1, b"no newline")
"""

    async def main() -> None:
        async with job() as one:
            process = await one.python(source, str(fifo))
            await one.sink.has("two")
            assert one.sink.lines() == ["[0]<stdout>:one", "[0]<stdout>:two"]
            fifo.write_text("")
            await process.wait()
            assert one.sink.lines()[2:] == ["[0]<stdout>:ab€", "[0]<stdout>:no newline"]

    run("uvloop", main)


def test_last_words_are_there_with_the_death_though_output_is_not_read(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            one.keeper.pause_output()
            process = await one.python("raise SystemExit('a bug')")
            assert await process.exited == ExitStatus(1)
            assert list(process.last_lines) == ["a bug"]

    run(loop, main)


def test_last_words_that_were_drawn_over_a_bar_are_there_with_the_death(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            one.keeper.pause_output()
            process = await one.python(r"raise SystemExit('\r50%\n\r\x1b[KError: no such file')")
            assert await process.exited == ExitStatus(1)
            assert list(process.last_lines) == ["50%", "Error: no such file"]

    run(loop, main)


def test_a_failing_sink_does_not_stop_the_worker() -> None:
    async def main() -> None:
        async with job() as one:
            one.sink.error = BrokenPipeError("gone")
            process = await one.python("for number in range(100000): print('line', number)")
            assert (await process.wait()).ok
            assert one.sink.writes > 1
            assert len(one.warnings) == 1
            assert list(process.last_lines)[-1] == "line 99999"

    run("asyncio", main)


def test_much_output_of_many_workers_loses_nothing_and_leaves_the_loop_free(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            writes = [0]  # at each of the loop's turns

            async def heartbeat() -> None:
                while True:
                    await asyncio.sleep(0)
                    writes.append(one.sink.writes)

            beating = asyncio.create_task(heartbeat())
            source = "for number in range(30000): print('line', number)"
            workers = [
                await one.python(source, worker=WorkerId("localhost", rank, 0), label=str(rank)) for rank in range(4)
            ]
            statuses = await asyncio.gather(*(worker.wait() for worker in workers))
            beating.cancel()
            assert all(status.ok for status in statuses)
            lines = one.sink.lines()
            for rank in range(4):
                start = f"[{rank}]<stdout>:"
                mine = [line.removeprefix(start) for line in lines if line.startswith(start)]
                assert mine == [f"line {number}" for number in range(30000)]
            # Whole reads are passed on, not single lines.
            assert one.sink.writes < 3000
            # The loop had its turns all the while: nobody's output is read on and on.
            assert max(later - earlier for earlier, later in itertools.pairwise(writes)) <= 16

    run(loop, main)


def test_output_files_keep_earlier_attempts(tmp_path: Path) -> None:
    async def main() -> None:
        async with job(tmp_path / "logs") as one:
            for attempt in range(2):
                worker = WorkerId("localhost", 0, attempt)
                process = await one.python(f"print('attempt {attempt}')", worker=worker)
                await process.wait()
            other = await one.start(["echo", "other"], worker=WorkerId("localhost", 1, 0), label="1", rank=11)
            await other.wait()

    for _ in range(2):
        run("asyncio", main)
    text = (tmp_path / "logs" / "rank.00" / "stdout").read_text().splitlines()
    assert [line for line in text if line.startswith("[")] == ["[0]<stdout>:attempt 0", "[0]<stdout>:attempt 1"] * 2
    headers = [line for line in text if line.startswith("=====")]
    assert len(headers) == 4
    assert re.fullmatch(r"===== worker localhost\[0\]#1, pid \d+, started .* \d{4} =====", headers[1])
    assert "other" in (tmp_path / "logs" / "rank.11" / "stdout").read_text()
    assert (tmp_path / "logs" / "rank.11" / "stderr").exists()


def test_a_full_disk_is_reported_once_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "logs" / "rank.00"
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(folder / "stdout"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)

    async def main() -> None:
        async with job(tmp_path / "logs") as one:
            for attempt in range(2):
                worker = WorkerId("localhost", 0, attempt)
                process = await one.python("import sys; print('out'); sys.stderr.write('err\\n')", worker=worker)
                assert (await process.wait()).ok
            assert len(one.sink.lines()) == 2
        assert one.warnings == [
            f"cannot write the workers' output to {folder}/stdout: No space left on device; the job continues "
            "without it"
        ]

    run("asyncio", main)
    assert (folder / "stderr").read_text().count("[0]<stderr>:err") == 2


def test_what_others_put_into_the_output_folder_harms_nothing(tmp_path: Path) -> None:
    """A link, and a pipe that nobody reads: the first is not followed, the second not waited for."""
    (tmp_path / "victim").write_text("precious")
    for rank in (0, 1, 2):
        (tmp_path / "logs" / f"rank.0{rank}").mkdir(parents=True)
    (tmp_path / "logs" / "rank.00" / "stdout").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "logs" / "rank.01" / "stdout")
    (tmp_path / "logs" / "rank.02" / "stdout").hardlink_to(tmp_path / "victim")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs" / "rank.03").symlink_to(tmp_path / "elsewhere")

    async def main() -> None:
        async with job(tmp_path / "logs") as one:
            for rank in range(4):
                process = await one.start(["sh", "-c", "echo out; echo err >&2"], label=str(rank), rank=rank)
                assert (await process.wait()).ok
            assert sorted(one.sink.lines()) == [f"[{rank}]<stdout>:out" for rank in range(4)]
        path = tmp_path / "logs" / "rank.00" / "stdout"
        assert one.warnings == [
            f"cannot write the workers' output to {path}: it is a symbolic link; the job continues without it"
        ]

    run("asyncio", main)
    assert (tmp_path / "victim").read_text() == "precious"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    for rank in range(3):
        assert f"[{rank}]<stderr>:err" in (tmp_path / "logs" / f"rank.0{rank}" / "stderr").read_text()


def test_output_may_go_to_a_pipe_that_is_read_until_it_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "rank.00"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout")
    reader = os.open(folder / "stdout", os.O_RDONLY | os.O_NONBLOCK)

    async def main() -> None:
        async with job(tmp_path / "logs") as one:
            process = await one.python("print('x' * 1000000)")
            assert (await process.wait()).ok
        assert len(one.warnings) == 1
        assert f"{folder}/stdout: its reader cannot keep up; the job continues without it" in one.warnings[0]

    run("asyncio", main)
    assert b"[0]<stdout>:xxx" in os.read(reader, 1 << 20)
    os.close(reader)


def test_a_disk_that_hangs_under_the_output_holds_up_neither_loop_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "logs"
    answers, write = threading.Event(), os.write

    def hang(descriptor: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
            answers.wait(PATIENCE_S)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", hang)
    monkeypatch.setattr(file_writer.FileWriter.close, "__defaults__", (0.01,))

    async def main() -> None:
        one = Job(folder, prefix_timestamp=False)
        assert (await (await one.start(["echo", "out"])).wait()).ok
        await one.close()
        assert one.sink.lines() == ["[0]<stdout>:out"]
        assert len(one.warnings) == 1
        assert re.fullmatch(
            rf"\d+ bytes of output are missing from {folder}: the disk could not keep up", one.warnings[0]
        )

    run("asyncio", main)
    thread = next(each for each in threading.enumerate() if each.name == "elasticrun-files")
    answers.set()
    thread.join()
    assert "[0]<stdout>:out" in (folder / "rank.00" / "stdout").read_text()


def test_an_output_directory_that_cannot_be_made_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")

    async def main() -> None:
        async with job(tmp_path / "logs") as one:
            assert (await (await one.start(["true"])).wait()).ok
            assert len(one.warnings) == 1

    run("asyncio", main)


def test_commands_that_cannot_run(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text("print('x')\n")
    headless = tmp_path / "headless"
    headless.write_text("rubbish\n")
    headless.chmod(0o755)
    lost = tmp_path / "lost"
    lost.write_text("#!/no/such/interpreter\n")
    lost.chmod(0o755)
    cases = [
        (["no-such-command-anywhere"], "there is no such command"),
        ([str(plain)], "not executable"),
        ([str(tmp_path)], "not executable"),
        ([str(headless)], "neither a program nor a script"),
        ([str(lost)], "first line"),
        ([str(plain / "below")], "not a directory"),
        ([], "cannot run"),
        (["true", "a\0b"], "null byte"),
        (["true", "x" * (16 << 20)], "too long"),
    ]

    async def main() -> None:
        async with job() as one:
            for command, reason in cases:
                with pytest.raises(CommandNotFoundError, match=reason):
                    await one.start(command)
            assert one.processes() == []

    run("asyncio", main)


def test_the_path_of_the_worker_finds_the_command(tmp_path: Path) -> None:
    program = tmp_path / "only-here"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)

    async def main() -> None:
        async with job() as one:
            process = await one.start(["only-here"], env={"PATH": f"{tmp_path}:/bin:/usr/bin"})
            assert (await process.wait()).ok
            assert one.sink.lines() == ["[0]<stdout>:found"]

    run("asyncio", main)


@pytest.mark.parametrize("free", [pytest.param(free, marks=[pytest.mark.release] * (free % 3)) for free in range(10)])
def test_no_free_descriptor(free: int) -> None:
    async def main() -> None:
        async with job() as one:
            # The guard and the loop's own descriptors exist before.
            await (await one.start(["true"])).wait()
            before = len(os.listdir("/proc/self/fd"))
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            highest = max(int(name) for name in os.listdir("/proc/self/fd"))
            taken = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
            try:
                while True:
                    try:
                        taken.append(os.dup(0))
                    except OSError:
                        break
                for _ in range(free):
                    os.close(taken.pop())
                (outcome,) = await asyncio.gather(one.start(["sleep", "100"]), return_exceptions=True)
                if isinstance(outcome, BaseException):
                    assert type(outcome) is LaunchError
                    assert "Too many open files" in str(outcome)
                    assert free < 9
                else:
                    # Even if nothing can be opened to look for its tree, the worker itself is stopped.
                    assert not (await stopped(outcome, 0.1)).ok
                    assert free > 2
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for descriptor in taken:
                    os.close(descriptor)
            assert len(os.listdir("/proc/self/fd")) == before
            assert one.processes() == []

    run("asyncio", main)


def test_fifty_starts_and_ends_leave_no_descriptor_thread_or_child(loop: str) -> None:
    async def main() -> None:
        async with job() as one:
            await (await one.start(["true"])).wait()
            descriptors, threads = len(os.listdir("/proc/self/fd")), psutil.Process().num_threads()
            for attempt in range(50):
                process = await one.start(["sleep", "60"], worker=WorkerId("localhost", 0, attempt))
                await stopped(process, 5)
            assert len(os.listdir("/proc/self/fd")) == descriptors
            assert psutil.Process().num_threads() <= threads + 1
            assert one.children() == [one.keeper.guard_pid]

    run(loop, main)


def test_no_start_after_close() -> None:
    async def main() -> None:
        async with job() as one:
            await one.keeper.close()
            await one.keeper.close()
            with pytest.raises(LaunchError, match="the job is ending"):
                await one.start(["true"])

    run("asyncio", main)


@pytest.mark.parametrize("turns", range(5))
def test_close_during_starts_leaves_nothing(turns: int) -> None:
    async def main() -> None:
        async with job() as one:
            starts = [
                asyncio.create_task(one.start(["sleep", "60"], worker=WorkerId("localhost", slot, 0)))
                for slot in range(8)
            ]
            for _ in range(turns):
                await asyncio.sleep(0)
            await one.keeper.close()
            for slot, outcome in enumerate(await asyncio.gather(*starts, return_exceptions=True)):
                told = one.starts.of(WorkerId("localhost", slot, 0))
                if isinstance(outcome, LaunchError):
                    assert "the job is ending" in str(outcome)
                    assert told == ["not started"]
                else:
                    assert not isinstance(outcome, BaseException)
                    assert str(await outcome.wait()) == "killed by SIGKILL"
                    assert told == ["started", "exited", "finished"]

    run("uvloop", main)


_NO_ROOM = (
    (RuntimeError("can't start new thread"), "no thread can be started"),
    (MemoryError(), "no memory is left"),
    (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), "Resource temporarily unavailable"),
    (OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"),
)


@pytest.mark.parametrize(
    ("where", "error", "what"),
    [
        *(pytest.param("spawn", *case) for case in _NO_ROOM),
        *(pytest.param(where, *_NO_ROOM[0]) for where in ("WorkerOutput", "ProcessTree", "GuardLink")),
    ],
)
def test_a_machine_without_room_for_a_worker_is_its_hosts_failure(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception, what: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    async def main() -> None:
        async with job() as one:
            with monkeypatch.context() as patched:
                patched.setattr(keeper, where, fail)
                with pytest.raises(LaunchError, match=rf"^cannot start worker localhost\[0\]: {what}"):
                    await one.start(["sleep", "60"])
            process = await one.start(["true"])  # there is room again
            assert await process.wait() == ExitStatus(0)

    run("uvloop", main)


def test_a_bug_in_a_start_is_no_hosts_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    async def main() -> None:
        failed = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.set_result(context["exception"]))
        async with job() as one:
            monkeypatch.setattr(keeper, "spawn", fail)
            start = asyncio.create_task(one.start(["true"]))
            assert str(await asyncio.wait_for(failed, PATIENCE_S)) == "a bug"
            assert not one.keeper.runs(WORKER)
            start.cancel()

    run("uvloop", main)


@pytest.mark.parametrize("which", ["_end_tree", "_finish"])
def test_an_error_in_a_task_of_the_launcher_reaches_the_loop(
    monkeypatch: pytest.MonkeyPatch, loop: str, which: str
) -> None:
    async def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        told = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.set_result(context["exception"]))
        async with job() as one:
            process = await one.start(["sleep", "60"])
            with monkeypatch.context() as patched:
                patched.setattr(process_tree.ProcessTree, which, fail)
                os.kill(process.pid, signal.SIGKILL)
                await process.exited
                assert isinstance(await asyncio.wait_for(told, PATIENCE_S), ZeroDivisionError)
            if which == "_finish":  # by hand, what it had to do
                await process._finish(ExitStatus(-9))

    run(loop, main)


def test_a_machine_without_room_for_the_launchers_threads_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def second_fails(thread: threading.Thread) -> None:
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    async def main() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", second_fails)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                async with job():
                    pass
        started[0].join()

    run("asyncio", main)
