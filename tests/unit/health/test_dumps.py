"""faulthandler's texts are read as they come, and compared."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.health.dumps import Frame, Thread, alike, debugger, innermost, main_thread, parse

pytestmark = pytest.mark.unit

STACK = """Current thread 0x01 (most recent call first):
  File "/x/train.py", line 12 in wait
  File "/x/train.py", line 3 in <module>
"""

SCRIPT = """
import concurrent.futures, faulthandler, queue, sys, threading

lines = queue.Queue()


def feed():
    lines.get()


threading.Thread(target=feed, name="feeder", daemon=True).start()
waiter = threading.Thread(target=threading.Event().wait, daemon=True)
waiter.start()
pool = concurrent.futures.ThreadPoolExecutor(1)
pool.submit(int).result()


def deeper(levels):
    if levels:
        deeper(levels - 1)
    else:
        faulthandler.dump_traceback(sys.stdout)


def main():
    deeper(int(sys.argv[1]))


main()
sys.stdout.flush()
"""


def dump(levels: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(levels)], capture_output=True, text=True, timeout=150, check=True
    )
    return done.stdout


def test_what_this_python_prints_is_read() -> None:
    threads = parse(dump(1))
    main = main_thread(threads)
    assert main is not None
    assert [frame.function for frame in main.frames] == ["deeper", "deeper", "main", "<module>"]
    assert not main.is_started
    shown = [thread for thread in threads if thread is not main and not thread.is_idle]
    assert [thread.own[-1].function for thread in shown] == ["feed"], "neither the pool's thread nor one that waits"
    assert shown[0].own[0].place == "threading.py"


def test_a_stack_that_is_cut_is_still_the_main_threads() -> None:
    main = main_thread(parse(dump(200)))
    assert main is not None
    assert (len(main.frames), main.is_cut) == (100, True)
    assert {frame.function for frame in main.frames} == {"deeper"}


NEWER = """Thread 0x00007f33 [pt_data_loader] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 373 in wait
  File "/home/a/load.py", line 7 in fetch
  File "/usr/lib/python3.14/threading.py", line 1044 in _bootstrap_inner
  File "/usr/lib/python3.14/threading.py", line 1014 in _bootstrap

Thread 0x00007f34 [native] (most recent call first):
  <no Python frame>

Current thread 0x00007f35 [python] (most recent call first):
  Garbage-collecting
  File "/home/a, b/train "x", line 3 in f.py", line 12 in step
  File "???", line ??? in ???
  File "/home/a/train.py", line 40 in <module>

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x48 [0x5]
  <truncated rest of calls>

Extension modules: numpy.core (total: 1)
"""


def test_newer_pythons_name_their_threads_and_add_sections() -> None:
    loader, native, main = parse(NEWER)
    assert (loader.name, native.name, main.name) == ("pt_data_loader", "native", "python")
    assert main_thread([loader, native, main]) is main
    assert main.frames == (
        Frame('/home/a, b/train "x", line 3 in f.py', 12, "step"),
        Frame("???", 0, "???"),
        Frame("/home/a/train.py", 40, "<module>"),
    )
    assert native.is_idle
    assert not loader.is_idle


def test_one_thread_alone_and_a_lost_head() -> None:
    [alone] = parse('Stack (most recent call first):\n  File "a.py", line 1 in <module>\n')
    [headless] = parse('  File "b.py", line 2 in f\n  File "b.py", line 9 in <module>\n')
    assert (alone.frames[0].line, headless.frames[0].function, len(headless.frames)) == (1, "f", 2)


def test_our_own_threads_are_known_by_where_they_begin() -> None:
    started = (Frame("/usr/lib/python3.11/threading.py", 982, "run"),)
    started += (Frame("/usr/lib/python3.11/threading.py", 1002, "_bootstrap"),)
    watch = Frame("/x/site-packages/elastic_driver/worker/rounds/watch.py", 90, "_run")
    users = Frame("/home/a/train.py", 5, "log_loop")
    assert Thread((watch, *started)).is_ours
    assert not Thread((watch, users, *started)).is_ours, "a thread of the script's that calls us"
    assert not Thread((watch,)).is_ours, "the main thread"
    assert watch.place == "elastic_driver/worker/rounds/watch.py"


@given(st.text() | st.lists(st.sampled_from([*NEWER.splitlines(), "\x1b[2J", "", '  File "a', "..."])).map("\n".join))
def test_rubbish_is_left_out(text: str) -> None:
    threads = parse(text)
    main_thread(threads)
    assert all(isinstance(frame.line, int) for thread in threads for frame in thread.frames)


@given(st.integers(0, len(NEWER)), st.text(alphabet=NEWER))
def test_a_text_may_end_anywhere(cut: int, text: str) -> None:
    assert len(parse(NEWER[:cut] + text)) <= NEWER[:cut].count("recent") + text.count("recent") + 1


def test_stacks_are_compared_by_what_the_user_runs() -> None:
    own = (
        'Thread 0x02 (most recent call first):\n  File "/p/elastic_driver/worker/rounds/watch.py", line {} in run\n'
        '  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap\n\n'
    )
    assert alike(own.format(5) + STACK, own.format(9) + STACK)
    assert alike(own.format(5) + STACK, STACK.replace("Current thread", "Thread"))
    # Also those that it has started for the script, or for TensorFlow.
    for place in ("compat/data_loader.py", "tensorflow/following.py"):
        of_script = own.replace("worker/rounds/watch.py", place)
        assert alike(of_script.format(5) + STACK, of_script.format(9) + STACK)
    mine = own.replace("/p/elastic_driver/worker", "/x/my_elastic_driver/worker")
    assert not alike(mine.format(5) + STACK, mine.format(9) + STACK)
    assert not alike(STACK, STACK.replace("line 12", "line 13"))
    assert innermost(own.format(5) + STACK) == ("/x/train.py:12 in wait", "/x/train.py:3 in <module>")
    assert innermost("rubbish") == ()
    library = "".join(f'  File "/usr/lib/python3.11/subprocess.py", line {line} in wait\n' for line in (1, 2, 3, 4))
    head, frames = STACK.split("\n", 1)
    assert innermost(f"{head}\n{library}{frames}") == (
        "subprocess.py:1 in wait",
        "subprocess.py:2 in wait",
        "/x/train.py:12 in wait",
    )
    assert len(innermost(f"{head}\n{library}")) == 3
    assert debugger(own.format(5) + STACK) == debugger("rubbish") == ""
    assert debugger(STACK.replace("/x/train.py", "/y/debugpy/_vendored/pydevd/pydevd.py")) == "pydevd"
