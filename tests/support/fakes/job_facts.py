"""What a journal says of a job beside its state, made up."""

from __future__ import annotations

from typing import Any

from elastic_driver.core import document
from elastic_driver.health.drains import DrainsKept
from elastic_driver.health.vitals_table import VitalsTable
from elastic_driver.journal.entries import BooksKept, Fact, JobFacts, Took, WaysKept
from elastic_driver.launch.fleet.kept import (
    AdmittedKept,
    AgentKept,
    LeaverKept,
    MachineKept,
    RevokedKept,
    TicketKept,
    TicketUse,
)
from elastic_driver.rendezvous.agent_messages import PROTOCOL, Hello
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.tally import Tally
from elastic_driver.settings.settings import Settings
from tests.support.fakes.fleet_fakes import hello

SECRET = "5ec4e7"
"""Stands in all that nobody may read."""


def job_of_one(**more: Any) -> JobFacts:
    """A job with secrets everywhere."""
    settings = Settings(
        command=("python", "train.py", "\udcff", "x" * 4096),
        num_proc=1,
        min_num_proc=1,
        accept_agents=True,
        worker_env={"A": f"{SECRET}\udcfe"},
        passed_env={"B": SECRET},
    )
    facts: dict[str, Any] = {
        "job_id": "0123",
        "key": f"{SECRET}01",
        "operator_key": f"{SECRET}02",
        "join_token": f"token {SECRET}",
        "settings": settings,
        "environment": {"PASSWORD": SECRET, "B\udcff": "\udcfe"},
        "directory": "/home/\udcff",
        "umask": 0o22,
    }
    return JobFacts(**(facts | more))


def a_took(**more: Any) -> Took:
    """A driver of another boot."""
    took: dict[str, Any] = {
        "epoch": 1,
        "version": "1.2.3",
        "python": "3.11.7",
        "core": document.VERSION,
        "protocol": PROTOCOL,
        "driver": "d7",
        "machine": "node1",
        "process": "boot pid:[1] 12 34",
        "clock": 0.0,
        "boot_s": 100.0,
        "unix_s": 1e9,
        "at_s": 2.5,
    }
    return Took(**(took | more))


def an_agent(agent: str = "a" * 32, **more: Any) -> AgentKept:
    """One on this machine, of a process that nobody has."""
    facts: dict[str, Any] = {
        "agent": agent,
        "key": f"{SECRET}03",
        "host": "localhost",
        "peer": "",
        "ours": "",
        "local": True,
        "joined": False,
        "ending": False,
        "given_up": False,
        "hello": greeting(agent),
    }
    return AgentKept(**(facts | more))


def greeting(agent: str, **more: Any) -> Hello:
    """Its first words."""
    return hello(agent=agent, key=f"{SECRET}04", owner="boot pid:[1] 12 34", **more)


def all_kinds() -> list[Fact]:
    """A fact of each kind, and a second one of some."""
    use = TicketUse("a" * 32, f"{SECRET}05", "10.0.0.1", 12, 70.5, reported=True)
    return [
        an_agent(),
        an_agent("b" * 32, given_up=True, hello=None),
        TicketKept("01", f"{SECRET}06", "a", 60.0, 65.0, frozenset({"10.0.0.1", "10.0.0.2"}), use),
        TicketKept("02", f"{SECRET}07", "b", 60.0, 65.0, frozenset(), None),
        RevokedKept("c", "its ticket was used twice"),
        LeaverKept("d", 7.0),
        LeaverKept("e", None),
        AdmittedKept("a" * 32),
        MachineKept("a", 2, "", frozenset({"10.0.0.1"})),
        WaysKept("/run/\udcff/driver.sock", 40000, {"10.0.0.9": 40000}, "f1", f"-----{SECRET}-----"),
        BooksKept(9.0, Tally().kept(), None, Chronicle().kept(), VitalsTable().kept(), DrainsKept(5.0, {"a": 5.0})),
    ]
