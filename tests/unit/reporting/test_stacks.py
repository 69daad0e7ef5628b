"""Like stacks are put together, and shown."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.reporting import stacks
from elastic_driver.reporting.stacks import families, process_of, spell_ranks
from elastic_driver.reporting.stacks_text import stacks_text

pytestmark = pytest.mark.unit

DUMP = """Thread 0x00007f33 [loader] (most recent call first):
  File "/home/a/load.py", line 7 in fetch
  File "???", line ??? in ???

Current thread 0x00007f35 [python] (most recent call first):
  File "/home/a/train.py", line 40 in <module>

Extension modules: numpy.core (total: 1)
"""


@given(st.text() | st.lists(st.sampled_from([*DUMP.splitlines(), "\x1b[2J", "", '  File "a', "..."])).map("\n".join))
def test_rubbish_is_left_out(text: str) -> None:
    answer = {"stacks": [{"worker": text, "rank": 0, "host": text, "pid": 1, "text": text}], "waiting": []}
    for ungrouped in (False, True):
        shown = stacks_text(answer, ungrouped=ungrouped)
        assert not [char for char in shown if ord(char) < 32 and char != "\n"]


def stack(*frames: tuple[str, int]) -> str:
    lines = "".join(f'  File "/home/a/train.py", line {line} in {name}\n' for name, line in frames)
    return f"Current thread 0x0000000000000001 (most recent call first):\n{lines}"


STEP = (("allreduce", 5), ("step", 20), ("main", 40), ("<module>", 60))
LOAD = (("read", 9), ("step", 20), ("main", 40), ("<module>", 60))
SAVE = (("save", 33), ("<module>", 61))


def entry(rank: int, *frames: tuple[str, int], **more: object) -> dict[str, object]:
    known: dict[str, object] = {"worker": f"h{rank // 4}[{rank % 4}]#0", "rank": rank, "host": f"h{rank // 4}"}
    return {**known, "pid": 100 + rank, "text": stack(*frames) if frames else "", **more}


def test_the_odd_ones_come_first_and_kin_say_once_what_they_share() -> None:
    entries = [entry(rank, *STEP) for rank in (0, 1, 3, 5, 6)]
    entries += [entry(2, *LOAD), entry(4, *SAVE), entry(7, *SAVE), entry(8, reason="it is stopped", state="T")]
    found = families(process_of(each) for each in entries)
    assert [[[p.rank for p in group.processes] for group in family.groups] for family in found] == [
        [[2], [0, 1, 3, 5, 6]],
        [[8]],
        [[4, 7]],
    ]
    assert [frame.function for frame in found[0].shared] == ["step", "main", "<module>"]
    waiting = [{"name": "allreduce 'grad.3'", "since_s": 12.4, "missing": [2]}]
    assert stacks_text({"stacks": entries, "waiting": waiting}).split("\n") == [
        "allreduce 'grad.3' has waited 12 s for rank 2 (host h0)",
        "",
        "rank 2 (host h0, pid 102):",
        "    /home/a/train.py:9 in read",
        "ranks 0-1,3,5-6, 5 of 9:",
        "    /home/a/train.py:5 in allreduce",
        "all of these are called from",
        "    /home/a/train.py:20 in step",
        "    /home/a/train.py:40 in main",
        "    /home/a/train.py:60 in <module>",
        "",
        "rank 8 (host h2, pid 108, stopped by a signal): it is stopped",
        "",
        "ranks 4,7, 2 of 9:",
        "    /home/a/train.py:33 in save",
        "    /home/a/train.py:61 in <module>",
    ]


def test_the_import_system_is_left_out_of_a_worker_that_imports() -> None:
    importing = """Current thread 0x0000000000000001 (most recent call first):
  File "<frozen importlib._bootstrap_external>", line 940 in exec_module
  File "/home/a/model.py", line 3 in <module>
  File "<frozen importlib._bootstrap_external>", line 940 in exec_module
  File "<frozen importlib._bootstrap>", line 690 in _load_unlocked
  File "/home/a/train.py", line 2 in <module>
"""
    answer = {"stacks": [entry(0, text=importing)], "waiting": []}
    assert stacks_text(answer).splitlines()[1:] == [
        "    /home/a/model.py:3 in <module>",
        "    /home/a/train.py:2 in <module>",
    ]
    assert "exec_module" in stacks_text(answer, ungrouped=True)
    only = "\n".join(importing.splitlines()[:2])
    assert "exec_module" in stacks_text({"stacks": [entry(0, text=only)], "waiting": []})


def test_ranks_are_spelled_short() -> None:
    assert spell_ranks([5, 0, 1, 2, 3]) == "0-3,5"
    assert spell_ranks([]) == ""
    assert spell_ranks(range(0, 4096, 2)).endswith(",... (2048 ranks)")
    assert len(spell_ranks(range(0, 4096, 2))) < 90


def test_thousands_of_ranks_are_quick_and_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read once, and each kind of them is compared with few: with all others there would be 335,000."""
    threads = "".join(
        f"Thread 0x{number:016x} (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'
        '  File "/usr/lib/python3.11/threading.py", line 995 in _bootstrap\n\n'
        for number in range(4)
    )
    deep = tuple((f"level_{level}", level) for level in range(40))
    entries = [entry(rank, *STEP[:2], *deep) for rank in range(4096)]
    for rank in range(0, 4096, 5):  # each of them somewhere else
        entries[rank] = entry(rank, (f"f{rank}", rank), *deep)
    for each in entries:
        each["text"] = f"{threads}{each['text']}"
    calls: collections.Counter[str] = collections.Counter()

    def counted(name: str) -> Callable[..., Any]:
        call = getattr(stacks, name)

        def count(*words: Any) -> Any:
            calls[name] += 1
            return call(*words)

        return count

    for name in ("parse", "_common"):
        monkeypatch.setattr(stacks, name, counted(name))
    shown = stacks_text({"stacks": entries, "waiting": []})
    assert calls["parse"] == 4096
    assert 0 < calls["_common"] < 4096
    assert len(shown.splitlines()) < 200
