"""Histories of jobs as text: what happened, and below it, indented, what the core did about it and why it stands there.

A line that is not indented is input:

    # a comment
    job -np 2 --min-np 1            limits of the job, as elasticrun's flags; the first input line. --on-change restart,
                                    auto (restarted until one asks for a round), auto-in-place (the script was seen to
                                    call init()) or no-rounds for workers of these kinds; --last-call S (0);
                                    --nnodes MIN:MAX for nodes of one worker each; --fixed-hosts as with -H
    TIME hosts a:2 b:1              discovery lists these hosts (none: an empty list); a:2,rack=r1,spot with labels
    TIME hosts a:2 down=b,c         these are listed, too, but not up; known-hosts instead: discovery does not answer
    TIME hosts a:2 b:1 anew=b       it is another machine than the one that had its name
    TIME hosts a:2 b:1 preparing=b  it imports what workers import, before a round of restarted workers ends for it
    TIME discovery-failed MESSAGE   discovery-away instead: that may pass by itself
    TIME hosts-unusable REASONS     none of them can be used before somebody changes something there
    TIME serving WHO                of jobs with --parameter-servers P [--restart-chief]: their servers answer
    TIME released WHO               the chief has taken them out
    TIME chief CODE                 the chief has ended; chief-not-started MESSAGE: its command cannot be run
    TIME started WHO                of workers that do not ask for their rounds: their processes run
    TIME ready WHO [after=ROUND] [commits=N] [cause=CAUSE] [backends=torch,native] [steps=N] [detail=TEXT] [where=TEXT]
               [raised=1] [unreachable=0,2]     _ for a space in TEXT
    TIME running WHO [round=ROUND] [commits=N]
    TIME exit WHO CODE [oom] [draw=0.5] [error=TEXT] [where=TEXT]     negative for a signal; oom: of the OOM killer
    TIME lost HOST                  and its workers with it
    TIME dying WHO                  killed by SIGKILL, but not dead yet
    TIME exiting WHO                says that its script is over
    TIME spared WHO                 was to be killed at its exit, but its script had ended
    TIME hung WHO REASON            found by its heartbeats; silent instead: not heard at all
    TIME unheard HOST,HOST [S]      nothing is heard of them for S seconds (5); in-doubt instead: not sure yet
    TIME heard HOST,HOST            they are heard again, or begin anew
    TIME drain HOST [SLOT]          undrain for the opposite
    TIME goes HOST S                its machine goes away in S seconds
    TIME departs HOST=S HOST        discovery lists the same hosts, these as about to go (none: all of them stay)
    TIME not-started WHO MESSAGE    bad-command instead: the command is at fault on whatever host
    TIME stop SIGNAL
    TIME driver-failed ERROR
    TIME timer

Of a history whose workers' health is watched:

    health [--hang-action warn] [--straggler-action drain] [--heartbeat-timeout S] [--hang-timeout S]
                                    from here on; time passes as in a job: agents look once a second, timers expire
    TIME does WHO WHAT              trains, trains=1.5 (it takes so many times as long for each step), hangs, computes,
                                    is-stopped, is-debugged, waits-for-a-lock, is-silent: others wait for it meanwhile
    TIME stacks WHAT                of all who are asked: same (unless this says otherwise), none, moving, debugger
    TIME on-disk                    a commit that the job can go on from
    TIME scripts                    the workers do not use this library: who "hangs" does nothing, all others compute
    TIME mute HOST                  its agent says nothing, though its machine acknowledges; unmute for the opposite
    TIME pass                       nothing, but the time until then

What is found until a line's time comes before what the line itself does, with the seconds; then who is suspected now.

TIME is seconds, "+" and seconds since the line before, "." for the same moment, or "next" for the next deadline. WHO is
a worker (a[0], a[0]#1), several with commas, or "booting" or "members" for all of these.

Indented lines are output. With REWRITE_SCENARIOS=1 in the environment they are written anew: read the difference.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from elastic_driver.core.deadlines import next_deadline  # noqa: E402
from elastic_driver.core.events import (  # noqa: E402
    ChiefExited,
    Command,
    DiscoveryFailed,
    DismissWorker,
    DrainRequested,
    DriverFailed,
    EndJob,
    GiveUpHost,
    HostHeard,
    HostsDiscovered,
    HostSilent,
    HostsReported,
    HostsUnusable,
    KillWorker,
    PublishRound,
    Report,
    ReportDying,
    ReportExit,
    ReportResumed,
    SetNotice,
    StartChief,
    StartWorker,
    StopChief,
    StopRequested,
    StopWorker,
    WorkerDying,
    WorkerExiting,
    WorkerHung,
    WorkerNotStarted,
    WorkerReleased,
    WorkerRunning,
    WorkerSpared,
    WorkerStarted,
)
from elastic_driver.core.membership import explain  # noqa: E402
from elastic_driver.core.state import WorkerPhase  # noqa: E402
from elastic_driver.health.findings import (  # noqa: E402
    NotDrained,
    Spared,
    StackWanted,
    Stalled,
    StallEnded,
    StragglerFound,
    StragglerGone,
    WorkerCleared,
    WorkerSuspected,
)
from elastic_driver.health.watch import Finding, Rules  # noqa: E402
from elastic_driver.hosts import Departure  # noqa: E402
from elastic_driver.words import Backend, Ending, OnChange, ReadyCause, Sizing  # noqa: E402
from tests.support.fakes.membership_job import BOTH, Job, worker_id  # noqa: E402
from tests.support.fakes.watched_workers import AT_A_PROMPT, STACK, WatchedJob  # noqa: E402

pytestmark = pytest.mark.scenarios

SCENARIOS = sorted(path.name for path in HERE.glob("*.txt"))

LIMITS = {
    "-np": "num_proc",
    "--min-np": "min_num_proc",
    "--max-np": "max_num_proc",
    "--standby": "num_standby",
    "--elastic-timeout": "elastic_timeout_s",
    "--start-timeout": "start_timeout_s",
    "--drain-timeout": "drain_timeout_s",
    "--np-multiple": "num_proc_multiple",
    "--ranks-per-host-multiple": "ranks_per_host_multiple",
    "--reset-limit": "reset_limit",
    "--reset-window": "reset_window_s",
    "--last-call": "last_call_s",
    "--parameter-servers": "num_parameter_servers",
}

KINDS: dict[str, dict[str, object]] = {
    "in-place": {},
    "restart": {"on_change": OnChange.RESTART},
    "auto": {"on_change": OnChange.RESTART, "becomes_in_place": True},
    "auto-in-place": {"must_init": False},
    "no-rounds": {"on_change": OnChange.NO_ROUNDS},
}


def _is_said(word: str) -> bool:
    """Whether it says of hosts how they are, and is none."""
    return word.startswith(("down=", "preparing=", "anew="))


def make_job(flags: list[str]) -> Job:
    """The job that these flags ask for."""
    limits: dict[str, object] = {}
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if flag == "--durable-dir":
            limits["durable"] = bool(rest.pop(0))
        elif flag == "--protect":
            limits["protect"] = tuple(rest.pop(0).split(","))
        elif flag == "--max-restarts":  # one of torchrun's flags, with which no host is blamed for its workers
            limits |= {"reset_limit": int(rest.pop(0)), "blames_hosts": False}
        elif flag == "--nnodes":  # of one worker each, as torchrun's flags have it
            least, most = map(int, rest.pop(0).split(":"))
            limits |= {"num_proc": least, "max_num_proc": most, "blames_hosts": False, "sizing": Sizing.NNODES}
        elif flag == "--fixed-hosts":
            limits["fixed_hosts"] = True
        elif flag == "--restart-chief":
            limits["restart_chief"] = True
        elif flag == "--on-change":
            limits |= KINDS[rest.pop(0)]
        elif flag == "--blacklist-cooldown-range":
            limits["cooldown_range_s"] = (float(rest.pop(0)), float(rest.pop(0)))
        else:
            value = rest.pop(0)
            if flag == "--parameter-servers":
                limits["on_change"] = OnChange.NO_ROUNDS
            limits[LIMITS[flag]] = float(value) if flag.endswith(("timeout", "window", "call")) else int(value)
    limits.setdefault("min_num_proc", limits["num_proc"])
    limits.setdefault("last_call_s", 0.0)
    limits["retries_starts"] = "reset_limit" in limits
    limits["ends_at_start"] = "sizing" in limits and "reset_limit" not in limits
    return Job(**limits)


def told(command: Command) -> str:
    """A command as one line."""
    match command:
        case StartWorker():
            standby = " (standby)" if command.standby else ""
            if command.parameter_server is not None:
                return f"start {command.worker} as parameter server {command.parameter_server}"
            return f"start {command.worker} as rank {command.planned.rank} of {command.planned.size}{standby}"
        case StartChief():
            of = ", ".join(command.parameter_servers)
            return f"start chief {command.number}: parameter servers {of}; workers {', '.join(command.workers)}"
        case StopChief():
            grace = "" if command.grace_s is None else f", within {command.grace_s:g} s"
            return f"stop chief {command.number}{grace}: {command.reason}"
        case StopWorker():
            ending = "" if command.ending is Ending.USUAL else f" ({command.ending})"
            return f"stop {command.worker}{ending}: {command.reason}"
        case KillWorker():
            how = " (prints its stacks)" if command.hangs else ""
            unless = " (unless its script has ended)" if command.exits else ""
            return f"kill {command.worker}: {command.reason}{how}{unless}"
        case GiveUpHost():
            return f"give up host {command.hostname}: {command.reason}"
        case DismissWorker():
            return f"dismiss {command.worker}: {command.reason}"
        case PublishRound():
            ranks = " ".join(str(one.worker) for one in command.placed)
            if command.backend is None:
                return f"round {command.round_id}: {ranks}; {command.cause}"
            sync = "sync" if command.sync else "no sync"
            return f"round {command.round_id}: {ranks}; {sync}, from commit {command.commits}; {command.cause}"
        case SetNotice():
            return f"notice {command.version} to round {command.round_id}: {command.kind} {command.reason}".rstrip()
        case ReportResumed():
            return f"round {command.round_id} trains from commit {command.commits}, after {command.took_s:g} s"
        case ReportDying():
            return f"dying {command.worker}: {command.how}"
        case ReportExit():
            return f"ended {command.worker}{'' if command.expected else ', of itself'}"
        case Report():
            return f"{'warn' if command.warning else 'say'}: {command.text}"
        case EndJob():
            return f"end with exit code {command.exit_code}: {command.message}"


def make_watch(job: Job, flags: list[str]) -> WatchedJob:
    """The watch over the workers' health that these flags ask for."""
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    return WatchedJob(
        job,
        Rules(
            heartbeat_timeout_s=float(given.pop("--heartbeat-timeout", 0)),
            hang_timeout_s=float(given.pop("--hang-timeout", 0)),
            hang_action=given.pop("--hang-action", "end"),
            straggler_action=given.pop("--straggler-action", "warn"),
            **given,  # what is misspelt
        ),
    )


