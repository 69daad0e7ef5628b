"""Judges a checkup: which facts would stop a job, which would slow it, and how to fix each.

Owns the judgment and its thresholds. Pure: facts and events in, findings out, those that stop a job first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elastic_driver.doctor.facts import UNLIMITED, HostFacts
from elastic_driver.doctor.seen import Seen

# Logs of several machines cannot be compared if their clocks differ by more.
_CLOCK_S = 1.0
# PyTorch's data loaders pass batches through /dev/shm. Docker gives a container 64 MiB.
_LEAST_SHM = 512 << 20
# A worker needs a descriptor for each peer, and for each file that its data loaders have open.
_LEAST_FILES = 1024
# Threads count as processes, and a PyTorch worker has dozens.
_LEAST_PROCESSES = 1024
_LEAST_DISK, _LEAST_MEMORY = 1 << 30, 1 << 30
_SLOW = "if it is only slow, give it more time with --timeout S"


class Level(IntEnum):
    """The severity of a finding."""

    STOPS = 0
    """A job would not start, or not with this host."""
    WARNS = 1


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem.

    Attributes:
        level: its severity.
        hosts: the hosts concerned; empty for the whole job.
        what: the fact, in a sentence.
        advice: what to do; "" if the fact implies it.
    """

    level: Level
    hosts: tuple[str, ...]
    what: str
    advice: str = ""


def findings_of(hosts: Sequence[str], facts: Mapping[str, HostFacts], seen: Seen, *, limit_s: float) -> list[Finding]:
    """Return all problems, the worst first; those of several hosts that are the same are merged.

    Args:
        hosts: the hosts to check.
        facts: the reports of the workers that could be reached, by host.
        seen: the state according to the job's events.
        limit_s: how long hosts were waited for, seconds.
    """
    found = [
        *_absent(hosts, facts, seen, limit_s),
        *_together(hosts, facts, seen),
        *_different(facts),
        *(finding for host in hosts if host in facts for finding in _of_host(host, facts[host])),
        *(Finding(Level.WARNS, (), line, "check that network, or exclude the host") for line in seen.slow),
    ]
    return sorted(_merged(found), key=lambda finding: finding.level)


def stops(findings: Sequence[Finding]) -> bool:
    """Return whether any finding would stop a job."""
    return any(finding.level is Level.STOPS for finding in findings)


def _merged(findings: Sequence[Finding]) -> list[Finding]:
    merged: dict[tuple[Level, str, str], tuple[str, ...]] = {}
    for finding in findings:
        key = finding.level, finding.what, finding.advice
        merged[key] = (*merged.get(key, ()), *finding.hosts)
    return [Finding(level, hosts, what, advice) for (level, what, advice), hosts in merged.items()]


def _absent(hosts: Sequence[str], facts: Mapping[str, HostFacts], seen: Seen, limit_s: float) -> Iterator[Finding]:
    """Yield findings for hosts that took no part, or not until the end."""
    for host in hosts:
        said = facts.get(host)
        why, advice = (said.error if said is not None else "") or seen.why_not(host), ""
        before = seen.interrupted.get(host, "")
        if before and not why and host in seen.members:
            what = f"it was away for a while: {before}"
            yield Finding(Level.WARNS, (host,), what, "check whether that host swaps or its network is unstable")
        elif not why:
            why = before
        if not why and said is None and host in seen.addresses:
            why, advice = f"its agent runs, but its worker has not reported within {limit_s:g} s", _SLOW
        elif not why and said is None:
            why, advice = f"no answer within {limit_s:g} s", f"try: ssh {host} true; {_SLOW}"
        elif not why and said is not None and said.meeting is None:
            why, advice = f"it has come to no allreduce within {limit_s:g} s", _SLOW
        if why:
            yield Finding(Level.STOPS, (host,), why, advice)


def _together(hosts: Sequence[str], facts: Mapping[str, HostFacts], seen: Seen) -> Iterator[Finding]:
    """Yield findings from the results of the allreduces."""
    met = {host: host_facts.meeting for host, host_facts in facts.items() if host_facts.meeting is not None}
    wrong = tuple(host for host, meeting in met.items() if not meeting.correct)
    if wrong:
        advice = "look for a broken network card or memory, and report it with this output"
        yield Finding(Level.STOPS, wrong, "an allreduce gave a wrong result", advice)
    sizes = {meeting.size for meeting in met.values()}
    if met and len(met) == len(hosts) > 1 and max(sizes) < len(hosts):
        yield Finding(Level.STOPS, (), f"no allreduce had more than {max(sizes)} of {len(hosts)} hosts")


