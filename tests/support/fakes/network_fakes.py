"""Agents of a fake fleet that answer checks of the network as the test's network is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from elastic_driver.rendezvous.agent_messages import AgentMessage, Listen, Listening, Probe, Probed
from tests.support.fakes.fleet_fakes import FakeAgent, FakeFleet, rest

PORT = 150


class Net:
    """Agents, and how their hosts reach each other. Answers for them, until the test is over.

    Attributes:
        agents: by host.
        broken: who cannot reach whom.
        speeds: bytes a second where it is not 1e8, by both names.
        rtts: likewise, seconds.
        mute: hosts whose agents do not answer.
        full: hosts that have no free port.
    """

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet
        self.agents: dict[str, FakeAgent] = {}
        self.broken: set[tuple[str, str]] = set()
        self.speeds: dict[str, float] = {}
        self.rtts: dict[str, float] = {}
        self.mute: set[str] = set()
        self.full: set[str] = set()
        self.answered: dict[str, list[AgentMessage]] = {}
        self._wanted: list[str] = []

    def arrives(self, host: str, **more: object) -> FakeAgent:
        self.agents[host] = agent = self.fleet.arrives(host, address=f"10.0.0.{len(self.agents) + 1}", **more)  # type: ignore[arg-type]
        self.answered[host] = []
        return agent

    async def has(self, *hosts: str) -> None:
        """These are wanted beside those that are, and have agents."""
        await self.want(*hosts)
        for host in hosts:
            if host not in self.fleet.remote.hosts():
                await rest()  # so many are dialled at a time
            self.arrives(host)

    async def want(self, *hosts: str) -> None:
        self._wanted += hosts
        await self.fleet.fleet.want(self._wanted)
        await rest()

    def up(self) -> str:
        return "".join(sorted(host for host in self.agents if self.fleet.fleet.is_up(host)))

    async def until_up(self, hosts: str, *, within_s: float = 150.0) -> None:
        """Blocks until these may be used, and no others."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.up() != hosts:
                    await asyncio.sleep(0.01)
        assert self.up() == hosts, self.fleet.fleet.remark()

    def asked(self, host: str, kind: type[AgentMessage] = Probe) -> list[AgentMessage]:
        return [each for each in self.agents[host].heard() if isinstance(each, kind)]

    async def run(self) -> None:
        while True:
            for host, agent in tuple(self.agents.items()):
                answered = self.answered[host]
                for message in agent.heard()[len(answered) :]:
                    answered.append(message)
                    answer = self.answer(host, message)
                    if answer is not None and host not in self.mute and agent.link.connected:
                        agent.say(answer)
            await asyncio.sleep(0.01)

    def answer(self, host: str, message: AgentMessage) -> AgentMessage | None:
        match message:
            case Listen(check, ports=ports):
                assert ports == [100, 199]
                full = host in self.full
                return Listening(check, 0 if full else PORT, "no port in 100-199 is free" if full else "")
            case Probe(_, number, addresses, ports, burst_bytes):
                assert addresses.keys() == ports.keys()
                assert set(ports.values()) == {PORT}
                fails = {peer: "no answer within 3 s" for peer in ports if (host, peer) in self.broken}
                there = [peer for peer in ports if peer not in fails]
                both = {peer: "".join(sorted((host, peer))) for peer in there}
                speeds = {peer: [self.speeds.get(both[peer], 1e8), 1e8] for peer in there} if burst_bytes else {}
                return Probed(number, {peer: self.rtts.get(both[peer], 1e-4) for peer in there}, speeds, fails)
        return None


@contextlib.asynccontextmanager
async def network(fleet: FakeFleet) -> AsyncIterator[Net]:
    net = Net(fleet)
    running = asyncio.create_task(net.run())
    yield net
    assert not running.done(), running
    running.cancel()