def found(finding: Finding) -> str:
    """A finding as one line."""
    match finding:
        case WorkerSuspected():
            then = "" if finding.ends_s is None else f"; ended in {finding.ends_s:g} s"
            then += f"; spared: {finding.spared}" if finding.spared else ""
            then += f"; and {finding.more} more" if finding.more else ""
            frames = f" at {finding.frames[0]}" if finding.frames else ""
            return f"suspect {finding.worker} ({finding.kind}): {finding.why}{then}{frames}"
        case WorkerCleared():
            return f"clear {finding.worker}: {finding.why}; it stood still for {finding.took_s:g} s"
        case Spared():
            return f"spare {finding.worker}: {finding.reason}"
        case StackWanted():
            return f"ask {finding.worker} for its stack"
        case Stalled() | StallEnded():
            what = "stalled" if isinstance(finding, Stalled) else "goes on" if finding.resumed else "stall over"
            return (
                f"{what} after {finding.stood_s:g} s; waiting for {', '.join(map(str, finding.waits_for)) or 'nobody'}"
            )
        case StragglerFound():
            return f"slow {finding.worker}: {1 / finding.against_others:.2f} times the others"
        case StragglerGone():
            return f"slow no more {finding.worker}: {finding.why}"
        case NotDrained():
            return f"keep {finding.worker}: {finding.why}"
        case WorkerHung():
            return f"{'silent' if finding.silent else 'hung'} {finding.worker}: {finding.reason}"
        case DrainRequested():
            place = finding.hostname if finding.slot is None else f"{finding.hostname}[{finding.slot}]"
            return f"drain {place}: {finding.why}"


