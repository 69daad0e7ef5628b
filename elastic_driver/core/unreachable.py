"""Workers that the driver reaches, but that do not reach each other: whether the job continues without some of them.

Owns that decision, made once for each round after all of its members have reported: which hosts are left out for a
while, or that none can be, and the job retries after a pause. :mod:`elastic_driver.core.cuts` chooses the hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from elastic_driver.core.cuts import Accusation, Cuts, hosts_that_go
from elastic_driver.core.explain import names
from elastic_driver.core.placement import reachable, target_places
from elastic_driver.core.registry import WorkerState
from elastic_driver.core.roster import Roster
from elastic_driver.core.staffing import fill_places, stop_misplaced
from elastic_driver.core.state import State, WorkerPhase, in_phase, protected_hosts
from elastic_driver.core.transition import Transition
from elastic_driver.words import ExitCode

# Hosts whose cut is reported one by one: half of a large job may go at once.
_MOST_TOLD = 6


def leave_out_unreachable(t: Transition) -> None:
    """Judge the accusations, once for each round; the registry is closed."""
    reset = t.state.reset
    if reset is None or not len(reset.accusers) or t.state.registry.workers_in(WorkerState.SUCCESS):
        return
    there = dict.fromkeys(record.worker.hostname for record in reachable(t.state))
    # Accusations by or against workers that are dead, or silent, do not count here: those are judged as such.
    pairs = [
        Accusation(accuser.worker, accused)
        for accuser in reset.accusers
        if accuser.worker.hostname in there
        for accused in accuser.accused
        if accused.first.hostname in there
    ]
    t.state = replace(t.state, reset=replace(reset, accusers=Roster()))
    if not pairs:
        return
    present = t.state.setbacks.present
    if present.moved:
        t.state = replace(t.state, cuts=t.state.cuts.forget_pauses())
    if present.failure is None and not present.raised:
        t.state = replace(t.state, setbacks=t.state.setbacks.excuse())
    choices = _choices(t.state, pairs)
    for going in choices:
        cuts = t.state.cuts.leave_out(going, t.now)
        if _can_do_without(t.state, going, cuts):
            _leave_out(t, going, pairs, cuts)
            return
    _try_again(t, choices[0], pairs)


def _choices(state: State, pairs: Sequence[Accusation]) -> tuple[tuple[str, ...], ...]:
    """Return the choices of hosts to leave out: those most cut off; or, if needed, all others that they accuse."""
    order = [host.name for host in state.discovery.order]
    stateful = frozenset(record.worker.hostname for record in reachable(state) if record.has_state)
    going, kept = (
        hosts_that_go(pairs, order, stateful=stateful, protected=protected_hosts(state), kept=kept)
        for kept in (False, True)
    )
    return going, kept


def _can_do_without(state: State, going: Sequence[str], cuts: Cuts) -> bool:
    gone = frozenset(going)
    stays = [record for record in reachable(state) if record.worker.hostname not in gone]
    if not state.policy.durable and not any(record.has_state for record in stays):
        return False
    return len(target_places(replace(state, cuts=cuts))) >= state.policy.min_num_proc


def _leave_out(t: Transition, going: Sequence[str], pairs: Sequence[Accusation], cuts: Cuts) -> None:
    left_out, gone = {cut_host.hostname: cut_host for cut_host in cuts.hosts}, frozenset(going)
    for name in going[:_MOST_TOLD]:
        said = _described(name, pairs)
        t.report(f"host {name} is left out for {left_out[name].pause_s:g} s: {said}", warning=True)
        pairs = [pair for pair in pairs if name not in (pair.accuser.hostname, pair.accused.first.hostname)]
    if len(going) > _MOST_TOLD:
        some = f"{len(going) - _MOST_TOLD} more host{'' if len(going) == _MOST_TOLD + 1 else 's'}"
        t.report(f"{some} also left out: {', '.join(going[_MOST_TOLD:])}", warning=True)
    t.state = replace(t.state, cuts=cuts)
    for record in in_phase(t.state, WorkerPhase.READY):
        if record.worker.hostname in gone:
            t.dismiss(record, f"host {record.worker.hostname} is left out")
    stop_misplaced(t)
    fill_places(t)  # places of other hosts may be usable now


def _try_again(t: Transition, going: Sequence[str], pairs: Sequence[Accusation]) -> None:
    policy, cuts = t.state.policy, t.state.cuts
    said = _described(going[0], pairs)
    without = f"host {going[0]}" if len(going) == 1 else f"{len(going)} hosts"
    least = f"{policy.least_flag} {policy.min_num_proc}"
    few = f"{said}; without {without} the job has too few workers ({least}), or no copy of the training's state"
    if cuts.since is not None and t.now >= cuts.since + policy.elastic_timeout_s:
        t.end(ExitCode.TOO_FEW_SLOTS, f"{few}; gave up after {policy.elastic_timeout_s:g} s (--elastic-timeout)")
        return
    cuts = cuts.pause(t.now, policy.pause_range_s)
    t.state = replace(t.state, cuts=cuts)
    assert cuts.until is not None
    t.report(f"{few}; retrying with all of them in {cuts.until - t.now:g} s", warning=True)


def _described(hostname: str, pairs: Sequence[Accusation]) -> str:
    """Describe who cannot reach whom, both ends: the accusers of this host, or else the workers that it accuses."""
    against = [pair for pair in pairs if pair.accused.first.hostname == hostname]
    pairs = against or [pair for pair in pairs if pair.accuser.hostname == hostname]
    accusers = tuple(dict.fromkeys(pair.accuser for pair in pairs))
    accused = tuple(dict.fromkeys(pair.accused.first for pair in pairs))
    return f"{names(accusers)} cannot reach {names(accused)}"
