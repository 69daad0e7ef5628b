"""The membership core: the only code that changes who is in the job.

``step(state, event, now) -> (state, commands)`` is a pure function. An event changes what is known; then ``settle``
looks at the levels (hosts, living workers, reports) and decides. So feeding an event twice is harmless, and changes
that cancel out before anything was done about them do nothing.

How a round ends. Every member of round r has one record in the registry of r: READY (it asks for the next round),
SUCCESS or FAILURE (its process ended). The first READY or FAILURE opens the reset. When all members have a record, or
the deadline has passed and the silent are voted out, the next round is formed from those who are READY and placed.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_driver.assignment import assign_ranks, order_hosts
from elastic_driver.events import (
    Command,
    DiscoveryFailed,
    DismissWorker,
    EndJob,
    Event,
    ExitCode,
    HostsDiscovered,
    PublishRound,
    Report,
    ReportResumed,
    SetNotice,
    StartWorker,
    StopRequested,
    StopWorker,
    TimerExpired,
    WorkerExited,
    WorkerNotStarted,
    WorkerReady,
    WorkerRunning,
)
from elastic_driver.explain import explain, names
from elastic_driver.hosts import Host, WorkerId
from elastic_driver.job_state import (
    DISMISSED_GRACE_S,
    Failure,
    JobPhase,
    Policy,
    State,
    WorkerPhase,
    WorkerRecord,
    check_invariants,
    finishing,
    in_phase,
    in_target,
    joiners_wait_until,
    new_state,
    next_deadline,
    record_of,
    target_places,
    usable_slots,
)
from elastic_driver.registry import WorkerState, WorkerStateRegistry
from elastic_driver.rendezvous.messages import Backend, NoticeKind, ReadyCause

__all__ = ["Policy", "State", "check_invariants", "explain", "new_state", "next_deadline", "step"]

# The order in which the driver prefers collective backends.
_BACKENDS = (Backend.NATIVE, Backend.TORCH)


def step(state: State, event: Event, now: float) -> tuple[State, list[Command]]:
    """What the job becomes, and what is to be done, when this happens at this time.

    Args:
        state: the job so far; not changed.
        event: what happened.
        now: the present, seconds of a clock that never goes back.

    Returns:
        The new state, and the commands in the order in which they are to be carried out.
    """
    if state.phase is JobPhase.ENDED:
        return _after_the_end(state, event), []
    transition = _Transition(state, now)
    transition.take(event)
    transition.settle()
    return transition.state, transition.commands


def _after_the_end(state: State, event: Event) -> State:
    if isinstance(event, WorkerExited | WorkerNotStarted):
        return replace(state, workers=tuple(r for r in state.workers if r.worker != event.worker))
    return state


class _Transition:
    """One step under way: the state so far and the commands so far."""

    def __init__(self, state: State, now: float) -> None:
        self.state = replace(state, blacklist=state.blacklist.expire(now))
        self.now = now
        self.commands: list[Command] = []

    # --- taking in what happened ----------------------------------------------------------------------------------

    def take(self, event: Event) -> None:
        match event:
            case HostsDiscovered():
                self._take_hosts(event.hosts)
            case DiscoveryFailed():
                self._take_discovery_failure(event)
            case WorkerReady():
                self._take_ready(event)
            case WorkerRunning():
                self._take_running(event)
            case WorkerExited():
                self._take_exit(event)
            case WorkerNotStarted():
                self._take_not_started(event)
            case StopRequested():
                self._end(128 + event.signal, f"interrupted by {event.name}")
            case TimerExpired():
                pass

    def _take_hosts(self, hosts: tuple[Host, ...]) -> None:
        ordered = order_hosts(self.state.host_order, hosts)
        listed = [host.name for host in ordered]
        living = [record.worker.hostname for record in self.state.workers]
        # A host with living workers keeps its place in the order although it is no longer listed.
        kept = [name for name in self.state.host_order if name in listed or name in living]
        self.state = replace(
            self.state,
            hosts=ordered,
            host_order=(*kept, *(name for name in listed if name not in kept)),
            blacklist=self.state.blacklist.forgive_absent(listed),
            discovered=True,
            discovery_failing_since=None,
        )

    def _take_discovery_failure(self, event: DiscoveryFailed) -> None:
        if not self.state.discovered:
            self._end(ExitCode.BAD_USAGE, event.message)
            return
        since = self.state.discovery_failing_since
        if since is None:
            since = self.now
            self._report(f"{event.message}; going on with the hosts known so far", warning=True)
        self.state = replace(self.state, discovery_failing_since=since)
        self.state = replace(self.state, discovery_error=event.message)

    def _take_ready(self, event: WorkerReady) -> None:
        record = record_of(self.state, event.worker)
        if record is None or record.phase is WorkerPhase.LEAVING or event.after_round != record.round_id:
            return  # of the past: a process that has ended, or a request that was answered already
        if record.phase is WorkerPhase.READY:
            return  # the same level again: its long poll ran out
        was_member = record.phase is WorkerPhase.MEMBER
        self._put(
            replace(
                record,
                phase=WorkerPhase.READY,
                since=self.now,
                deadline=None,
                commits=max(event.commits, record.commits) if was_member else event.commits,
                backends=event.backends,
                running=False,
            )
        )
        self.state = replace(
            self.state,
            ever_ready=True,
            commits=max(self.state.commits, event.commits),
            registry=self.state.registry.record(event.worker, WorkerState.READY),
        )
        if was_member:
            self._open_reset()
            if event.cause is ReadyCause.INTERNAL_ERROR:
                lost = f"worker {event.worker} lost its round" + (f" ({event.detail})" if event.detail else "")
                self.state = replace(self.state, unplanned=True, lost=self.state.lost or lost)
                self._break_round(lost)

    def _take_running(self, event: WorkerRunning) -> None:
        record = record_of(self.state, event.worker)
        if record is None or record.phase is not WorkerPhase.MEMBER or event.round_id != self.state.round_id:
            return
        if record.running:
            return
        self._put(replace(record, running=True, commits=event.commits))
        if self.state.phase is JobPhase.RUNNING and all(r.running for r in in_phase(self.state, WorkerPhase.MEMBER)):
            took_s = self.now - self.state.reset_began
            self.commands.append(ReportResumed(self.state.round_id, event.commits, took_s))

    def _take_exit(self, event: WorkerExited) -> None:
        record = record_of(self.state, event.worker)
        if record is None:
            return
        self._forget(event.worker)
        if record.phase is WorkerPhase.LEAVING:
            return
        if event.returncode == 0:
            self._take_clean_exit(record)
        else:
            self._take_crash(record, event.how, event.draw)

    def _take_clean_exit(self, record: WorkerRecord) -> None:
        if record.phase is WorkerPhase.BOOTING or not record.round_id:
            message = f"worker {record.worker} exited with code 0 before it called hvd.init()"
            if not self.state.ever_ready:
                self._end(ExitCode.BAD_USAGE, f"{message}; is the command a training script of this library?")
                return
            self._take_crash(record, "exited with code 0 before it called hvd.init()", 0.0)
            return
        self.state = replace(self.state, registry=self.state.registry.record(record.worker, WorkerState.SUCCESS))

    def _take_crash(self, record: WorkerRecord, how: str, draw: float) -> None:
        worker = record.worker
        self._note_failure(worker, record, how)
        blacklist = self.state.blacklist.fail(worker.hostname, now=self.now, draw=draw)
        registry = self.state.registry.record(worker, WorkerState.FAILURE)
        self.state = replace(self.state, blacklist=blacklist, registry=registry)
        if worker not in self.state.members:
            # A joiner, or a worker of the first round: its host gets no new workers, but those who live there go on.
            text = f"worker {worker} {how} before its first round"
            self._report(f"{text}; host {worker.hostname} gets no new workers", warning=True)
            if self.state.phase is JobPhase.STARTING:
                self.state = replace(self.state, crashes=(*self.state.crashes, text))
            return
        text = f"host {worker.hostname} lost (worker {worker} {how})"
        for other in self.state.workers:
            if other.worker.hostname == worker.hostname and other.phase is not WorkerPhase.LEAVING:
                self._stop(other, f"its host is blacklisted: worker {worker} {how}")
        self._open_reset()
        self._break_round(text)
        self.state = replace(self.state, unplanned=True, crashes=(*self.state.crashes, text))

    def _take_not_started(self, event: WorkerNotStarted) -> None:
        record = record_of(self.state, event.worker)
        if record is None:
            return
        self._forget(event.worker)
        if event.bad_command and not self.state.ever_ready:
            self._end(ExitCode.BAD_USAGE, event.message)
        elif record.phase is not WorkerPhase.LEAVING:
            self._take_crash(record, f"could not be started: {event.message}", event.draw)

    # --- deciding --------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Looks at the levels and does what is due. Every branch leaves a deadline, an end, or a running round."""
        if self.state.phase is JobPhase.ENDED:
            return
        self._stop_late_workers()
        self._vote_out_the_silent()
        if self.state.phase is JobPhase.WAITING:
            self._start_first_round()
        self._stop_misplaced()
        self._fill_places()
        if self.state.phase in (JobPhase.STARTING, JobPhase.RESETTING) or (
            self.state.phase is JobPhase.RUNNING and self.state.registry.complete
        ):
            self._close_registry()
        if self.state.phase is JobPhase.RUNNING and not finishing(self.state):
            self._set_planned_notice()
        self._check_deadlines()

    def _stop_late_workers(self) -> None:
        for record in self.state.workers:
            if record.deadline is None or self.now < record.deadline:
                continue
            if record.phase is WorkerPhase.LEAVING:
                self._stop(record, f"it did not end within {DISMISSED_GRACE_S:g} s of being dismissed")
            elif record.worker not in self.state.registry.expected:
                how = f"did not call hvd.init() within {self.state.policy.start_timeout_s:g} s (--start-timeout)"
                self._stop(record, f"it {how}")
                self._take_crash(record, how, 0.0)

    def _vote_out_the_silent(self) -> None:
        registry = self.state.registry
        if self.state.phase not in (JobPhase.STARTING, JobPhase.RESETTING):
            return
        if registry.complete or registry.deadline is None or self.now < registry.deadline:
            return
        limit = f"{self.state.policy.start_timeout_s:g} s (--start-timeout)"
        if not self.state.ever_ready:
            self._end(
                ExitCode.BAD_USAGE,
                f"no worker called hvd.init() within {limit}; missing: {names(registry.missing)}. Does the script call "
                "it? If it only starts slowly, raise --start-timeout",
            )
            return
        what = "call hvd.init()" if self.state.phase is JobPhase.STARTING else "ask for the next round"
        for worker in registry.missing:
            how = f"did not {what} within {limit}"
            record = record_of(self.state, worker)
            self._note_failure(worker, record, how)
            self.state = replace(
                self.state,
                registry=self.state.registry.record(worker, WorkerState.FAILURE),
                crashes=(*self.state.crashes, f"worker {worker} hung ({how})"),
                unplanned=self.state.unplanned or bool(self.state.round_id),
            )
            if record is not None:
                self._stop(record, f"it {how}")

    def _start_first_round(self) -> None:
        if usable_slots(self.state) < self.state.policy.num_proc:
            return
        self.state = replace(self.state, phase=JobPhase.STARTING, slots_deadline=None, reset_began=self.now)
        self._fill_places()
        expected = tuple(record.worker for record in self.state.workers)
        deadline = self.now + self.state.policy.start_timeout_s
        self.state = replace(self.state, registry=WorkerStateRegistry(0, expected, deadline=deadline))

    def _stop_misplaced(self) -> None:
        """Blank workers whose place is gone leave at once; those with state leave when the round is closed."""
        targets = target_places(self.state)
        for record in self.state.workers:
            if record.round_id or record.phase is WorkerPhase.LEAVING or in_target(record, targets):
                continue
            self.state = replace(self.state, registry=self.state.registry.without(record.worker))
            reason = f"host {record.worker.hostname} has no slot {record.worker.slot} any more"
            if record.phase is WorkerPhase.READY:
                self._dismiss(record, reason)
            else:
                self._stop(record, reason)

    def _fill_places(self) -> None:
        """Starts a worker in every wanted place that has none (a leaving one still holds its place)."""
        if self.state.phase in (JobPhase.WAITING, JobPhase.ENDED) or finishing(self.state):
            return
        held = [(record.worker.hostname, record.worker.slot) for record in self.state.workers]
        free = [place for place in target_places(self.state) if place not in held]
        if not free:
            return
        attempts = dict(self.state.attempts)
        fresh = []
        for hostname, slot in free:
            fresh.append(WorkerId(hostname, slot, attempts.get((hostname, slot), 0)))
            attempts[(hostname, slot)] = fresh[-1].attempt + 1
        deadline = self.now + self.state.policy.start_timeout_s
        records = tuple(WorkerRecord(worker, WorkerPhase.BOOTING, self.now, deadline) for worker in fresh)
        self.state = replace(self.state, workers=(*self.state.workers, *records), attempts=tuple(attempts.items()))
        staying = [record.worker for record in self.state.workers if record.phase is not WorkerPhase.LEAVING]
        for placed in assign_ranks(staying, host_order=self.state.host_order, root=None):
            if placed.worker in fresh:
                self.commands.append(StartWorker(placed.worker, placed.slot))

    def _close_registry(self) -> None:
        """Ends the job or forms the next round, when all who are expected have reported."""
        if not self.state.registry.complete:
            return
        ready = in_phase(self.state, WorkerPhase.READY)
        if self._end_if_over(ready):
            return
        targets = target_places(self.state)
        members = self._with_handover(tuple(record for record in ready if in_target(record, targets)), ready)
        if len(members) < self.state.policy.min_num_proc:
            self._wait_for_slots()
            return
        # Survivors that suffice never wait for joiners, nor does a start that has all it asked for.
        waits = joiners_wait_until(self.state)
        survivors = sum(1 for record in members if record.round_id)
        suffices = survivors >= self.state.policy.min_num_proc or (
            self.state.phase is JobPhase.STARTING and len(members) >= self.state.policy.num_proc
        )
        if waits is None or self.now >= waits or suffices:
            self._form_round(members, ready)

    def _end_if_over(self, ready: tuple[WorkerRecord, ...]) -> bool:
        """Ends the job when the closed registry says so."""
        if not self.state.round_id:
            return self._end_if_start_failed(ready)
        state, failure = self.state, self.state.first_failure
        succeeded = state.registry.workers_in(WorkerState.SUCCESS)
        stateful = tuple(record.worker for record in ready if record.round_id)
        if not stateful and not succeeded:
            hosts = ", ".join(dict.fromkeys(worker.hostname for worker in state.members))
            self._end(
                ExitCode.USER_CODE_FAILED,
                f"all workers of round {state.round_id} are lost, and the training's state with them (hosts {hosts}); "
                f"first: {_described(failure)}",
            )
        elif not stateful and failure is None:
            self._end(ExitCode.SUCCESS, f"all workers of round {state.round_id} ended with code 0")
        elif succeeded and failure is not None:
            self._end(ExitCode.USER_CODE_FAILED, f"{_described(failure)}, when other workers had already finished")
        elif succeeded:
            self._end(
                ExitCode.USER_CODE_FAILED,
                f"{names(succeeded)} exited with code 0 while {names(stateful)} still trained: a rank left early",
            )
        elif state.unplanned and state.policy.reset_limit is not None and state.resets >= state.policy.reset_limit:
            self._end(
                ExitCode.RESET_LIMIT,
                f"the limit of {state.policy.reset_limit} unplanned resets (--reset-limit) is used up; the last cause: "
                f"{'; '.join(state.crashes) or state.lost}",
            )
        else:
            return False
        return True

    def _end_if_start_failed(self, ready: tuple[WorkerRecord, ...]) -> bool:
        if ready or in_phase(self.state, WorkerPhase.BOOTING) or self.state.first_failure is None:
            return False
        self._end(
            ExitCode.USER_CODE_FAILED,
            f"all workers failed before their first round; first: {_described(self.state.first_failure)}",
        )
        return True

    def _with_handover(
        self, members: tuple[WorkerRecord, ...], ready: tuple[WorkerRecord, ...]
    ) -> tuple[WorkerRecord, ...]:
        """If all who hold the state are on hosts that left, one of them stays a round to hand it to the newcomers."""
        stateful = tuple(record for record in ready if record.round_id)
        if not members or not stateful or any(record.round_id for record in members):
            return members
        limit = self.state.policy.max_num_proc
        kept = members if limit is None else members[: limit - 1]
        return (_state_root(stateful), *kept)

    def _wait_for_slots(self) -> None:
        if self.state.slots_deadline is None:
            deadline = self.now + self.state.policy.elastic_timeout_s
            self.state = replace(self.state, slots_deadline=deadline)
            self._report(explain(self.state, self.now))

    def _form_round(self, members: tuple[WorkerRecord, ...], ready: tuple[WorkerRecord, ...]) -> None:
        state = self.state
        stateful = tuple(record for record in members if record.round_id)
        root = _state_root(stateful) if stateful else None
        backend = _common_backend(members)
        if backend is None:
            lacking = names(tuple(record.worker for record in members if not record.backends))
            self._end(
                ExitCode.BAD_USAGE,
                f"cannot run {len(members)} workers: they have no collective backend in common (none at all: "
                f"{lacking or 'no worker'}); install the native extension or PyTorch in every worker's environment",
            )
            return
        placed = assign_ranks(
            tuple(record.worker for record in members), host_order=state.host_order, root=root.worker if root else None
        )
        # Members who were interrupted at one commit hold equal states, unless one of them is new.
        in_step = len(stateful) == len(members) and len({record.commits for record in members}) == 1
        round_id = state.round_id + 1
        by_worker = {record.worker: record for record in members}
        self.commands.append(
            PublishRound(
                round_id=round_id,
                placed=placed,
                sync=state.unplanned or not in_step,
                commits=root.commits if root else 0,
                backend=backend,
                cause=self._cause(tuple(one.worker for one in placed)),
                old_size=len(state.members),
            )
        )
        self.state = replace(
            state,
            phase=JobPhase.RUNNING,
            round_id=round_id,
            members=tuple(one.worker for one in placed),
            registry=WorkerStateRegistry(round_id, tuple(one.worker for one in placed)),
            slots_deadline=None,
            resets=state.resets + (1 if state.unplanned else 0),
            unplanned=False,
            crashes=(),
            lost="",
            first_failure=None,
        )
        for one in placed:
            self._put(
                replace(
                    by_worker[one.worker],
                    phase=WorkerPhase.MEMBER,
                    since=self.now,
                    round_id=round_id,
                    rank=one.slot.rank,
                )
            )
        self._notify(NoticeKind.NONE, "")
        for record in ready:
            if record.worker not in by_worker:
                self._dismiss(
                    record, f"host {record.worker.hostname} has no slot {record.worker.slot} in round {round_id}"
                )

    def _cause(self, new: tuple[WorkerId, ...]) -> str:
        """What makes the round that is being formed, in words."""
        state = self.state
        if not state.round_id:
            return "; ".join(("start", *state.crashes))
        parts = list(state.crashes) or ([state.lost] if state.lost else [])
        failed = [worker.hostname for worker in state.registry.workers_in(WorkerState.FAILURE)]
        before = [worker.hostname for worker in state.members]
        after = [worker.hostname for worker in new]
        for name in dict.fromkeys((*before, *after)):
            old, now = before.count(name), after.count(name)
            if not old:
                parts.append(f"host {name} added")
            elif name not in failed and old != now:
                parts.append(f"host {name}: {old} -> {now} slots" if now else f"host {name} removed")
        return ", ".join(parts) or "hosts changed and changed back"

    def _set_planned_notice(self) -> None:
        """Asks the members to leave at their next commit when the round they would get is another than this one."""
        targets = target_places(self.state)
        members = in_phase(self.state, WorkerPhase.MEMBER)
        off = tuple(record for record in members if not in_target(record, targets))
        joiners = tuple(r for r in in_phase(self.state, WorkerPhase.READY) if in_target(r, targets))
        booting = tuple(r for r in in_phase(self.state, WorkerPhase.BOOTING) if in_target(r, targets))
        waits = joiners_wait_until(self.state)
        grows = bool(joiners) and (waits is None or self.now >= waits)
        # Members that leave go on training while those who are to replace them boot, if they are needed until then.
        enough = len(members) - len(off) + len(joiners) >= self.state.policy.min_num_proc
        if grows or (off and (enough or not booting)):
            going = [f"host {name} removed or reduced" for name in dict.fromkeys(r.worker.hostname for r in off)]
            coming = [f"host {name} ready" for name in dict.fromkeys(r.worker.hostname for r in joiners)]
            self._notify(NoticeKind.HOSTS_UPDATED, ", ".join((*going, *coming)))
        elif self.state.notice_kind is NoticeKind.HOSTS_UPDATED:
            self._notify(NoticeKind.NONE, "")

    def _check_deadlines(self) -> None:
        state = self.state
        if state.phase is JobPhase.ENDED:
            return
        limit = f"{state.policy.elastic_timeout_s:g} s (--elastic-timeout)"
        if state.slots_deadline is not None and self.now >= state.slots_deadline:
            self._end(ExitCode.TOO_FEW_SLOTS, f"{explain(state, self.now)}; gave up after {limit}")
        elif (
            state.discovery_failing_since is not None
            and self.now >= state.discovery_failing_since + state.policy.elastic_timeout_s
        ):
            self._end(ExitCode.TOO_FEW_SLOTS, f"host discovery has failed for {limit}; last: {state.discovery_error}")

    # --- small steps that several decisions share ------------------------------------------------------------------

    def _put(self, record: WorkerRecord) -> None:
        workers = tuple(record if other.worker == record.worker else other for other in self.state.workers)
        self.state = replace(self.state, workers=workers)

    def _forget(self, worker: WorkerId) -> None:
        self.state = replace(self.state, workers=tuple(r for r in self.state.workers if r.worker != worker))

    def _note_failure(self, worker: WorkerId, record: WorkerRecord | None, how: str) -> None:
        if self.state.first_failure is None:
            rank = record.rank if record is not None and record.round_id else None
            self.state = replace(self.state, first_failure=Failure(worker, rank, how))

    def _open_reset(self) -> None:
        if self.state.phase is JobPhase.RUNNING:
            deadline = self.now + self.state.policy.start_timeout_s
            registry = replace(self.state.registry, deadline=deadline)
            self.state = replace(self.state, phase=JobPhase.RESETTING, reset_began=self.now, registry=registry)

    def _break_round(self, reason: str) -> None:
        if self.state.notice_kind is not NoticeKind.ABORT:
            self._notify(NoticeKind.ABORT, reason)

    def _notify(self, kind: NoticeKind, reason: str) -> None:
        if kind is self.state.notice_kind and kind is not NoticeKind.NONE:
            return
        self.state = replace(self.state, notice_kind=kind, notice_version=self.state.notice_version + 1)
        self.commands.append(SetNotice(self.state.notice_version, self.state.round_id, kind, reason))

    def _stop(self, record: WorkerRecord, reason: str) -> None:
        self.commands.append(StopWorker(record.worker, reason))
        self._put(replace(record, phase=WorkerPhase.LEAVING, since=self.now, deadline=None, stopped=True))
        self.state = replace(self.state, registry=self.state.registry.record(record.worker, WorkerState.FAILURE))

    def _dismiss(self, record: WorkerRecord, reason: str) -> None:
        self.commands.append(DismissWorker(record.worker, reason))
        deadline = self.now + DISMISSED_GRACE_S
        self._put(replace(record, phase=WorkerPhase.LEAVING, since=self.now, deadline=deadline))

    def _report(self, text: str, *, warning: bool = False) -> None:
        self.commands.append(Report(text, warning))

    def _end(self, exit_code: int, message: str) -> None:
        if self.state.phase is JobPhase.ENDED:
            return
        self.state = replace(self.state, phase=JobPhase.ENDED)
        self.commands.append(EndJob(int(exit_code), message))


def _state_root(stateful: tuple[WorkerRecord, ...]) -> WorkerRecord:
    """Whose state the next round goes on from: the most commits, then the lowest rank so far."""
    return min(stateful, key=lambda record: (-record.commits, record.rank))


def _common_backend(members: tuple[WorkerRecord, ...]) -> Backend | None:
    common = [backend for backend in _BACKENDS if all(backend in record.backends for record in members)]
    # One worker alone needs none: its collectives are copies.
    return common[0] if common else (Backend.NATIVE if len(members) == 1 else None)


def _described(failure: Failure | None) -> str:
    if failure is None:
        return "no failure was recorded"
    rank = "" if failure.rank is None else f" (rank {failure.rank})"
    return f"worker {failure.worker}{rank} {failure.how}"