def play_health(watched: WatchedJob, words: list[str]) -> list[str]:
    """Lets time pass until the line's, and does what it says of the workers. What it says of the job is left to do."""
    time, verb, *rest = words
    if time == "next":
        deadline = next_deadline(watched.job.state)
        assert deadline is not None, "there is no next deadline"
        watched.pass_until(deadline)
    elif time != ".":
        watched.pass_until(watched.job.now + float(time[1:]) if time.startswith("+") else float(time))
    match verb:
        case "does":
            for who in who_is(watched.job, rest[0]):
                watched.workers.does[worker_id(who)] = rest[1]
        case "stacks":
            watched.stack = {"same": STACK, "none": None, "debugger": AT_A_PROMPT, "moving": ""}[rest[0]]
        case "scripts":
            watched.workers.scripts = True
        case "on-disk":
            watched.find_commit()
        case "mute":
            watched.unheard[rest[0]] = watched.job.now
        case "unmute":
            del watched.unheard[rest[0]]
    lines = []
    for at, one in watched.found:
        lines.append(f"        {told(one)}" if isinstance(one, Command) else f"    {at:g} {found(one)}")
    watched.found.clear()
    return lines


HEALTH = ("does", "stacks", "scripts", "on-disk", "mute", "unmute", "pass")


