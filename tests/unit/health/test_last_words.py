"""What a process said of its end."""

from __future__ import annotations

import pytest

from elastic_driver.health.last_words import last_words, waited_for_input

pytestmark = pytest.mark.unit


def test_what_a_traceback_says() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 9, in <module>',
        "    main()",
        '  File "/job/data.py", line 40, in main',
        "    raise ValueError(7)",
        "ValueError: 7",
        "",
    ]
    assert last_words(lines) == ("ValueError: 7", "data.py:40")
    assert last_words([f"[rank12]: {line}" for line in lines]) == ("ValueError: 7", "data.py:40")
    noisy = [*lines, "E0000 00:00:1 context.cc:911] Failed to remove function remotely"]
    assert last_words(noisy, of_traceback=True) == ("ValueError: 7", "data.py:40")
    assert last_words(noisy)[0].startswith("E0000")
    assert last_words(lines[:4], of_traceback=True) == ('File "/job/data.py", line 40, in main', "data.py:40")
    assert last_words(["what a day"], of_traceback=True) == last_words(["what a day"]) == ("what a day", "")
    assert last_words(["what a day", "and what a night"]) == ("and what a night", "")
    assert last_words([]) == ("", "")


def test_what_a_dump_of_stacks_says() -> None:
    lines = [
        "Fatal Python error: Aborted",
        "Thread 0x00007fde4b7fe6c0 (most recent call first):",
        '  File "/usr/lib/python3.11/socket.py", line 706 in readinto',
        "",
        "Thread 0x00007fde57eabb80 (most recent call first):",
        '  File "/job/train.py", line 54 in train',
        '  File "/job/train.py", line 89 in <module>',
    ]
    modules = "Extension modules: numpy.random.mtrand (total: 11)"
    assert last_words(lines) == last_words([*lines, "", modules]) == ("", "train.py:54")
    assert last_words([*lines, "ValueError: 7"])[0] == "ValueError: 7"
    assert last_words(lines[:2]) == ("", "")


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        ("bdb.BdbQuit", True),
        ("EOFError: EOF when reading a line", True),
        ("EOFError", False),
        ("ValueError: bdb.BdbQuit", False),
        ("", False),
    ],
)
def test_which_error_is_one_of_a_prompt(error: str, waited: bool) -> None:
    assert waited_for_input(error) is waited
