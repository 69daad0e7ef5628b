"""What facts of hosts mean: what would stop a job, what would slow it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_driver.doctor.facts import UNLIMITED, Disk, HostFacts, Meeting
from elastic_driver.doctor.findings import Finding, Level, findings_of, stops
from elastic_driver.doctor.seen import Seen

pytestmark = pytest.mark.unit

GOOD = HostFacts(
    package="0.1.0",
    python="3.12.1",
    torch="2.9.0",
    numpy="2.0",
    machine="x86_64",
    cuda="12.8",
    gpus=("H200", "H200"),
    gpu_driver="570.1",
    clock_s=0.01,
    clock_error_s=0.001,
    limits={"nofile": 65536, "nproc": UNLIMITED, "memlock": 8 << 20, "core": 0},
    shm_bytes=8 << 30,
    disks=(Disk("tmp", 50 << 30, writable=True),),
    cpus=8,
    memory_bytes=64 << 30,
    available_bytes=60 << 30,
    meeting=Meeting(2, True, 1e-4, 1e-3),
)


def judged(*hosts: HostFacts | None, seen: Seen | None = None) -> list[Finding]:
    names = [f"node{number}" for number in range(1, len(hosts) + 1)]
    facts = {name: each for name, each in zip(names, hosts, strict=True) if each is not None}
    return findings_of(names, facts, seen or Seen(), limit_s=60.0)


def test_two_good_hosts_have_no_problem() -> None:
    assert judged(GOOD, GOOD) == []


@pytest.mark.parametrize(
    ("changed", "level", "what"),
    [
        ({"python": "3.11.9"}, Level.WARNS, "Python: 3.11, on the other hosts 3.12"),
        ({"python": "3.12.9"}, None, ""),
        ({"torch": ""}, Level.WARNS, "PyTorch: missing, on the other hosts 2.9.0"),
        ({"torch_error": "OSError: libcudart.so.12"}, Level.STOPS, "cannot be imported: OSError: libcudart.so.12"),
        ({"native_error": "the native extension was not built"}, Level.WARNS, "the native extension was not built"),
        ({"gpus": ("H200",)}, Level.WARNS, "number of GPUs: 1, on the other hosts 2"),
        ({"gpu_driver": "550.2"}, Level.WARNS, "GPU driver: 550.2, on the other hosts 570.1"),
        ({"cuda": ""}, Level.WARNS, "it has GPUs, but its PyTorch has no CUDA"),
        ({"gpu_error": "nvidia-smi: no devices were found"}, Level.WARNS, "no devices were found"),
        ({"clock_s": -3.2}, Level.WARNS, "its clock is 3.2 s behind the one here (± 0.001 s)"),
        ({"clock_s": 3.2, "clock_error_s": 2.5}, None, ""),
        ({"limits": {"nofile": 256}}, Level.WARNS, "its limit nofile is 256"),
        ({"limits": {"nproc": 100}}, Level.WARNS, "its limit nproc is 100"),
        ({"shm_bytes": 64 << 20}, Level.WARNS, "/dev/shm has 64 MB"),
        ({"shm_bytes": 0}, Level.WARNS, "there is no /dev/shm"),
        ({"disks": (Disk("--durable-dir", 9 << 30),)}, Level.STOPS, "--durable-dir cannot be written to"),
        ({"disks": (Disk("--durable-dir", error="its disk hangs"),)}, Level.STOPS, "--durable-dir: its disk hangs"),
        ({"disks": (Disk("tmp", 1 << 20, writable=True),)}, Level.WARNS, "temporary files has 0.00098 GB left"),
        ({"disks": (Disk("tmp", missing=True),)}, Level.WARNS, "the folder for temporary files is not there"),
        ({"available_bytes": 1 << 29}, Level.WARNS, "only 0.5 GB of memory are free"),
        ({"available_bytes": 0}, Level.WARNS, "only 0 GB of memory are free"),
        ({"cgroup_bytes": 1 << 30}, Level.WARNS, "its container may use 1 GB of memory"),
        ({"lacks": ("pidfd_open is not allowed",)}, Level.WARNS, "pidfd_open is not allowed"),
        ({"error": "ImportError: no collectives here"}, Level.STOPS, "ImportError: no collectives here"),
        ({"meeting": None}, Level.STOPS, "it has come to no allreduce within 60 s"),
        ({"meeting": Meeting(2, False, 1e-4, 1e-3)}, Level.STOPS, "an allreduce gave a wrong result"),
    ],
)
def test_what_one_host_of_three_has_of_its_own(changed: dict[str, object], level: Level | None, what: str) -> None:
    """The others are as they should be, and are not blamed."""
    three = replace(GOOD, meeting=Meeting(3, True, 1e-4, 1e-3))
    if "meeting" not in changed:
        changed = {**changed, "meeting": three.meeting}
    found = judged(three, replace(three, **changed), three)  # type: ignore[arg-type]
    if level is None:
        assert found == []
        return
    [finding] = [each for each in found if what in each.what]
    assert (finding.level, finding.hosts) == (level, ("node2",))
    assert stops(found) is (level is Level.STOPS)


def test_a_host_that_says_nothing_has_one_line() -> None:
    seen = Seen(unready={"node2": "ssh: connection refused"}, addresses={"node3": "10.0.0.3"})
    found = judged(GOOD, None, None, None, seen=seen)
    assert [(each.level, each.hosts) for each in found] == [
        (Level.STOPS, ("node2",)),
        (Level.STOPS, ("node3",)),
        (Level.STOPS, ("node4",)),
    ]
    assert [each.what for each in found] == [
        "ssh: connection refused",
        "its agent runs, but its worker has not reported within 60 s",
        "no answer within 60 s",
    ]
    assert "ssh node4 true" in found[2].advice


def test_a_host_that_was_away_for_a_while_stops_nothing_once_it_is_back() -> None:
    """As far as it is: else it has what took it away."""
    why = "its agent was not heard for 5 s"
    seen = Seen(interrupted={"node1": why}, members={"node1", "node2"})
    [finding] = judged(GOOD, GOOD, seen=seen)
    assert (finding.level, finding.hosts, finding.what) == (
        Level.WARNS,
        ("node1",),
        f"it was away for a while: {why}",
    )
    seen.members.discard("node1")
    [finding] = judged(GOOD, GOOD, seen=seen)
    assert (finding.level, finding.hosts, finding.what) == (Level.STOPS, ("node1",), why)


def test_a_problem_of_several_hosts_is_told_once_and_what_stops_comes_first() -> None:
    small = replace(GOOD, shm_bytes=64 << 20)
    found = judged(small, small, None)
    assert [(each.level, each.hosts) for each in found] == [
        (Level.STOPS, ("node3",)),
        (Level.WARNS, ("node1", "node2")),
    ]


def test_slow_links_are_warnings() -> None:
    line = "the link between hosts node1 and node2 is slow: 8 Mbit/s, others 900 Mbit/s"
    [finding] = judged(GOOD, GOOD, seen=Seen(slow=[line]))
    assert (finding.level, finding.what) == (Level.WARNS, line)


def test_hosts_that_never_met_all_together_are_told_of() -> None:
    alone = replace(GOOD, meeting=Meeting(1, True, 1e-4, 1e-3))
    [finding] = judged(alone, alone)
    assert (finding.level, finding.what) == (Level.STOPS, "no allreduce had more than 1 of 2 hosts")
