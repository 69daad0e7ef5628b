"""Hosts and workers as texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import MAX_SLOTS_PER_HOST, Host, WorkerId, parse_host, parse_hosts, total_slots

pytestmark = [pytest.mark.unit]


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("a", Host("a", 3)),
        ("a:2", Host("a", 2)),
        ("  a.b-c_d:12\t", Host("a.b-c_d", 12)),
        ("10.0.0.1:1", Host("10.0.0.1", 1)),
        ("[::1]", Host("::1", 3)),
        ("[::1]:2", Host("::1", 2)),
        ("[fe80::1%eth0]:4", Host("fe80::1%eth0", 4)),
        ("a:007", Host("a", 7)),
        (f"a:{MAX_SLOTS_PER_HOST}", Host("a", MAX_SLOTS_PER_HOST)),
    ],
)
def test_hosts_that_can_be(text: str, host: Host) -> None:
    assert parse_host(text, default_slots=3) == host


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "cannot read '' as a host"),
        (":2", "expected host or host:slots"),
        ("a:", "slots '' is not an integer"),
        ("a:x", "slots 'x' is not an integer"),
        ("a:1.5", "is not an integer"),
        ("a:+1", "is not an integer"),
        ("a: 1", "is not an integer"),
        ("a:٣", "is not an integer"),
        ("a:1e3", "is not an integer"),
        ("a:0", "at least 1, not 0"),
        ("a:-1", "at least 1, not -1"),
        ("a:4097", "at most 4096"),
        ("a:1000000000", "slots must be at most 4096, not 1000000000"),
        ("a:9999999999999999999", "slots must be at most 4096, not 9999999999999999999"),
        (f"a:{'9' * 5000}", "slots must be at most 4096, not 999"),
        ("a:-1000000000", "at least 1, not -1000000000"),
        ("::1", "write an IPv6 address in brackets"),
        ("::1:2", "write an IPv6 address in brackets"),
        ("[::1", "expected [IPv6]"),
        ("[::1]2", "expected [IPv6]"),
        ("[localhost]:2", "expected [IPv6]"),
        ("[::1]:", "slots '' is not an integer"),
        ("a b", "expected host or host:slots"),
        ("-a:1", "expected host or host:slots"),
        ("a/b:1", "expected host or host:slots"),
        ("a\n:1", "expected host or host:slots"),
        ("höst:1", "expected host or host:slots"),
    ],
)
def test_hosts_that_cannot_be(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_host(text, default_slots=1)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_host_without_slots_says_what_to_do() -> None:
    with pytest.raises(SettingsError, match="write a:SLOTS, or give --slots-per-host"):
        parse_host("a", default_slots=None)


def test_lines_keep_their_order_and_comments_go() -> None:
    lines = ["# all", "", "  z:2  # old", "a", "\t", "[::1]:1"]
    assert parse_hosts(lines, default_slots=4) == (Host("z", 2), Host("a", 4), Host("::1", 1))
    assert total_slots(parse_hosts(lines, default_slots=4)) == 7
    assert parse_hosts([], default_slots=None) == ()


def test_errors_name_the_line() -> None:
    with pytest.raises(SettingsError, match=r"^line 3: host 'a' is named twice \(first on line 1\)$"):
        parse_hosts(["a:1", "b:1", "a:2"], default_slots=None)
    with pytest.raises(SettingsError, match=r"^line 2: .*slots must be at least 1"):
        parse_hosts(["# a:0", "a:0"], default_slots=None)


_NAMES = st.from_regex(r"[a-z0-9_]([a-z0-9._-]{0,20}[a-z0-9_])?", fullmatch=True) | st.ip_addresses().map(str)


@given(_NAMES, st.integers(1, MAX_SLOTS_PER_HOST))
def test_a_host_reads_back(name: str, slots: int) -> None:
    host = Host(name, slots)
    assert parse_host(str(host), default_slots=None) == host


@given(_NAMES, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_worker_reads_back(name: str, slot: int, attempt: int) -> None:
    worker = WorkerId(name, slot, attempt)
    assert WorkerId.parse(worker.key) == worker


@given(st.text(max_size=40))
def test_rubbish_is_refused_in_our_own_words(text: str) -> None:
    try:
        host = parse_host(text, default_slots=1)
    except SettingsError:
        return
    assert parse_host(str(host), default_slots=None) == host


@pytest.mark.parametrize("key", ["", "a", "a[0]", "a[x]#0", "a[0]#", "a[-1]#0", "[0]#0", "a b[0]#0", "a[0]#0 "])
def test_workers_that_cannot_be(key: str) -> None:
    with pytest.raises(SettingsError, match="host\\[slot\\]#attempt"):
        WorkerId.parse(key)


def test_the_attempt_shows_from_the_second_on() -> None:
    assert [str(WorkerId("a", 1, attempt)) for attempt in (0, 1)] == ["a[1]", "a[1]#1"]
