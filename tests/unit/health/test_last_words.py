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


def test_what_comes_after_a_traceback_is_not_its_error() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "/job/train.py", line 9, in <module>',
        "    main()",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
    ]
    error = "RuntimeError: CUDA error: an illegal memory access was encountered", "train.py:9"
    long = [*lines, "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."]
    bars = [*lines, "train:  51%|█████▏    | 41/80 [00:02<00:02, 15.59it/s]", "tokens:  51%|█████▏    | 41/80"]
    ignored = [
        *lines,
        "Exception ignored in: <function tqdm.__del__ at 0x7f3c>",
        "Traceback (most recent call last):",
        '  File "/venv/lib/python3.11/site-packages/tqdm/std.py", line 1148, in __del__',
        "AttributeError: 'tqdm' object has no attribute 'pos'",
    ]
    for printed in (long, bars, ignored):
        assert last_words(printed, of_traceback=True) == error
    # Where nothing else failed, it is what there is to say.
    assert last_words(ignored[4:], of_traceback=True)[0] == "AttributeError: 'tqdm' object has no attribute 'pos'"


def test_the_place_of_an_error_is_in_the_users_own_code() -> None:
    begin = "Traceback (most recent call last):"
    own, deeper = '  File "/job/train.py", line 9, in <module>', '  File "/job/model.py", line 30, in forward'
    package = '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125, in forward'
    module = '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode'
    error = "RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert last_words([begin, own, deeper, package, error]) == (error, "model.py:30")
    assert last_words([begin, own, module, error]) == (error, "train.py:9")
    # Where only the innermost frames are left of it, or the user's were of another error, it is what raised it.
    assert last_words([package, error]) == (error, "linear.py:125")
    assert last_words([begin, own, "KeyError: 1", begin, package, error]) == (error, "linear.py:125")


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
