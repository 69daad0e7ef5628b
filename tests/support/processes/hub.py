"""A driver that forms rounds of workers of two hosts, and only passes on what they say."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.launch.fleet.link import AgentLink
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Answer,
    Ask,
    NoticeSet,
    Put,
    Ready,
    Reply,
    Round,
    Start,
    Value,
    Values,
    Want,
)
from elastic_driver.rendezvous.credentials import ENV_RANKS_KEY, JobKey
from elastic_driver.rendezvous.environment import ENV_HEARTBEAT
from elastic_driver.rendezvous.messages import Notice, RoundAssignment
from elastic_driver.rendezvous.server.store import RoundStore
from elastic_driver.words import Backend, NoticeKind
from tests.support.processes.agents import FakeDriver

WORKERS = (WorkerId("a", 0, 0), WorkerId("a", 1, 0), WorkerId("b", 0, 0))


class Hub(FakeDriver):
    """Forms a round when all of its members ask for one, keeps its keys, and passes them on.

    Attributes:
        members: of the next round.
        round_id: its number.
        answer: to all that workers ask.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.members: tuple[WorkerId, ...] = WORKERS
        self.round_id = 1
        self.store = RoundStore()
        if isinstance(self.before, Hub):
            self.round_id = self.before.round_id + 1
            self.store.begin_round(self.before.round_id)
        self.ready: dict[WorkerId, AgentLink] = {}
        self.wants: list[tuple[AgentLink, Want]] = []
        self.answer = Answer(0, 200, b"{}")

    def take(self, link: AgentLink, message: AgentMessage) -> None:
        match message:
            case Ready(request):
                self.ready[request.worker] = link
                if set(self.ready) == set(self.members):
                    self._form()
            case Put(round_id, scope, key, value):
                self.store.put(round_id, scope, key, value)
                for waiting, want in tuple(self.wants):
                    self._give(waiting, want)
            case Want():
                self.wants.append((link, message))
                self._give(link, message)
            case Ask(number):
                link.send(Answer(number, self.answer.status, self.answer.blob))
        super().take(link, message)

    def _give(self, link: AgentLink, want: Want) -> None:
        round_id, scope = want.round_id, want.scope
        if want.count:
            if self.store.count(round_id, scope) >= want.count:
                link.send(Values(round_id, scope, self.store.packed(round_id, scope)))
                self.wants.remove((link, want))
        elif (value := self.store.get(round_id, scope, want.key)) is not None:
            link.send(Value(round_id, scope, want.key, value))
            self.wants.remove((link, want))

    def _form(self) -> None:
        number = self.round_id
        self.store.begin_round(number)
        for link in self.links.values():
            link.send(Round(number))
            link.send(NoticeSet(Notice(number, number, NoticeKind.NONE, "")))
        hosts = sorted({worker.hostname for worker in self.members})
        for rank, worker in enumerate(self.members):
            there = [each for each in self.members if each.hostname == worker.hostname]
            local = there.index(worker)
            across = sum(1 for host in hosts if sum(each.hostname == host for each in self.members) > local)
            slot = SlotInfo(rank, len(self.members), local, len(there), hosts.index(worker.hostname), across)
            place = RoundAssignment(number, slot, sync=True, commits=0, backend=Backend.NATIVE)
            self.ready[worker].send(Reply(worker.key, place))
        self.ready.clear()

    def launch(self, program: str, *arguments: str) -> None:
        env = {
            **os.environ,
            ENV_RANKS_KEY: JobKey.new().of_ranks().hex(),
            ENV_HEARTBEAT: "0.2",
            "OMP_NUM_THREADS": "1",
        }
        of = {link.facts.host: link for link in self.links.values()}
        for worker in WORKERS:
            of[worker.hostname].send(
                Start(worker.key, [sys.executable, "-c", program, *arguments], env, str(worker), 0)
            )

    def lines(self) -> list[str]:
        return [self.output(worker).decode().partition(">:")[2].strip() for worker in WORKERS]