def feed_line(job: Job, words: list[str]) -> list[Command]:
    """Feeds the events of one input line."""
    time, verb, *words = words
    if time == "next":
        deadline = next_deadline(job.state)
        assert deadline is not None, "there is no next deadline"
        job.now = max(job.now, deadline)
    elif time != ".":
        now = job.now + float(time[1:]) if time.startswith("+") else float(time)
        assert now >= job.now, f"time goes back to {now:g}"
        job.now = now
    options = dict(word.split("=", 1) for word in words if "=" in word and verb in ("ready", "running", "exit"))
    words = [word for word in words if not ("=" in word and verb in ("ready", "running", "exit"))]
    match verb:
        case "hosts" | "known-hosts":
            said = {"down": "", "preparing": "", "anew": ""}
            said |= dict(word.split("=") for word in words if _is_said(word))
            words = [word for word in words if not _is_said(word)]
            down, preparing, anew = (list(filter(None, names.split(","))) for names in said.values())
            return job.hosts(*words, down=down, answered=verb == "hosts", preparing=preparing, anew=anew)
        case "departs":
            parts = [word.partition("=") for word in words]
            departures = [Departure(name, "a notice", float(left_s) if left_s else None) for name, _, left_s in parts]
            return job.feed(HostsDiscovered(job.state.hosts, tuple(departures)))
        case "discovery-failed" | "discovery-away":
            return job.feed(DiscoveryFailed(" ".join(words), may_pass=verb == "discovery-away"))
        case ["hosts-unusable", *words]:
            return job.feed(HostsUnusable(" ".join(words)))
        case "hosts-unusable":
            return job.feed(HostsUnusable(" ".join(words)))
        case "timer":
            return job.timer(at=job.now)
        case "chief":
            return job.end_chief(int(words[0]))
        case "chief-not-started":
            return job.feed(ChiefExited(job.state.chiefs, None, " ".join(words), bad_command=True))
        case "drain" | "undrain":
            slot = int(words[1]) if len(words) > 1 else None
            return job.feed(DrainRequested(words[0], slot, "as asked", undo=verb == "undrain"))
        case "goes":
            return job.feed(DrainRequested(words[0], None, "a notice", within_s=float(words[1])))
        case "unheard" | "in-doubt":
            silent_s = float(words[1]) if len(words) > 1 else 5.0 if verb == "unheard" else 2.0
            names = words[0].split(",")
            return job.feed(HostsReported(tuple(HostSilent(name, silent_s, verb == "unheard") for name in names)))
        case "lost":
            return job.lose(words[0])
        case "heard":
            return job.feed(HostsReported(tuple(HostHeard(name) for name in words[0].split(","))))
        case "driver-failed":
            return job.feed(DriverFailed(" ".join(words)))
        case "stop":
            return job.feed(StopRequested(signal.Signals[words[0]], words[0]))
    commands: list[Command] = []
    for who in who_is(job, words[0]):
        match verb:
            case "ready":
                commands += job.ready(
                    who,
                    after=int(options["after"]) if "after" in options else None,
                    commits=int(options["commits"]) if "commits" in options else None,
                    cause=ReadyCause(options["cause"]) if "cause" in options else None,
                    backends=tuple(Backend(name) for name in options["backends"].split(",") if name)
                    if "backends" in options
                    else BOTH,
                    steps=int(options.get("steps", 0)),
                    detail=options.get("detail", "").replace("_", " "),
                    where=options.get("where", "").replace("_", " "),
                    raised="raised" in options,
                    unreachable=tuple(int(rank) for rank in options.get("unreachable", "").split(",") if rank),
                )
            case "running":
                round_id = int(options.get("round", job.round_id))
                commits = int(options.get("commits", job.round_commits))
                commands += job.feed(WorkerRunning(worker_id(who), round_id, commits))
            case "exit":
                commands += job.exit(
                    who,
                    int(words[1]),
                    draw=float(options.get("draw", 0)),
                    error=options.get("error", "").replace("_", " "),
                    where=options.get("where", "").replace("_", " "),
                    out_of_memory="oom" in words,
                )
            case "started":
                commands += job.feed(WorkerStarted(worker_id(who)))
            case "serving":
                commands += job.begin(worker_id(who))
            case "released":
                commands += job.feed(WorkerReleased(worker_id(who)))
            case "dying":
                commands += job.feed(WorkerDying(worker_id(who), -9, "killed by SIGKILL", 0.0))
            case "exiting":
                commands += job.feed(WorkerExiting(worker_id(who)))
            case "spared":
                commands += job.feed(WorkerSpared(worker_id(who)))
            case "hung" | "silent":
                commands += job.feed(WorkerHung(worker_id(who), " ".join(words[1:]), verb == "silent"))
            case "not-started" | "bad-command":
                bad = verb == "bad-command"
                commands += job.feed(WorkerNotStarted(worker_id(who), " ".join(words[1:]), 0.5, bad))
            case _:
                raise ValueError(f"no such event: {verb}")
    return commands


