"""The next actions for a job, derived from its present state. Pure: level-triggered, not edge-triggered.

Owns every decision of the controller. It gets the resource, the existing objects, the driver's status and the time; it
returns the actions and the new status of the resource. There is no other memory, so a restarted controller continues
where it stopped: the start of everything that takes time is recorded in an annotation (``drained-since``) or in the
status.

The order of actions matters: names and rights are created before their users; a pod is listed once the launcher may
use it, and deleted once its host is drained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from elastic_driver.kubernetes import objects
from elastic_driver.kubernetes.objects import DRAINED_SINCE, LABEL_INDEX, Object
from elastic_driver.kubernetes.spec import CleanPodPolicy, ElasticJob, LauncherCreation, SpecError, Transport

# A pod may have ended because the job is over, which the launcher's Job shows a moment later.
REMAKE_S = 5.0
# The delay for a pod that fails repeatedly doubles each time, up to this limit.
MOST_REMAKE_S = 300.0
# How often to query a driver that is draining hosts, and any other driver.
ASK_SOON_S, ASK_S = 1.0, 5.0
# The driver's explanation becomes an event if the sentence changes, numbers aside, and at most this often.
TELL_S = 10.0
# All objects are read again after this time at the latest.
RESYNC_S = 60.0

_FINISHED = ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class DriverReport:
    """The status of a job's driver.

    Attributes:
        explain: the job's state and its reason, in one sentence.
        round_id: of the current or last round.
        hosts: known to the driver.
        drained: the drained ones of these.
        busy: hosts with workers.
        members: workers in training.
    """

    explain: str
    round_id: int
    hosts: frozenset[str]
    drained: frozenset[str]
    busy: frozenset[str]
    members: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed state of a job.

    Attributes:
        status: the resource's status, as last written.
        pods: the workers' pods.
        launcher: the launcher's Job.
        service, config, tokens, ssh, account, role, binding: its other objects; None for missing ones.
        driver: its driver's status; None if it does not answer.
        now: seconds since the epoch.
    """

    status: Mapping[str, Any] = field(default_factory=dict)
    pods: Sequence[Object] = ()
    launcher: Object | None = None
    service: Object | None = None
    config: Object | None = None
    tokens: Object | None = None
    ssh: Object | None = None
    account: Object | None = None
    role: Object | None = None
    binding: Object | None = None
    driver: DriverReport | None = None
    now: float = 0.0


@dataclass(frozen=True, slots=True)
class Create:
    """Create an object."""

    body: Object


@dataclass(frozen=True, slots=True)
class MakeTokens:
    """Create the Secret of the tokens: they are random, so not created here."""


@dataclass(frozen=True, slots=True)
class MakeSshKeys:
    """Create the Secret of the ssh keys."""


@dataclass(frozen=True, slots=True)
class Update:
    """Change an object, unless it has changed since it was read.

    Attributes:
        seen: the object as it was read.
        changes: a JSON merge patch.
    """

    seen: Object
    changes: Object


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete an object, if it is still the one that was read."""

    seen: Object


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask the driver to drain a host that is about to leave."""

    host: str
    within_s: float


@dataclass(frozen=True, slots=True)
class EndTraining:
    """Ask the driver to end the job. If only its pod ended, it would hand the job over to another driver."""


@dataclass(frozen=True, slots=True)
class CreateEvent:
    """Create an event of the resource."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the resource: its TTL has expired."""


Action = Create | MakeTokens | MakeSshKeys | Update | Delete | Drain | EndTraining | CreateEvent | DeleteJob


@dataclass(frozen=True, slots=True)
class Plan:
    """The next actions for a job.

    Attributes:
        actions: in the order in which to carry them out.
        status: the whole new status of the resource.
        again_s: the time until the next plan if no event happens before, seconds.
    """

    actions: tuple[Action, ...]
    status: Object
    again_s: float = RESYNC_S


def plan(body: Mapping[str, Any], seen: Observed) -> Plan:
    """Plan the next actions for a job.

    Args:
        body: the job's resource.
        seen: the job's observed state.
    """
    if body["metadata"].get("deletionTimestamp"):
        return Plan((), dict(seen.status))  # Kubernetes deletes its objects with it
    try:
        job = ElasticJob.of(body)
    except SpecError as error:
        return _refuse(body, seen, str(error))
    return _Planner(job, seen).plan()


def _refuse(body: Mapping[str, Any], seen: Observed, why: str) -> Plan:
    """Return the plan for an invalid job: create no objects, keep the existing ones, and report what is invalid."""
    known = _condition(seen.status, "Failed")
    conditions = _with_condition(seen.status.get("conditions"), "Failed", "InvalidSpec", why, seen.now)
    status = {**seen.status, "conditions": conditions, "observedGeneration": body["metadata"].get("generation", 0)}
    is_news = known is None or known.get("message") != why
    return Plan((CreateEvent("InvalidSpec", why, warning=True),) if is_news else (), status)