def _different(facts: Mapping[str, HostFacts]) -> Iterator[Finding]:
    """Yield findings for facts that should be the same on all hosts."""
    python = "use one Python on all hosts: data pickled on one may be unreadable on another"
    yield from _odd(facts, "Python", lambda each: ".".join(each.python.split(".")[:2]), python)
    torch = "install one version of PyTorch on all hosts"
    yield from _odd(facts, "PyTorch", lambda each: each.torch or "missing", torch)
    yield from _odd(facts, "package elastic_driver", lambda each: each.package, "install one version on all hosts")
    yield from _odd(
        facts, "number of GPUs", lambda each: str(len(each.gpus)), "use -H HOST:N with the number that each has"
    )
    with_gpu = {host: host_facts for host, host_facts in facts.items() if host_facts.gpus}
    yield from _odd(with_gpu, "GPU driver", lambda each: each.gpu_driver, "NCCL works best with one version")
    yield from _odd(facts, "machine", lambda each: each.machine, "results may differ between them")


def _odd(
    facts: Mapping[str, HostFacts], name: str, value: Callable[[HostFacts], str], advice: str
) -> Iterator[Finding]:
    values = {host: value(host_facts) for host, host_facts in facts.items()}
    if len(set(values.values())) < 2:
        return
    usual = Counter(values.values()).most_common(1)[0][0]
    for host, each in values.items():
        if each != usual:
            yield Finding(Level.WARNS, (host,), f"{name}: {each}, on the other hosts {usual}", advice)


def _of_host(host: str, facts: HostFacts) -> Iterator[Finding]:
    """Yield findings for a single machine."""

    def warns(what: str, advice: str) -> Finding:
        return Finding(Level.WARNS, (host,), what, advice)

    if facts.torch_error:
        what = f"PyTorch {facts.torch} is installed and cannot be imported: {facts.torch_error}"
        yield Finding(Level.STOPS, (host,), what, "reinstall PyTorch there")
    if facts.native_error:
        yield warns(facts.native_error, "install a wheel: without it, PyTorch's Gloo is used, which is slower")
    if facts.gpu_error:
        yield warns(f"its GPUs cannot be seen: {facts.gpu_error}", "repair the driver, or exclude the GPUs")
    if facts.gpus and facts.torch and not facts.torch_error and not facts.cuda:
        yield warns("it has GPUs, but its PyTorch has no CUDA", "install PyTorch with CUDA to use them")
    ahead_s, error_s = facts.clock_s, facts.clock_error_s
    if ahead_s is not None and abs(ahead_s) - error_s > _CLOCK_S:
        way = "ahead of" if ahead_s > 0 else "behind"
        what = f"its clock is {abs(ahead_s):.3g} s {way} the one here (± {error_s:.1g} s)"
        yield warns(what, "set the clocks by NTP: logs of several machines cannot be compared")
    yield from _limits(host, facts)
    for disk in facts.disks:
        name = f"the folder of {disk.role}" if disk.role.startswith("-") else "the folder for temporary files"
        if disk.missing:
            yield warns(f"{name} is not there", "create it, or set TMPDIR: Python silently uses another one")
        elif disk.error:
            yield Finding(Level.STOPS, (host,), f"{name}: {disk.error}", "mount it, or name another folder")
        elif not disk.writable:
            yield Finding(Level.STOPS, (host,), f"{name} cannot be written to", "chmod it, or name another folder")
        elif disk.free_bytes < _LEAST_DISK:
            yield warns(f"{name} has {_gigabytes(disk.free_bytes)} left", "free space there, or name another folder")
    if facts.memory_bytes and facts.available_bytes < _LEAST_MEMORY:
        yield warns(f"only {_gigabytes(facts.available_bytes)} of memory are free", "check what else runs there")
    if 0 <= facts.cgroup_bytes < 2 * _LEAST_MEMORY:
        yield warns(f"its container may use {_gigabytes(facts.cgroup_bytes)} of memory", "raise the container's limit")
    for lack in facts.lacks:
        yield warns(lack, "allow it in the container's seccomp profile or the kernel's settings")
    if facts.lacks_error:
        advice = "raise the limit of open files (ulimit -n, limits.conf, or the container's --ulimit)"
        yield warns(f"cannot check which features the kernel permits: {facts.lacks_error}", advice)


def _limits(host: str, facts: HostFacts) -> Iterator[Finding]:
    for name, least, flag in (("nofile", _LEAST_FILES, "-n"), ("nproc", _LEAST_PROCESSES, "-u")):
        limit = facts.limits.get(name, UNLIMITED)
        if UNLIMITED < limit < least:
            advice = f"raise it to {least} or more (ulimit {flag}, limits.conf, or the container's --ulimit)"
            yield Finding(Level.WARNS, (host,), f"its limit {name} is {limit}", advice)
    if facts.shm_bytes < _LEAST_SHM:
        what = f"/dev/shm has {facts.shm_bytes >> 20} MB" if facts.shm_bytes else "there is no /dev/shm"
        advice = "give the container more (docker run --shm-size 8g): data loaders with workers die of a bus error"
        yield Finding(Level.WARNS, (host,), what, advice)


def _gigabytes(number: int) -> str:
    size = number / (1 << 30)
    return f"{size:.0f} GB" if size >= 10 else f"{size:.2g} GB"
