"""Conditions on which a job waits for slots, or is given up: limits, setbacks, no host left to start on.

Owns the endings that are the same for all kinds of jobs. The others are in the module of each kind
(:mod:`elastic_driver.core.kinds`).
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.core.blacklist import Blacklist
from elastic_driver.core.cuts import Cuts
from elastic_driver.core.explain import explain
from elastic_driver.core.placement import keeps_its_places, usable_slots
from elastic_driver.core.setbacks import START_S, Failure, described
from elastic_driver.core.state import Policy, State, WorkerPhase, WorkerRecord, causes, in_phase, is_on_one_host
from elastic_driver.core.transition import Transition
from elastic_driver.words import ExitCode, counted

# Consecutive failed starts on several hosts: the first may be just a consequence of the loss of a host.
_STARTS = 2


def judge(t: Transition) -> bool:
    """Judge a round once, when it is over. Return whether it was a setback."""
    state = t.state
    if not state.round_id or state.setbacks.present.until is not None:
        return False
    setbacks = state.setbacks
    # A failure on a machine that is being taken away, or of its peers, says nothing about the script.
    if not keeps_its_places(state):
        setbacks = setbacks.excuse()
    if state.reset is not None:
        setbacks = setbacks.over(state.reset.began)
    setbacks = setbacks.judged(t.now, state.policy.pause_range_s)
    t.state = replace(state, setbacks=setbacks)
    return setbacks.count > state.setbacks.count


def end_if_given_up(t: Transition) -> bool:
    """End a job of too many consecutive setbacks, or of too many resets, when its round is over."""
    state = t.state
    if state.setbacks.count >= state.policy.setbacks_limit:
        t.end(ExitCode.USER_CODE_FAILED, what_failed(state))
    elif _fails_at_start(t):
        t.end(ExitCode.USER_CODE_FAILED, f"{what_failed(state)}, {at_start(state.setbacks.last, state.policy)}")
    elif t.in_reset().unplanned and limit_is_used_up(t):
        limit = state.policy.reset_limit
        first, told = state.first_failure, "; ".join(causes(state))
        error = f"{described(first)}; " if first is not None and first.where else ""
        t.end(
            ExitCode.RESET_LIMIT,
            f"{error}the limit of {counted(limit or 0, 'unplanned reset')} ({state.policy.limit_flag}) is "
            f"used up; the last cause: {told}",
        )
    else:
        return False
    return True


def at_start(failure: Failure | None, policy: Policy) -> str:
    """Describe when a job that has trained nothing yet has failed, and the flag that would make it retry, if any."""
    when = f"within the first {START_S:g} s of the training"
    return when if failure is not None and failure.is_lasting else f"{when}; {policy.limit_flag} N would allow retries"


def _fails_at_start(t: Transition) -> bool:
    """Return whether restarted workers on several hosts have failed twice in a row before any training."""
    state = t.state
    if not state.policy.on_change.restarts or not state.policy.ends_at_start:
        return False
    return state.setbacks.count >= _STARTS and state.setbacks.is_start(t.now) and not is_on_one_host(state)


def what_failed(state: State) -> str:
    """Describe the setbacks, in the words for the job's kind of workers."""
    return state.setbacks.told(has_commits=state.policy.on_change.has_commits)


def report_pause(t: Transition, until: float | None) -> None:
    """Report a setback after which the job pauses until ``until``; None if it does not pause."""
    if until is not None:
        then = f"pausing for {until - t.now:g} s; {t.state.policy.setbacks_limit} failures in a row end the job"
        t.report(f"{what_failed(t.state)}; {then}", warning=True)