def who_is(job: Job, text: str) -> list[str]:
    """The workers that an input line names."""
    if text == "booting":
        return job.of(WorkerPhase.BOOTING)
    return job.of(WorkerPhase.MEMBER) if text == "members" else text.split(",")


def play(text: str) -> str:
    """The history with its output written anew."""
    job: Job | None = None
    watched: WatchedJob | None = None
    lines = []
    for line in text.splitlines():
        if line.startswith(" "):
            continue
        lines.append(line)
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if words[0] == "job":
            job = make_job(words[1:])
            continue
        assert job is not None, "the first input line is not a job"
        if words[0] == "health":
            watched = make_watch(job, words[1:])
            continue
        try:
            if watched is not None:
                lines += play_health(watched, words)
                words[0] = "."
            commands = [] if words[1] in HEALTH else feed_line(job, words)
            lines += [f"    {told(command)}" for command in commands]
            if watched is not None and words[1] not in HEALTH:
                watched.follow(commands)
                lines += play_health(watched, [".", "pass"])
        except Exception as error:
            error.add_note(f"at {line!r}")
            raise
        deadline = next_deadline(job.state)
        left = "" if deadline is None else f" [timer in {deadline - job.now:g} s]"
        lines.append(f"    = {explain(job.state, job.now)}{left}")
        if watched is not None and (suspects := watched.watch.suspects(job.now)):
            lines.append(f"    ~ suspected: {', '.join(str(worker) for worker, *_ in suspects)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    path = HERE / name
    written = path.read_text(encoding="utf-8")
    played = play(written)
    if os.environ.get("REWRITE_SCENARIOS") == "1":
        path.write_text(played, encoding="utf-8")
        return
    assert played.splitlines() == written.splitlines(), "if this is right: REWRITE_SCENARIOS=1, and read the difference"


@pytest.mark.release  # each run of the tests plays them in processes with other seeds
@pytest.mark.parametrize("seed", ["1", "2"])
def test_no_order_comes_from_hashes(seed: str) -> None:
    """Each process iterates its sets in another order; a core that does so gives other commands."""
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, __file__, *SCENARIOS], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{len(SCENARIOS)} alike\n"), done.stderr


def test_a_history_is_compared_and_not_just_played() -> None:
    text = (HERE / SCENARIOS[0]).read_text(encoding="utf-8")
    lines = text.splitlines()
    without = "\n".join(line for line in lines if not line.startswith("    =")) + "\n"
    assert play(without) == text != without


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        there = (HERE / scenario).read_text(encoding="utf-8")
        assert play(there) == there, scenario
    print(f"{len(sys.argv) - 1} alike")