class _Planner:
    """The construction of one plan."""

    def __init__(self, job: ElasticJob, seen: Observed) -> None:
        self._job, self._seen = job, seen
        self._actions: list[Action] = []
        self._again_s = RESYNC_S
        self._failures = dict(seen.status.get("failures") or {})
        self._pods = sorted((pod for pod in seen.pods if _index(pod) is not None), key=lambda pod: _index(pod) or 0)

    def plan(self) -> Plan:
        job, seen = self._job, self._seen
        end = _end_of(seen.launcher)
        if end is None:
            self._make_names_and_rights()
            self._make_pods()
            self._list_pods()
            self._make_launcher()
            self._drain_and_delete()
        else:
            self._clean(end)
        status = self._status(end)
        self._tell_explain(status)
        if seen.driver is not None or any(map(_runs, self._pods)):
            self._look_again(ASK_S)
        if end is not None and job.ttl_s is not None:
            left_s = (_seconds_of(status.get("completionTime")) or seen.now) + job.ttl_s - seen.now
            if left_s <= 0:
                self._actions.append(DeleteJob())
            self._look_again(max(left_s, 0.0))
        return Plan(tuple(self._actions), status, self._again_s)

    def _look_again(self, in_s: float) -> None:
        self._again_s = min(self._again_s, in_s)

    # --- wanted objects -----------------------------------------------------------------------------------------------

    def _make_names_and_rights(self) -> None:
        job, seen = self._job, self._seen
        self._ensure(seen.service, objects.service(job))
        if seen.tokens is None:
            self._actions.append(MakeTokens())
        if seen.ssh is None and job.transport is Transport.SSH:
            self._actions.append(MakeSshKeys())
        self._ensure(seen.account, objects.service_account(job))
        there = [_name(pod) for pod in self._pods if not _is_ending(pod)]
        self._ensure(seen.role, objects.role(job, there), "rules")
        self._ensure(seen.binding, objects.role_binding(job))

    def _make_pods(self) -> None:
        job, seen = self._job, self._seen
        there = {_index(pod) for pod in self._pods}
        for index in range(0 if job.suspend else job.replicas):
            if index not in there:
                self._actions.append(Create(objects.worker_pod(job, index)))
        for pod in self._pods:
            index = _index(pod) or 0
            if index >= job.replicas or _is_ending(pod) or _phase(pod) not in _FINISHED:
                continue
            count = int(self._failures.get(str(index), 0))
            left_s = _finished_at(pod, seen.now) + min(REMAKE_S * 2**count, MOST_REMAKE_S) - seen.now
            if left_s > 0:
                self._look_again(left_s)
                continue
            self._failures[str(index)] = min(count + 1, 16)
            why = (pod.get("status") or {}).get("reason") or _phase(pod)
            self._actions += [
                CreateEvent(
                    "WorkerEnded",
                    f"pod {_name(pod)} ended ({why}) while the job is running: recreating it",
                    warning=True,
                ),
                Delete(pod),
            ]
        for pod in self._pods:
            # A pod that has run for so long resets the delay.
            if _runs(pod) and seen.now - _started_at(pod, seen.now) > MOST_REMAKE_S:
                self._failures.pop(str(_index(pod)), None)

    def _list_pods(self) -> None:
        """List the running pods. With exec, a pod is listed only after the launcher's Role names it."""
        job, seen = self._job, self._seen
        allowed = None
        if job.transport is Transport.EXEC:
            allowed = objects.exec_pods_of(seen.role or {})
        listed = [
            _name(pod)
            for pod in self._pods
            if _runs(pod) and not self._is_surplus(pod) and (allowed is None or _name(pod) in allowed)
        ]
        self._ensure(seen.config, objects.config(job, listed), "data")

    def _make_launcher(self) -> None:
        job, seen = self._job, self._seen
        if seen.launcher is not None:
            if bool((seen.launcher.get("spec") or {}).get("suspend")) != job.suspend:
                if job.suspend and job.journal and seen.driver is not None:
                    # Before its pod ends: no other driver must take over a job without pods.
                    self._actions.append(EndTraining())
                self._actions.append(Update(seen.launcher, {"spec": {"suspend": job.suspend}}))
            return
        ready = sum(1 for pod in self._pods if _is_ready(pod) and not self._is_surplus(pod))
        waits = job.launcher_creation is LauncherCreation.WHEN_READY and ready < job.replicas
        if not waits and not job.suspend:
            self._actions.append(Create(objects.launcher_job(job)))

    def _ensure(self, there: Object | None, wanted: Object, part: str = "") -> None:
        """Create a missing object, or update one part of it that differs."""
        if there is None:
            self._actions.append(Create(wanted))
        elif part and there.get(part) != wanted[part]:
            # A merge patch removes only keys that it names.
            gone = dict.fromkeys(there.get(part) or ()) if isinstance(wanted[part], dict) else {}
            self._actions.append(Update(there, {part: {**gone, **wanted[part]} if gone else wanted[part]}))

    # --- surplus pods -----------------------------------------------------------------------------------------------

    def _is_surplus(self, pod: Object) -> bool:
        return (
            (_index(pod) or 0) >= self._job.replicas
            or self._job.suspend
            or _is_ending(pod)
            or _drained_since(pod) is not None
        )

    def _is_suspended(self) -> bool:
        """Return whether the launcher of a suspended job has no pods, so that no driver can drain workers."""
        launcher = self._seen.launcher or {}
        status = launcher.get("status") or {}
        is_suspended = self._job.suspend and bool((launcher.get("spec") or {}).get("suspend"))
        return is_suspended and not status.get("active") and not status.get("terminating")

    def _drain_and_delete(self) -> None:
        """Drain the surplus pods, which are no longer listed, and delete them when their workers have left.

        A pod is deleted without a drain if it is not running, or if there is no driver to drain it, and in any case
        when the job's drain time is over.
        """
        job, seen = self._job, self._seen
        for pod in self._pods:
            if not self._is_surplus(pod) or _is_ending(pod):
                continue
            host, since = job.host_of(_name(pod)), _drained_since(pod)
            if not _runs(pod) or seen.launcher is None or self._is_suspended():
                self._actions.append(Delete(pod))
                continue
            is_fresh = since is None
            if since is None:
                # From now on the pod's removal is final, even if the job grows again meanwhile.
                since = seen.now
                self._actions.append(Update(pod, {"metadata": {"annotations": {DRAINED_SINCE: _time(seen.now)}}}))
                self._actions.append(
                    CreateEvent("Draining", f"pod {_name(pod)} is to be deleted: its workers leave first")
                )
            left_s = since + job.drain_s - seen.now
            driver = seen.driver
            has_left = (
                driver is not None and host not in driver.busy and (host in driver.drained or host not in driver.hosts)
            )
            if has_left and not is_fresh:
                self._actions.append(Delete(pod))
            elif left_s <= 0 and not is_fresh:
                text = (
                    f"pod {_name(pod)} is deleted: its workers had not left within {job.drain_s} s "
                    "(drainTimeoutSeconds)"
                )
                self._actions += [CreateEvent("DrainTimeout", text, warning=True), Delete(pod)]
            else:
                if driver is not None and host in driver.hosts and host not in driver.drained:
                    self._actions.append(Drain(host, left_s))
                self._look_again(min(ASK_SOON_S, left_s))

    # --- the end ----------------------------------------------------------------------------------------------------

    def _clean(self, end: tuple[str, str]) -> None:
        policy = self._job.clean
        for pod in self._pods:
            is_due = policy is CleanPodPolicy.ALL or (policy is CleanPodPolicy.RUNNING and _phase(pod) not in _FINISHED)
            if is_due and not _is_ending(pod):
                self._actions.append(Delete(pod))
        if _condition(self._seen.status, end[0]) is None:
            self._actions.append(CreateEvent(end[0], end[1], warning=end[0] == "Failed"))

    # --- the status ---------------------------------------------------------------------------------------------------

    def _status(self, end: tuple[str, str] | None) -> Object:
        job, seen = self._job, self._seen
        status: Object = {
            "observedGeneration": job.generation,
            "selector": ",".join(f"{key}={value}" for key, value in objects.labels_of(job, objects.WORKER).items()),
            "startTime": seen.status.get("startTime") or _time(seen.now),
            "replicaStatuses": {"Launcher": _counts_of(seen.launcher), "Worker": _counts(self._pods)},
            "failures": {index: count for index, count in self._failures.items() if int(index) < job.replicas},
        }
        driver = seen.driver
        if driver is not None:
            status |= {"explain": driver.explain, "round": driver.round_id, "workers": driver.members}
        elif seen.status.get("explain") and end is None and not job.suspend:
            # The driver may be busy, or its pod may be moving to another node.
            status |= {key: seen.status[key] for key in ("explain", "round", "workers") if key in seen.status}
        kind, reason, text = self._condition(end)
        status["conditions"] = _with_condition(seen.status.get("conditions"), kind, reason, text, seen.now)
        if end is not None:
            status["completionTime"] = seen.status.get("completionTime") or _time(seen.now)
            status["explain"] = end[1]
        return status

    def _tell_explain(self, status: Object) -> None:
        """Report the driver's explanation as an event if more than its numbers changed, which do so each second."""
        driver, told = self._seen.driver, dict(self._seen.status.get("told") or {})
        if driver is not None:
            sentence = re.sub(r"[0-9.]+", "N", driver.explain)
            since_s = self._seen.now - (_seconds_of(told.get("at")) or 0.0)
            if sentence != told.get("sentence") and since_s >= TELL_S:
                self._actions.append(CreateEvent("Explain", driver.explain))
                told = {"sentence": sentence, "at": _time(self._seen.now)}
        if told:
            status["told"] = told

    def _condition(self, end: tuple[str, str] | None) -> tuple[str, str, str]:
        job, seen = self._job, self._seen
        if end is not None:
            return end[0], f"Launcher{end[0]}", end[1]
        if job.suspend:
            return "Suspended", "Suspended", "runPolicy.suspend is true: the job's pods are deleted until it is false"
        if seen.driver is not None and seen.driver.members:
            return "Running", "Training", "workers are training"
        return "Created", "Starting", "the job's objects are created; no worker is training yet"