def end_if_no_host_can_start(t: Transition, ready: tuple[WorkerRecord, ...], *, begun: bool) -> bool:
    """End a job that waits in vain.

    That is a job without a worker to wait, before its start or after, when every host is out for good; and a job with a
    fixed list of hosts, when the remaining hosts can never have enough slots.

    Args:
        t: the step.
        ready: the workers that have started, and are available for a round.
        begun: whether the job has started.
    """
    if _end_if_hosts_never_suffice(t):
        return True
    state, listed = t.state, t.state.listed
    alive = len(ready) + len(in_phase(state, WorkerPhase.BOOTING))
    # Once it has started, living workers may hold its state, and others join them, unless none can.
    if not listed or alive >= (1 if begun and not state.policy.fixed_hosts else state.policy.min_num_proc):
        return False
    if not all(map(state.blacklist.is_out_for_good, listed)):
        return False
    hosts, what = ", ".join(listed), "continue" if begun else "start"
    t.end(
        ExitCode.USER_CODE_FAILED,
        f"{described(state.first_failure)}; cannot {what}: that leaves no host to start workers on (blacklisted: "
        f"{hosts}), {len(ready)} ready of {state.policy.min_num_proc} needed ({state.policy.least_flag})",
    )
    return True


def _end_if_hosts_never_suffice(t: Transition) -> bool:
    state, policy, order = t.state, t.state.policy, t.state.discovery.order
    out = [host for host in order if state.blacklist.is_out_for_good(host.name)] if policy.fixed_hosts else []
    # The number of a host's slots is not known before it has been up.
    if not out or not state.discovery.down.issubset(host.name for host in order):
        return False
    left = tuple(host for host in order if state.is_listed(host.name) and host not in out)
    # A drain can be undone, and a host that is cut off, or has a cooldown, returns.
    whole = replace(state.discovery, hosts=left, down=frozenset())
    at_best = replace(state, discovery=whole, blacklist=Blacklist(), cuts=Cuts(), drained=frozenset())
    slots = usable_slots(at_best)
    if not 0 < slots < policy.min_num_proc:
        return False
    names = ", ".join(host.name for host in out)
    hosts = f"host {names} is" if len(out) == 1 else f"hosts {names} are"
    t.end(
        ExitCode.USER_CODE_FAILED,
        f"{described(state.first_failure)}; cannot continue: {hosts} blacklisted permanently, and the list of hosts "
        f"is fixed, which leaves {slots} of {policy.min_num_proc} slots ({policy.least_flag}). To continue with "
        f"those, set {policy.least_flag} {slots}; to retry failed hosts, set --blacklist-cooldown-range LOW HIGH",
    )
    return True


def wait_for_slots(t: Transition) -> None:
    reset = t.in_reset()
    waiting = reset.waiting_for_slots(t.now + t.state.policy.elastic_timeout_s)
    if waiting is not reset:
        t.state = replace(t.state, reset=waiting)
        t.report(explain(t.state, t.now))


def is_put_off(t: Transition, until: float | None) -> bool:
    """Return whether a possible round waits until ``until`` (None: for nothing), and the job can still wait."""
    late = t.state.slots_deadline is not None and t.now >= t.state.slots_deadline
    return until is not None and t.now < until and not late


def end_half_finished(t: Transition) -> None:
    """End a job in which some workers have failed, and others ended well."""
    t.end(ExitCode.USER_CODE_FAILED, f"{described(t.state.first_failure)}, after other workers had already finished")


def check_deadlines(t: Transition) -> None:
    state = t.state
    if state.ended:
        return
    limit = f"{state.policy.elastic_timeout_s:g} s (--elastic-timeout)"
    if state.slots_deadline is not None and t.now >= state.slots_deadline:
        why = explain(state, t.now, gives_up=True)
        first = f"; first failure: {described(state.first_failure)}" if state.first_failure else ""
        t.end(ExitCode.TOO_FEW_SLOTS, f"{why}; gave up after {limit}{first}")


def limit_is_used_up(t: Transition) -> bool:
    """Return whether the limit of unplanned resets is reached."""
    policy = t.state.policy
    limit, window_s = policy.reset_limit, policy.reset_window_s
    return limit is not None and t.state.tally.that_count(t.now, window_s) >= limit
