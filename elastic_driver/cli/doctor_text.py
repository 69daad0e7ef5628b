"""The results of a checkup, as text and as data. Neither contains secrets: see doctor/facts.py."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from elastic_driver.cli.tables import table, width_of_output
from elastic_driver.doctor.checkup import Checkup
from elastic_driver.doctor.facts import LARGE_BYTES, UNLIMITED, HostFacts
from elastic_driver.doctor.findings import Finding, Level
from elastic_driver.reporting.printable import all_without_home, one_line, without_home
from elastic_driver.version import __version__
from elastic_driver.words import counted

_WIDTH = 100
_MARKS = {Level.STOPS: "[stops]", Level.WARNS: "[warns]"}
_LIMITS = ("nofile", "nproc", "memlock", "core")
# The most links shown: the slowest ones.
_LINKS = 20
# The most hosts that a problem names; the others are counted.
_SHOWN = 6


def as_data(found: Checkup, findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the results for ``--json``."""
    data = {
        "version": __version__,
        "problems": [
            {
                "level": finding.level.name.lower(),
                "hosts": list(finding.hosts),
                "what": finding.what,
                "advice": finding.advice,
            }
            for finding in findings
        ],
        "hosts": {host: None if host not in found.facts else asdict(found.facts[host]) for host in found.hosts},
        "network": [asdict(link) for link in found.seen.links.values()],
        "ended": found.seen.message,
    }
    return all_without_home(data)


def text_of(found: Checkup, findings: Sequence[Finding]) -> str:
    """Format the problems first, then the facts of each host."""
    width = min(width_of_output() or _WIDTH, _WIDTH)
    return "\n".join([*_heading(found, findings), *_problems(findings, width), *_tables(found, width)])


def _heading(found: Checkup, findings: Sequence[Finding]) -> Iterator[str]:
    stops = sum(finding.level is Level.STOPS for finding in findings)
    count = len(found.hosts)
    hosts = counted(count, "host")
    if not findings:
        yield f"elasticrun doctor {__version__}: {hosts}, no problems found"
    else:
        verdict = f"{stops} would stop a job" if stops else "none would stop a job"
        problems = counted(len(findings), "problem")
        yield f"elasticrun doctor {__version__}: {hosts}, {problems}, {verdict}"


def _problems(findings: Sequence[Finding], width: int) -> Iterator[str]:
    for finding in findings:
        more = f" and {len(finding.hosts) - _SHOWN} more" if len(finding.hosts) > _SHOWN else ""
        where = f"{', '.join(finding.hosts[:_SHOWN])}{more}: " if finding.hosts else ""
        head = f"{_MARKS[finding.level]} {where}{one_line(without_home(finding.what))}"
        yield from textwrap.wrap(head, width, subsequent_indent=" " * 8, break_on_hyphens=False)
        if finding.advice:
            indent = " " * 8
            text = f"-> {one_line(finding.advice)}"
            yield from textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "   ")


def _tables(found: Checkup, width: int) -> Iterator[str]:
    facts = found.facts
    present = [host for host in found.hosts if host in facts]
    if present:
        columns = ("HOST", "PYTHON", "TORCH", "GPUS", "CPUS", "FREE/MEMORY", "TMP FREE", "CLOCK HERE")
        yield ""
        yield table(columns, [(host, *_row(facts[host])) for host in present], width=width)
        more = ("HOST", "KERNEL", "LIBC", "DRIVER", "NOFILE", "NPROC", "MEMLOCK", "CORE", "SHM")
        yield ""
        yield table(more, _alike({host: _more(facts[host]) for host in present}), width=width)
    links = sorted(found.seen.links.values(), key=lambda link: -link.rtt_ms)
    if links:
        rows = [
            (" - ".join(link.hosts), f"{link.rtt_ms:.2f} ms", f"{link.mbit_s:,.0f} Mbit/s") for link in links[:_LINKS]
        ]
        heads = ("NETWORK, SLOWEST FIRST", "ROUND TRIP", "SLOWER WAY")
        yield ""
        yield table(heads, rows, right=heads[1:], width=width)
        if len(links) > _LINKS:
            yield f"and {len(links) - _LINKS} more links (--json lists all)"
    met = [host_facts.meeting for host_facts in facts.values() if host_facts.meeting is not None]
    if met:
        size = max(each.size for each in met)
        last = [each for each in met if each.size == size]
        small_ms = max(each.small_s for each in last) * 1e3
        large_ms = max(each.large_s for each in last) * 1e3
        right = "right" if all(each.correct for each in met) else "WRONG"
        yield ""
        yield (
            f"allreduce over {counted(size, 'host')}: {right}, {small_ms:.2f} ms for 4 bytes, "
            f"{large_ms:.1f} ms for {LARGE_BYTES >> 20} MB"
        )


def _alike(rows: Mapping[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge hosts with equal rows into one row, named after the first."""
    hosts: dict[tuple[str, ...], list[str]] = {}
    for host, row in rows.items():
        hosts.setdefault(row, []).append(host)
    return [(f"{first}{f' and {len(more)} more' if more else ''}", *row) for row, (first, *more) in hosts.items()]


def _row(facts: HostFacts) -> tuple[str, ...]:
    gpus = f"{len(facts.gpus)} x {facts.gpus[0]}" if facts.gpus else "-"
    tmp = next((disk for disk in facts.disks if disk.role == "tmp"), None)
    clock = "?" if facts.clock_s is None else f"{facts.clock_s * 1e3:+.1f}±{facts.clock_error_s * 1e3:.1f} ms"
    memory = facts.memory_bytes if facts.cgroup_bytes == UNLIMITED else facts.cgroup_bytes
    return (
        facts.python,
        facts.torch or "-",
        gpus,
        str(facts.cpus),
        f"{facts.available_bytes / (1 << 30):.0f}/{memory / (1 << 30):.0f} GB",
        "?" if tmp is None or tmp.error or tmp.missing else f"{tmp.free_bytes / (1 << 30):.0f} GB",
        clock,
    )


def _more(facts: HostFacts) -> tuple[str, ...]:
    return (
        facts.kernel,
        facts.libc or "?",
        facts.gpu_driver or "-",
        *(_limit(facts.limits.get(name), in_kilobytes=name in ("memlock", "core")) for name in _LIMITS),
        f"{facts.shm_bytes / (1 << 30):.1f} GB",
    )


def _limit(value: int | None, *, in_kilobytes: bool) -> str:
    if value is None:
        return "?"
    if value == UNLIMITED:
        return "unlimited"
    return f"{value >> 10} kB" if in_kilobytes and value else str(value)
