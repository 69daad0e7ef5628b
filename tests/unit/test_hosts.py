"""Hosts and workers as texts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import (
    MAX_LABELS,
    MAX_SLOTS_PER_HOST,
    Host,
    WorkerId,
    in_natural_order,
    parse_host,
    parse_hosts,
    parse_labels,
    total_slots,
)

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
        ("a: 1", "slots are written as host:slots"),
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
        ("a :2", "host 'a': cannot read ':2' as a label"),
        ("-a:1", "expected host or host:slots"),
        ("a/b:1", "expected host or host:slots"),
        ("höst:1", "expected host or host:slots"),
        (f"{'a' * 256}:1", "a host's name has at most 255 characters"),
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


def test_labels_stand_behind_the_host_and_keep_their_order() -> None:
    host = parse_host(" a:2\track=r1  spot topology.kubernetes.io/zone=eu-1a protected ", default_slots=None)
    assert host == Host("a", 2, ("rack=r1", "spot", "topology.kubernetes.io/zone=eu-1a", "protected"))
    assert (host.rack, host.protected) == ("r1", True)
    assert (Host("a", 2).rack, Host("a", 2, ("racks=2", "unprotected")).protected) == ("", False)
    assert parse_host("[::1] spot", default_slots=3) == Host("::1", 3, ("spot",))
    assert hash(host) == hash(Host("a", 2, host.labels))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("=x", "cannot read '=x' as a label: expected key=value or a word"),
        ("rack=", "cannot read 'rack=' as a label"),
        ("a=b=c", "cannot read 'a=b=c' as a label"),
        ("-x", "cannot read '-x' as a label"),
        ("2", "cannot read '2' as a label: slots are written as host:slots"),
        ("10.0.0.2", "cannot read '10.0.0.2' as a label"),
        ("x,y", "cannot read 'x,y' as a label"),
        ("töpf", "cannot read 'töpf' as a label"),
        ("x\x1b[2J", "cannot read 'x\\x1b[2J' as a label"),
        ("spot spot", "the label 'spot' is there twice"),
        ("zone=1 zone=2", "the label 'zone' is there twice"),
        ("spot spot=yes", "the label 'spot' is there twice"),
        ("rack", "cannot use the label 'rack': it needs a value, as in rack=r1"),
        ("protected=no", "cannot use the label 'protected=no': it has no value"),
        ("slots=4", "cannot use the label 'slots=4': slots are written as host:slots"),
        ("max_slots=4", "slots are written as host:slots"),
        ("k" * 64, "key and value have at most 63 characters"),
        (f"k={'v' * 64}", "key and value have at most 63 characters"),
        (" ".join(f"k{n}" for n in range(MAX_LABELS + 1)), "33 labels are too many for a host: the most is 32"),
    ],
)
def test_labels_that_cannot_be(words: str, complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_host(f"a:1 {words}", default_slots=None)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("host 'a:1': ")
    assert len(str(caught.value)) < 300


def test_labels_may_be_as_long_and_as_many_as_is_said() -> None:
    words = ["k" * 63, f"key={'v' * 63}", *(f"k{number}" for number in range(MAX_LABELS - 2))]
    assert parse_labels(words) == tuple(words)


def test_a_line_with_a_bad_label_is_named() -> None:
    with pytest.raises(SettingsError, match="line 3: host 'b:1': the label 'spot' is there twice"):
        parse_hosts(["a:1 spot", "", "b:1 spot spot  # why"], default_slots=None)


label_words = st.from_regex(r"[A-Za-z]([A-Za-z0-9._/-]{0,60}[A-Za-z0-9])?(=[A-Za-z0-9._:/@+-]{1,63})?", fullmatch=True)


@given(st.lists(label_words, max_size=6, unique_by=lambda word: word.partition("=")[0]), st.booleans())
def test_a_host_with_labels_reads_what_it_writes(words: list[str], has_ipv6: bool) -> None:
    known = {"rack", "protected", "slots", "max_slots", "max-slots"}
    host = Host("fe80::1%eth0" if has_ipv6 else "a-1", 7, tuple(w for w in words if w.partition("=")[0] not in known))
    assert parse_host(str(host), default_slots=None) == host


def test_natural_order_has_worker_2_before_worker_10() -> None:
    def ordered(*names: str) -> list[str]:
        return [host.name for host in in_natural_order(Host(name, 1) for name in names)]

    assert ordered("w-1", "w-10", "w-2", "w-9") == ["w-1", "w-2", "w-9", "w-10"]
    assert ordered("r2-w1", "r1-w10", "r1-w9") == ["r1-w9", "r1-w10", "r2-w1"]
    assert ordered("10.0.0.10", "10.0.0.9") == ["10.0.0.9", "10.0.0.10"]
    assert ordered("gpu-2", "cpu-7", "9", "gpu-1", "cpu") == ["cpu", "cpu-7", "gpu-1", "gpu-2", "9"]
    # Equal numbers, unequal texts: still one order.
    assert ordered("w01", "w1") == ordered("w1", "w01") == ["w01", "w1"]


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
