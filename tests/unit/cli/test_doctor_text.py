"""What elasticrun doctor shows."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from elastic_driver.cli.doctor_text import as_data, text_of
from elastic_driver.doctor.checkup import Checkup
from elastic_driver.doctor.facts import UNLIMITED, Disk, HostFacts, Meeting
from elastic_driver.doctor.findings import Finding, Level
from elastic_driver.doctor.seen import Link, Seen
from elastic_driver.version import __version__

pytestmark = pytest.mark.unit

FACTS = HostFacts(
    package="0.1.0",
    python="3.12.3",
    torch="2.9.0+cu128",
    kernel="6.8.0",
    libc="glibc 2.39",
    gpus=("NVIDIA H200",) * 8,
    gpu_driver="570.1",
    clock_s=-3.2,
    clock_error_s=5e-4,
    limits={"nofile": 1024, "nproc": UNLIMITED, "memlock": 8 << 20, "core": 0},
    shm_bytes=8 << 30,
    disks=(Disk("tmp", 63 << 30, writable=True),),
    cpus=96,
    memory_bytes=1000 << 30,
    available_bytes=900 << 30,
    meeting=Meeting(2, True, 1e-4, 5e-3),
)


def checkup() -> Checkup:
    seen = Seen(links={("node1", "node2"): Link(("node1", "node2"), 0.2, 9400.0)})
    return Checkup(("node1", "node2", "node3"), {"node1": FACTS, "node2": FACTS}, seen, "")


def test_problems_come_first_each_with_what_to_do() -> None:
    stops = Finding(Level.STOPS, ("node3",), f"cannot read {os.path.expanduser('~')}/key", "chmod it")
    warns = Finding(Level.WARNS, tuple(f"node{number}" for number in range(9)), "its clock is behind")
    assert text_of(checkup(), [stops, warns]).splitlines()[:5] == [
        f"elasticrun doctor {__version__}: 3 hosts, 2 problems, 1 would stop a job",
        "[stops] node3: cannot read ~/key",
        "        -> chmod it",
        "[warns] node0, node1, node2, node3, node4, node5 and 3 more: its clock is behind",
        "",
    ]


def test_hosts_the_network_and_the_allreduce() -> None:
    lines = text_of(checkup(), []).splitlines()
    assert lines[0] == f"elasticrun doctor {__version__}: 3 hosts, no problems found"
    words = [line.split() for line in lines]
    assert words[3][:6] == ["node1", "3.12.3", "2.9.0+cu128", "8", "x", "NVIDIA"]
    assert words[3][-2:] == ["-3200.0±0.5", "ms"]
    [alike] = [line for line in lines if line.startswith("node1 and 1 more")]
    assert alike.split()[4:] == ["6.8.0", "glibc", "2.39", "570.1", "1024", "unlimited", "8192", "kB", "0", "8.0", "GB"]
    assert ["node1", "-", "node2", "0.20", "ms", "9,400", "Mbit/s"] in words
    assert lines[-1] == "allreduce over 2 hosts: right, 0.10 ms for 4 bytes, 5.0 ms for 4 MB"


def test_a_wrong_sum_is_no_right_one() -> None:
    wrong = replace(FACTS, meeting=Meeting(1, False, 1e-4, 5e-3))
    assert "WRONG" in text_of(Checkup(("node1",), {"node1": wrong}, Seen(), ""), []).splitlines()[-1]


def test_no_home_is_shown_to_programs() -> None:
    """However deep it is in what hosts say."""
    home = os.path.expanduser("~")
    facts = replace(FACTS, lacks=(f"{home}/x is missing",), disks=(Disk("tmp", error=f"{home}: gone"),))
    seen = Seen(message=f"cannot read {home}/key")
    text = json.dumps(as_data(Checkup(("node1",), {"node1": facts}, seen, ""), []))
    for shown in ("~/x is missing", "~: gone", "cannot read ~/key"):
        assert shown in text
    assert home not in text


def test_the_same_for_programs() -> None:
    found = json.loads(json.dumps(as_data(checkup(), [Finding(Level.STOPS, ("node3",), "it hangs", "wait")])))
    assert found["problems"] == [{"level": "stops", "hosts": ["node3"], "what": "it hangs", "advice": "wait"}]
    assert found["hosts"]["node3"] is None
    assert found["hosts"]["node1"]["limits"]["nofile"] == 1024
    assert found["network"] == [{"hosts": ["node1", "node2"], "rtt_ms": 0.2, "mbit_s": 9400.0}]
