"""elasticrun whose driver kills itself at each place at which it has not died yet: ``dying_elasticrun.py FLAGS...``.

What a driver does is cut into places: before and after each record of its journal, after each command that it has
carried out, after each message to an agent, and on its way out. Each has a name that is the same whoever comes to it
("carried out StartWorker localhost[0]"). One that comes to a place whose name is not in the file ``died`` of the folder
DIES writes it down, and dies by SIGKILL. So a job whose drivers are started again and again dies at each of its places
once, and comes to its end. The file ``armed`` there has what stands before each name, a pattern (only places whose
names it is found in count), and whether this is for one death or for all.

A file ``clock`` there has the seconds by which the system's clock is wrong for this process.

There is no parent that would start it again; see tests/support/processes/dying_drivers.py.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from elastic_driver.cli.main import main
from elastic_driver.core.events import Command, Event, HostsReported, Report, WorkersReported
from elastic_driver.driver.loop import ElasticDriver
from elastic_driver.driver.rounds import Rounds
from elastic_driver.driver.stepper import Stepper
from elastic_driver.driver.takeover import Takeover
from elastic_driver.journal.entries import Dropped, Kept
from elastic_driver.journal.journal import Journal, Step
from elastic_driver.launch.agent import agent
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.rendezvous import agent_messages
from elastic_driver.rendezvous.agent_messages import AgentMessage
from elastic_driver.system import parent
from tests.support.processes.forked import starts_afresh
from tests.support.processes.forked_agent import fork_first_agent, fork_first_workers

FOLDER = Path(os.environ["DIES"])
# What changes something at an agent. Others answer a question, which it asks again.
_MESSAGES = (
    agent_messages.Start,
    agent_messages.Stop,
    agent_messages.Kill,
    agent_messages.Labels,
    agent_messages.Round,
    agent_messages.NoticeSet,
    agent_messages.Reply,
    agent_messages.Close,
)
_lock = threading.Lock()
_again = 0  # within how many calls that repeat what an earlier driver may have done


def is_due(name: str) -> bool:
    """Whether this process dies here: it has come to such a place first. That is written down."""
    with _lock:
        try:
            phase, pattern, often = (FOLDER / "armed").read_text().splitlines()
        except FileNotFoundError:
            return False
        if not re.search(pattern, name):
            return False
        whole = f"{phase}: {name}\n"
        with (FOLDER / "died").open("a+") as file:
            file.seek(0)
            if whole in file.readlines():
                return False
            file.write(whole)
        if often == "once":
            (FOLDER / "armed").unlink()
        return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def place(name: str) -> None:
    if is_due(name):
        die()


def named(event: Event) -> str:
    """An event. Whose reports come together is another each time."""
    if isinstance(event, WorkersReported | HostsReported):
        return "+".join(sorted({named(each) for each in event.reports}))
    return type(event).__name__


def subject(of: Command | AgentMessage) -> str:
    """Whom it is about, without what is another each time."""
    for name in ("worker", "hostname"):
        value = getattr(of, name, None)
        if value is not None:
            return f" {str(value).partition('#')[0]}"
    return ""


def known(news: Kept | Dropped) -> str:
    """A fact, and of which host it is."""
    if isinstance(news, Dropped):
        return f"no {news.kind}"
    host = getattr(news.fact, "host", "")
    return f"fact {type(news.fact).__name__}{' ' * bool(host)}{host}"


def record(news: Sequence[Kept | Dropped], steps: Sequence[Step]) -> str:
    """What is written."""
    facts = {known(each) for each in news}
    # What goes beside others each few seconds.
    facts -= {"fact BooksKept"}
    return ", ".join((*sorted(facts), *dict.fromkeys(named(step.event) for step in steps)))


def put(self: Journal, put: Callable[..., None], news: Sequence[Kept | Dropped], steps: Sequence[Step]) -> None:
    what = "the first record" if not self._store.size else record(news, steps)
    if what:
        place(f"before writing {what}")
    put(self, news, steps)
    if what:
        place(f"written {what}")


def carry_out(self: ElasticDriver, carry_out: Callable[..., None], command: Command) -> None:
    carry_out(self, command)
    if not isinstance(command, Report):
        place(f"{'again ' * bool(_again)}carried out {type(command).__name__}{subject(command)}")


def back(self: Takeover, back: Callable[..., None], *args: Any) -> None:
    global _again
    place("before an agent is back")
    _again += 1
    back(self, *args)
    _again -= 1
    place("an agent is back")


def listens(self: Takeover, listens: Callable[..., None]) -> None:
    place("before agents can come back")
    listens(self)


def send(self: AgentLink, send: Callable[..., None], message: AgentMessage) -> None:
    send(self, message)
    name = f"said {message.name}{subject(message)}"
    if isinstance(message, _MESSAGES) and self.connected and is_due(name):
        # When it is on its way.
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, die)


def job_over(self: Fleet, job_over: Callable[..., None], *args: Any, **more: Any) -> None:
    place("before agents hear of the end")
    job_over(self, *args, **more)
    place("agents have heard of the end")


async def stop_all(self: Workers, stop_all: Callable[..., Any], limit_s: float) -> None:
    await stop_all(self, limit_s)
    place("workers have ended")


async def close_fleet(self: Fleet, close: Callable[..., Any]) -> None:
    place("before agents are let go")
    await close(self)
    place("agents have gone")


def close_journal(self: Journal, close: Callable[..., None], *args: Any) -> None:
    place("before the journal is closed")
    close(self, *args)
    place("the journal is closed")


async def fenced(self: Stepper, fenced: Callable[..., Any]) -> None:
    place("before a permit is looked for")
    await fenced(self)
    place("a permit is to be given")


async def may_publish(self: Rounds, may_publish: Callable[..., Any], *args: Any) -> Any:
    answer = await may_publish(self, *args)
    if is_due("a permit is given"):
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, die)
    return answer


def instead(owner: type, name: str, new: Callable[..., Any]) -> None:
    old = getattr(owner, name)
    setattr(owner, name, lambda self, *args, **more: new(self, old, *args, **more))


def set_clock() -> None:
    wrong_s, now = float((FOLDER / "clock").read_text()), time.time
    time.time = lambda: now() + wrong_s


def keep_what_agents_say() -> None:
    """Of those that are forked: a driver that is dead has had the other end of their standard error."""
    file = (FOLDER / "agents").open("a", buffering=1)
    faulthandler.enable(file)
    agent._say = lambda text, who: print(time.time(), os.getpid(), text, file=file)


if __name__ == "__main__":
    if not starts_afresh():
        keep_what_agents_say()
        fork_first_agent(warms=True)
        fork_first_workers()
    if (FOLDER / "clock").exists():
        set_clock()
    parent.go_on_in_a_child = lambda again=None: None
    instead(Journal, "_put", put)
    instead(Journal, "_close", close_journal)
    instead(ElasticDriver, "_carry_out", carry_out)
    instead(Takeover, "back", back)
    instead(Takeover, "listens", listens)
    instead(AgentLink, "send", send)
    instead(Fleet, "job_over", job_over)
    instead(Fleet, "close", close_fleet)
    instead(Workers, "stop_all", stop_all)
    instead(Stepper, "fenced", fenced)
    instead(Rounds, "_may_publish", may_publish)
    sys.exit(main())
