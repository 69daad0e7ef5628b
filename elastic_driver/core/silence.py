"""Silent hosts: whether the job continues without them, before it is known that they are lost.

Owns that decision; :mod:`elastic_driver.launch.fleet.link` detects the silence. Workers of a silent host may live, and
hear each other. A round may be formed without them as soon as a member on another host leaves the current one: a
collective needs all members, so none completes on the silent hosts any more, and a commit is written to disk only with
the driver's permission. If all members are on silent hosts they may train on: the job waits for them until they are
heard or their agents' leases have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from elastic_driver.core.events import GiveUpHost
from elastic_driver.core.placement import target_places, that_fit
from elastic_driver.core.state import State, WorkerPhase, WorkerRecord, concerning, parameter_servers
from elastic_driver.core.transition import Transition
from elastic_driver.hosts import WorkerId
from elastic_driver.words import counted


def give_up_silent(t: Transition) -> None:
    """Give up the surely silent hosts if the job can continue without all silent ones; otherwise report why not."""
    if not t.state.silent:
        return
    living = {record.worker.hostname for record in t.state.workers}
    silent = concerning(t.state)
    # Neither hosts in doubt nor hosts whose end will soon be reported are reliable.
    why = why_needed(t.state, [silence.hostname for silence in silent])
    why_told = why_needed(t.state, [silence.hostname for silence in silent if silence.sure]) if why else ""
    after = []
    for silence in t.state.silent:
        silent_s = t.now - silence.since
        is_concerned = silence in silent
        if silence.kept_until is not None and t.now >= silence.kept_until:
            silence = replace(silence, kept_until=None)
        if silence.given_up or not silence.sure or not is_concerned:
            pass  # an unlisted host without workers may return to the list, still silent
        elif silence.kept_until is None and (not why or silence.hostname not in living):
            t.commands.append(GiveUpHost(silence.hostname, f"it did not respond for {silent_s:.1f} s"))
            silence = replace(silence, given_up=True)
        elif why_told and not silence.told:
            text = f"host {silence.hostname} has not responded for {silent_s:.1f} s; the job waits for it: {why_told}"
            t.report(text, warning=True)
            silence = replace(silence, told=True)
        after.append(silence)
    t.state = replace(t.state, silent=tuple(after))


def why_needed(state: State, hostnames: Collection[str]) -> str:
    """Return why the job cannot continue without these hosts, whose workers may live, in words; "" if it can."""
    names = frozenset(hostnames)
    there = [record.worker for record in state.workers if record.worker.hostname in names]
    elsewhere = [record for record in state.workers if record.worker.hostname not in names]
    policy, kind = state.policy, state.policy.on_change
    if not there:
        return ""
    if _train_alone(state, there, elsewhere):
        return "no other worker " + (f"of round {state.round_id} is alive" if state.members else "is alive")
    unlisted = replace(state.discovery, hosts=tuple(host for host in state.hosts if host.name not in names))
    rest = replace(state, discovery=unlisted)
    # Restarted workers would be other processes than these.
    living = [record for record in elsewhere if _is_there(state, record)]
    used = [record for record in parameter_servers(state).values() if record.worker in there]
    if used and state.chief is not None:
        return f"{used[0].server_name} has variables that no other process has"
    left = len(that_fit(rest, living) if kind.asks_for_rounds else target_places(rest))
    if left < policy.min_num_proc:
        which = "it" if len(names) == 1 else f"hosts {', '.join(dict.fromkeys(worker.hostname for worker in there))}"
        number = len(living) if kind.asks_for_rounds and policy.multiple > 1 else left
        some = f"{'is' if number == 1 else 'are'} {counted(number, 'worker')}"
        some += f", of which {left} can form a round" if number > left else ""
        return f"without {which} there {some}, and {policy.least_flag} is {policy.min_num_proc}"
    if kind.has_commits and state.round is not None and not policy.durable and not any(map(_holds_state, elsewhere)):
        return "no other worker has the training's state"
    return ""


def _train_alone(state: State, there: Sequence[WorkerId], elsewhere: Sequence[WorkerRecord]) -> bool:
    """Return whether workers on the silent hosts may train on, since no worker elsewhere leaves their round.

    A worker that was told to leave may not have received that.
    """
    if state.round is None:
        return False
    members = dict.fromkeys(state.members)
    if not members:
        return not elsewhere  # each trains by itself
    return any(worker in members for worker in there) and not any(record.worker in members for record in elsewhere)


def _is_there(state: State, record: WorkerRecord) -> bool:
    may_boot = state.round is None and record.phase is WorkerPhase.BOOTING
    return may_boot or record.phase in (WorkerPhase.READY, WorkerPhase.MEMBER)


def _holds_state(record: WorkerRecord) -> bool:
    return record.has_state and record.phase is not WorkerPhase.LEAVING