# --- facts of objects ------------------------------------------------------------------------------------------------


def _name(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def _index(pod: Object) -> int | None:
    text = (pod["metadata"].get("labels") or {}).get(LABEL_INDEX, "")
    return int(text) if text.isdecimal() and len(text) < 6 else None


def _phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _is_ending(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


def _runs(pod: Object) -> bool:
    return _phase(pod) == "Running"


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return _runs(pod) and any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _drained_since(pod: Object) -> float | None:
    return _seconds_of((pod["metadata"].get("annotations") or {}).get(DRAINED_SINCE))


def _started_at(pod: Object, default: float) -> float:
    return _seconds_of((pod.get("status") or {}).get("startTime")) or default


def _finished_at(pod: Object, default: float) -> float:
    """Return when a pod's last container ended, seconds since the epoch.

    If no container has ended (the pod was evicted before it started one), this is the pod's creation time.
    """
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    ends = [((status.get("state") or {}).get("terminated") or {}).get("finishedAt") for status in statuses]
    found = [seconds for seconds in map(_seconds_of, ends) if seconds is not None]
    made = _seconds_of(pod["metadata"].get("creationTimestamp"))
    return max(found) if found else default if made is None else made


def _end_of(launcher: Object | None) -> tuple[str, str] | None:
    """Return the condition of the resource and a sentence for the end of the launcher's Job; None before its end."""
    for condition in ((launcher or {}).get("status") or {}).get("conditions") or ():
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            if condition["type"] == "Complete":
                return "Succeeded", "the launcher exited with code 0"
            why = condition.get("message") or condition.get("reason") or "no reason given"
            return "Failed", f"the launcher failed: {why}"
    return None


def _counts_of(launcher: Object | None) -> Object:
    status = (launcher or {}).get("status") or {}
    return {name: int(status.get(name) or 0) for name in ("active", "succeeded", "failed")}


def _counts(pods: Iterable[Object]) -> Object:
    phases = [_phase(pod) for pod in pods if not _is_ending(pod)]
    return {
        "active": sum(phase not in _FINISHED for phase in phases),
        "succeeded": phases.count("Succeeded"),
        "failed": phases.count("Failed"),
    }


# --- conditions and times --------------------------------------------------------------------------------------------

_EXCLUSIVE = ("Created", "Running", "Suspended", "Succeeded", "Failed")


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any] | None:
    for condition in status.get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == "True":
            return condition  # type: ignore[no-any-return]
    return None


def _with_condition(before: Any, kind: str, reason: str, message: str, now: float) -> list[Object]:
    """Return the conditions with the given one true, each with the time of its last transition."""
    known = {one.get("type"): one for one in before or () if isinstance(one, Mapping)}
    conditions: list[Object] = []
    for each in _EXCLUSIVE:
        old = known.get(each)
        if each != kind and old is None:
            continue
        if each != kind:
            # "Created" stays true.
            holds = "True" if each == "Created" else "False"
            reason_now, text = str(old.get("reason", "")), str(old.get("message", ""))  # type: ignore[union-attr]
        else:
            holds, reason_now, text = "True", reason, message
        changed = old is None or old.get("status") != holds
        since = _time(now) if changed or old is None else str(old.get("lastTransitionTime") or _time(now))
        conditions.append(
            {"type": each, "status": holds, "reason": reason_now, "message": text, "lastTransitionTime": since}
        )
    return conditions


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds_of(text: Any) -> float | None:
    if not isinstance(text, str):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
