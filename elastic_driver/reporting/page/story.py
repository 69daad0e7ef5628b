"""The job's story for the page: what happened, and when, as entries that can be sent and drawn.

Owns the conversion of happenings to entries, and their number: thousands of events of a kind at once are one entry, and
the oldest entries of a long job are only counted. Times are seconds since the epoch, since users read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from elastic_driver.health.findings import (
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.hosts import Host
from elastic_driver.reporting import printable, wording
from elastic_driver.reporting.happenings import (
    ChiefEnded,
    ChiefStarted,
    FirstFailure,
    Happening,
    HostLost,
    HostReady,
    HostsChanged,
    HostUnready,
    InternalError,
    JobEnded,
    JobStarted,
    NoticeGiven,
    ProcessEnded,
    ProcessStarted,
    Remark,
    RoundFormed,
    RoundResumed,
    TookOver,
    WorkerHung,
    WorkersDrained,
    WorkersStopped,
)

Entry = dict[str, Any]

MOST = 1500
"""The most entries kept. The oldest ones beyond that are replaced by one with their number."""
_DROPPED_AT_ONCE = 300
# Events of one kind within this many seconds share an entry, whose text names some of them. Those that are drawn are
# all in it.
_TOGETHER_S, _NAMED, _DRAWN = 1.0, 4, 2000
_LONGEST_TEXT = 400
_LONGEST_LINE = 2000
# Kinds of entries whose number, or duration, the timeline shows.
_LOSSES, _STANDSTILLS = ("worker_died", "worker_hung", "host_lost"), ("resumed", "stalled")
# A shorter loss is not reported.
_LOST_S = 0.05


class Story:
    """Collects the entries of a job.

    Args:
        clock: returns seconds since the epoch.

    Attributes:
        began: when the driver began.
        hosts: the last hosts that discovery listed, with the time; None before its first answer.
        ended: how the job has ended; None before.
        slow: keys of the workers that are slower than the others.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.began = clock()
        self.hosts: tuple[float, tuple[Host, ...]] | None = None
        self.ended: dict[str, Any] | None = None
        self.slow: set[str] = set()
        self._entries: dict[int, Entry] = {}
        self._last = 0
        self._told = 0
        self._changed: set[int] = set()

    def hear(self, happening: Happening) -> None:
        """Turn a happening into entries."""
        match happening:
            case JobStarted(_, job_id, again=False):
                self._add("start", f"job {job_id} started")
            case HostsChanged(hosts):
                self._hosts_changed(tuple(hosts))
            case HostReady(host, _, joined):
                self._add("host_ready", f"host {host} is ready" + (" (joined on its own)" if joined else ""), host=host)
            case HostUnready(host, reason, _):
                self._add("host_unready", f"host {host} is not ready: {reason}", host=host, warning=True)
            case HostLost(host, reason):
                self._add("host_lost", f"host {host} is lost: {reason}", host=host, warning=True)
            case ProcessStarted(worker, again=False):
                self._together("worker_started", str(worker), "started")
            case ProcessEnded(worker, how=how, expected=expected, returncode=code):
                self.slow.discard(worker.key)
                if expected or not code:
                    self._together("worker_ended", str(worker), "ended")
                elif how.startswith("lost with"):  # the host's loss is reported, with its cause
                    self._together("worker_ended", str(worker), how)
                else:
                    text = f"worker {worker} {how}"
                    self._add("worker_died", text, host=worker.hostname, worker=worker.key, warning=True)
            case WorkersStopped(stops):
                for worker, reason in stops:
                    self._together("worker_stopped", str(worker), f"stopped: {reason}")
            case WorkerHung(worker, reason):
                text = f"worker {worker} hangs and is killed: {reason}"
                self._add("worker_hung", text, host=worker.hostname, warning=True)
            case WorkerSuspected(worker=worker):
                self._add("suspected", wording.of_suspicion(happening), host=worker.hostname, warning=True)
            case WorkerCleared(worker=worker):
                self._add("cleared", wording.of_cleared(happening), host=worker.hostname)
            case StragglerFound(worker=worker):
                self.slow.add(worker.key)
                self._add("straggler", wording.of_straggler(happening), host=worker.hostname, warning=True)
            case StragglerGone(worker=worker):
                self.slow.discard(worker.key)
                self._add("straggler_gone", wording.of_straggler_gone(happening), host=worker.hostname)
            case WorkersDrained(workers, undone):
                for worker in workers:
                    self._together("worker_drained", str(worker), "no longer drained" if undone else "drained")
            case NoticeGiven(round_id, kind, reason):
                self._add("notice", f"round {round_id} {kind.told}" + (f": {reason}" if reason else ""))
            case RoundFormed():
                self._round_formed(happening)
            case RoundResumed(round_id, commits, took_s):
                self._resumed(round_id, commits, took_s)
            case ChiefStarted(number):
                self._add("chief", f"the chief started (start {number})")
            case ChiefEnded(how=how, expected=expected):
                self._add("chief", f"the chief {how}", warning=not expected)
            case Remark(text, warning):
                self._add("remark", text, warning=warning)
            case FirstFailure(worker, how=how, last_lines=lines):
                text = f"worker {worker} failed first: {how}"
                # The driver ends soon, and browsers keep what they have.
                output = [printable.one_line(line)[:_LONGEST_LINE] for line in lines]
                self._add("failure", text, host=worker.hostname, worker=worker.key, output=output, warning=True)
            case TookOver(away_s=away_s):
                text = f"{wording.of_takeover(happening)}; earlier events are not shown on this page"
                self._add("took_over", text, t0=round(self._now() - away_s, 2))
            case Stalled(stood_s, waits_for):
                self._add("stall_found", wording.of_stall(stood_s, waits_for), warning=True)
            case StallEnded(stood_s, waits_for, resumed):
                text = wording.of_stall(stood_s, waits_for) + ("; it continues" if resumed else "")
                self._add("stalled", text, t0=round(self._now() - stood_s, 2))
            case InternalError(error):
                self._add("internal_error", error.rpartition("\n")[2], warning=True)
            case JobEnded(exit_code, message):
                self.ended = {"t": self._now(), "exit_code": exit_code, "message": message}
                self._add("end", f"the job ended with exit code {exit_code}: {message}", warning=bool(exit_code))
            case _:
                pass

    def all(self) -> list[Entry]:
        """Return all entries, the oldest first."""
        return list(self._entries.values())

    def news(self) -> tuple[list[Entry], int]:
        """Return the entries that are new, or changed, since the last call; and the number of the oldest one kept."""
        changed = [self._entries[number] for number in sorted(self._changed) if number in self._entries]
        self._changed.clear()
        return changed, next(iter(self._entries), 0)

    # --- entries ---------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return round(self._clock(), 2)

    def _add(self, kind: str, text: str, **more: Any) -> Entry:
        if not more.get("warning", True):
            del more["warning"]
        self._last += 1
        entry = {"n": self._last, "t": self._now(), "kind": kind, "text": text[:_LONGEST_TEXT], **more}
        self._entries[self._last] = entry
        self._changed.add(self._last)
        if len(self._entries) > MOST:
            self._drop()
        return entry

    def _together(self, kind: str, name: str, what: str) -> None:
        """Collect many events of a kind in one entry."""
        last, noun = self._entries.get(self._last), kind.partition("_")[0]
        if last is None or last["kind"] != kind or last["what"] != what or self._now() - last["t"] > _TOGETHER_S:
            self._add(kind, f"{noun} {name} {what}", what=what, count=1, names=[name])
            return
        last["count"] += 1
        if len(last["names"]) < (_NAMED if noun == "worker" else _DRAWN):
            last["names"].append(name)
        named = last["names"][:_NAMED]
        more = last["count"] - len(named)
        last["text"] = f"{noun}s {', '.join(named)}{f' and {more} more' if more else ''}: {what}"[:_LONGEST_TEXT]
        self._changed.add(self._last)

    def _drop(self) -> None:
        """Replace the oldest entries by their number. A driver of weeks has thousands."""
        numbers = list(self._entries)[:_DROPPED_AT_ONCE]
        dropped = [self._entries.pop(number) for number in numbers]
        count = sum(entry.get("dropped", 1) for entry in dropped)
        rounds = sum(entry.get("rounds", entry["kind"] == "round") for entry in dropped)
        text = f"{count} earlier events, including {rounds} rounds"
        first = dropped[0]
        number = numbers[-1]
        entry = {"n": number, "t": dropped[-1]["t"], "t0": first.get("t0", first["t"]), "kind": "dropped"}
        # The timeline still counts them.
        losses = sum(entry.get("losses", entry["kind"] in _LOSSES) for entry in dropped)
        stood_s = sum(entry.get("stood_s", _stood_s(entry)) for entry in dropped)
        more = {"dropped": count, "rounds": rounds, "losses": losses, "stood_s": round(stood_s, 2)}
        self._entries = {number: {**entry, "text": text, **more}, **self._entries}
        # There may have been no browser for weeks.
        self._changed.difference_update(numbers)
        self._changed.add(number)

    def _hosts_changed(self, hosts: tuple[Host, ...]) -> None:
        before = {} if self.hosts is None else {host.name: host.slots for host in self.hosts[1]}
        after = {host.name: host.slots for host in hosts}
        self.hosts = self._now(), hosts
        for name in _first(after.keys() - before.keys(), after):
            self._together("host_came", name, "listed")
        for name in _first(before.keys() - after.keys(), before):
            self._together("host_left", name, "no longer listed")
        for name in [name for name in after if name in before and after[name] != before[name]]:
            self._add("host_changed", f"host {name} now has {after[name]} slots", host=name)

    def _round_formed(self, formed: RoundFormed) -> None:
        if formed.lost_s is not None and formed.lost_s >= _LOST_S:
            since = self._clock() - formed.formed_in_s - (formed.since_commit_s or formed.lost_s)
            text = f"{formed.lost_s:.1f} s of training are recomputed"
            self._add("lost", text, t0=round(since, 2), t1=round(since + formed.lost_s, 2))
        size = len(formed.members)
        was = f"{formed.old_size} -> {size}" if formed.old_size else f"{size}"
        text = f"round {formed.round_id}: {was} workers" + (f", {formed.cause}" if formed.cause else "")
        hosts: dict[str, int] = {}
        for member in formed.members:
            hosts[member.worker.hostname] = hosts.get(member.worker.hostname, 0) + 1
        entry = self._add("round", text, round=formed.round_id, size=size, old=formed.old_size, hosts=hosts)
        if formed.backend is None:
            entry["t0"] = round(entry["t"] - formed.formed_in_s, 2)

    def _resumed(self, round_id: int, commits: int | None, took_s: float) -> None:
        where = "" if commits is None else f" from commit {commits}"
        now = self._now()
        text = f"round {round_id} started training{where} after {took_s:.2f} s"
        self._add("resumed", text, round=round_id, t0=round(now - took_s, 2), took_s=round(took_s, 3))


def _stood_s(entry: Entry) -> float:
    return float(entry["t"] - entry["t0"]) if entry["kind"] in _STANDSTILLS else 0.0


def _first(names: set[str], order: dict[str, int]) -> Iterator[str]:
    return (name for name in order if name in names)
