"""The page of vitals as the agent reads it: whatever a worker has written there."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.launch.agent.vitals_page import MOST_STACK_BYTES, PAGE_BYTES, PageFacts, VitalsPage, parse_page
from elastic_driver.rendezvous.agent_messages import VitalsSeen, decoded
from elastic_driver.vitals import Traffic, Vitals, Waiting

pytestmark = pytest.mark.unit

NOW_NS = 50_000_000_000
HEAD = ("pid", "pulse", "round", "rank", "steps", "submitted", "finished")
HEAD += ("waits_since", "waited", "commits", "committed_at", "dumps")


def page_of(
    text: bytes = b"",
    sequence: int = 2,
    text_bytes: int | None = None,
    stepping: int = 0,
    own_us: Sequence[int] = (),
    **values: int,
) -> bytes:
    """As native/vitals/page.h lays it out."""
    numbers = {"pid": 7, "rank": -1, **values}
    head = b"ELVITALS" + struct.pack("<II", 2, PAGE_BYTES)
    head += b"".join(struct.pack("<q" if name == "rank" else "<Q", numbers.pop(name, 0)) for name in HEAD)
    traffic = b"".join(struct.pack("<Q", numbers.pop(f"kind{i}", 0)) for i in range(16))
    assert not numbers
    tail = struct.pack("<4Q", sequence, len(text) if text_bytes is None else text_bytes, stepping, 0)
    tail += struct.pack("<32I", *own_us, *[0] * (32 - len(own_us))) + text
    return (head.ljust(128, b"\0") + traffic + tail).ljust(PAGE_BYTES, b"\0")


@pytest.fixture
def page() -> Iterator[VitalsPage]:
    made = VitalsPage()
    yield made
    made.close()


def write(page: VitalsPage, data: bytes) -> None:
    descriptor = os.open(page.path, os.O_WRONLY)
    try:
        os.pwrite(descriptor, data, 0)
    finally:
        os.close(descriptor)


def test_what_a_worker_has_written_is_read(page: VitalsPage) -> None:
    text = b"48500000000\t0-2,5\tallreduce 'grad.3'\n49000000000\t1\tbarrier 'x'\n"
    assert page.read(NOW_NS) is None
    write(
        page,
        page_of(
            text,
            pulse=49_900_000_000,
            round=3,
            rank=2,
            steps=10,
            submitted=9,
            finished=8,
            waits_since=48_000_000_000,
            waited=1_500_000_000,
            commits=4,
            committed_at=45_000_000_000,
            dumps=60,
            kind0=5,
            kind1=500,
            kind12=1,
        ),
    )
    assert page.read(NOW_NS) == PageFacts(
        pid=7,
        pulse_s=0.1,
        round_id=3,
        rank=2,
        steps=10,
        own_s=None,
        submitted=9,
        finished=8,
        waits_s=2.0,
        waited_s=1.5,
        commits=4,
        committed_s=5.0,
        dump_signal=60,
        traffic=(Traffic("allreduce", 5, 500), Traffic("join", 1, 0)),
        waiting=(Waiting("allreduce 'grad.3'", 1.5, (0, 1, 2, 5)), Waiting("barrier 'x'", 1.0, (1,))),
    )


@pytest.mark.parametrize(
    "data",
    [
        page_of(pid=0),
        page_of(pid=1 << 40),
        page_of(rank=-2),
        page_of(steps=1 << 60),
        page_of(waited=1 << 63),
        page_of(pulse=NOW_NS + 2_000_000_000),
        page_of(committed_at=1 << 63),
        page_of(kind3=1 << 63),
        page_of().replace(b"ELVITALS", b"RUBBISH!"),
        page_of().replace(b"ELVITALS\x02", b"ELVITALS\x01"),
        page_of().replace(b"ELVITALS\x02", b"ELVITALS\x03"),
        b"",
        page_of()[:-1],
        page_of() + b"x",
    ],
)
def test_what_can_not_be_says_nothing(data: bytes) -> None:
    assert parse_page(data, NOW_NS) is None


@pytest.mark.parametrize(
    ("text", "more", "expected"),
    [
        (b"1\t0\tone", {"sequence": 3}, ()),
        (b"1\t0\tone", {"text_bytes": PAGE_BYTES}, ()),
        (b"1\t0\tone", {"text_bytes": 1 << 63}, ()),
        (b"\xff\t0\tone\n\t\t\nx\n1\t\tnobody\n1\t5-x\tno\n1\t-\tno\n1\t0\t", {}, ()),
        (b"60000000000\t0\tlater than now", {}, (Waiting("later than now", 0.0, (0,)),)),
        (b"49000000000\t0-999999999\tall", {}, (Waiting("all", 1.0, tuple(range(64))),)),
        (b"49000000000\t7-2,9\tbackwards", {}, (Waiting("backwards", 1.0, (9,)),)),
        (b"49000000000\t0\t" + b"\xc3\xa9" * 400, {}, (Waiting("é" * 240, 1.0, (0,)),)),
        (b"49000000000\t0\tx\n" * 20, {}, (Waiting("x", 1.0, (0,)),) * 8),
    ],
)
def test_its_text_may_be_anything(text: bytes, more: dict[str, int], expected: tuple[Waiting, ...]) -> None:
    found = parse_page(page_of(text, **more), NOW_NS)
    assert found is not None
    assert found.waiting == expected


def own_s_of(own_us: Sequence[int], steps: int = 20, **more: int) -> float | None:
    found = parse_page(page_of(steps=steps, own_us=own_us, **more), NOW_NS)
    assert found is not None
    return found.own_s


def test_what_a_step_takes_of_its_own_is_the_mean_of_the_last_twenty() -> None:
    assert own_s_of([1000] * 10 + [3000] * 10) == pytest.approx(0.001125), (
        "more than 1.25 times their median is no more"
    )
    assert own_s_of([2000] * 10 + [2400] * 10) == pytest.approx(0.0022)
    assert own_s_of([1000] * 19 + [10_000_000]) == pytest.approx(0.0010125)
    # The ring goes round: of 45 steps the last twenty are 26 to 45, in places 25 to 31 and 0 to 12.
    assert own_s_of([4000] * 13 + [9] * 12 + [4000] * 7, steps=45) == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("own_us", "more"),
    [
        ([1000] * 19, {"steps": 19}),  # too few
        ([1000] * 32, {"steps": 19}),
        ([1000] * 8 + [0] + [1000] * 23, {"steps": 20}),  # a round began
        ([1000] * 32, {"steps": 30, "stepping": 7}),  # a step is being written
    ],
)
def test_when_it_is_not_known_what_a_step_takes(own_us: list[int], more: dict[str, int]) -> None:
    assert own_s_of(own_us, **more) is None


def test_steps_that_are_written_while_the_page_is_read_are_read_the_next_time(
    page: VitalsPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(page, page_of(steps=20, own_us=[1000] * 20))
    pread, reads = os.pread, 0

    def late(descriptor: int, size: int, at: int) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 3:  # between the page and the second look at what says whether it is whole
            write(page, page_of(steps=21, stepping=2, own_us=[1000] * 21))
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", late)
    found = page.read(NOW_NS)
    assert found is not None
    assert (found.steps, found.own_s) == (20, None)
    found = page.read(NOW_NS)
    assert found is not None
    assert (found.steps, found.own_s) == (21, 0.001)


@given(
    st.dictionaries(st.sampled_from([name for name in HEAD if name != "rank"]), st.integers(0, 2**64 - 1), max_size=4),
    st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 5),
    st.binary(max_size=60) | st.text(alphabet="0123456789-,\t\nab", max_size=60).map(str.encode),
    st.integers(0, 2**64 - 1) | st.just(2),
)
def test_whatever_is_read_can_be_sent(values: dict[str, int], rank: int, text: bytes, sequence: int) -> None:
    found = parse_page(page_of(text, sequence, **{"pid": 7, **values}, rank=rank), NOW_NS)
    if found is None:
        return
    facts = {name: getattr(found, name) for name in PageFacts.__dataclass_fields__ if name != "dump_signal"}
    vitals = Vitals(at_s=1.0, **facts)
    told = decoded(VitalsSeen({"a": vitals}).message())
    assert isinstance(told, VitalsSeen)
    read = told.workers["a"]
    assert (read.pid, read.rank, read.steps, read.traffic) == (found.pid, found.rank, found.steps, found.traffic)
    assert [each.missing for each in read.waiting] == [each.missing for each in found.waiting]


def test_a_worker_that_cuts_its_file_or_makes_it_long_does_no_harm(page: VitalsPage) -> None:
    write(page, page_of())
    for size in (0, 10, PAGE_BYTES - 1):
        os.truncate(page.path, size)
        assert page.read(NOW_NS) is None
        assert (page.stack_bytes(), page.stacks()) == (0, "")
    page.forget_stacks()
    write(page, page_of())
    os.truncate(page.path, 1 << 40)
    assert page.read(NOW_NS) is not None
    assert len(page.stacks()) == MOST_STACK_BYTES
    page.forget_stacks()
    assert page.stack_bytes() == 0
    page.close()
    page.close()
    assert page.read(NOW_NS) is None
    assert not Path(page.path).exists()
