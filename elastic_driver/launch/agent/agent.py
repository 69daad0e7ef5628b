"""The agent: starts and supervises one host's workers for the driver that it connects to.

Owns the agent's life and its shutdown: it ends, and all of its workers with it, when the driver orders so, rejects it
or is gone. Its parts are the link to the driver, the workers, their server, and the local socket for orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_driver.errors import RendezvousProtocolError, SettingsError, shortage
from elastic_driver.etcd.credentials import without_credentials
from elastic_driver.hosts import WorkerId
from elastic_driver.launch.agent.coming_back import all_again
from elastic_driver.launch.agent.control import (
    AgentHere,
    Answer,
    ControlSocket,
    Done,
    EndAlone,
    EndOrphan,
    Leave,
    Obeyed,
    Obeys,
    Order,
    Who,
    drivers_here,
    end_orphans,
)
from elastic_driver.launch.agent.horovod.front import HorovodFront
from elastic_driver.launch.agent.host_rounds import HostRounds
from elastic_driver.launch.agent.link import Driver, DriverLink, DriverLostError, PeerMismatchError, RefusedError
from elastic_driver.launch.agent.machine import cores
from elastic_driver.launch.agent.ports import HeldPorts
from elastic_driver.launch.agent.probes import Probes
from elastic_driver.launch.agent.stacks import StackTaker
from elastic_driver.launch.agent.vitals import VitalsWatch
from elastic_driver.launch.agent.vitals_page import VitalsPage
from elastic_driver.launch.agent.workers import BAR_CREDIT_BYTES, CREDIT_BYTES, UNKEPT_BYTES, HostWorkers, NodeScreen
from elastic_driver.launch.processes.death import watch_process
from elastic_driver.launch.words import PASSED_ON
from elastic_driver.rendezvous.agent_messages import (
    AgentMessage,
    Bootstrap,
    Bye,
    Close,
    Leaves,
    Round,
    Warning,
    Welcome,
)
from elastic_driver.rendezvous.credentials import Identity
from elastic_driver.rendezvous.messages import Notice
from elastic_driver.rendezvous.server.kept_socket import KeptSocket
from elastic_driver.rendezvous.server.key_routes import KeyRoutes
from elastic_driver.rendezvous.server.server import RendezvousServer
from elastic_driver.system.local_socket import SocketFolder, path_of, url_of
from elastic_driver.system.logged import warnings_told
from elastic_driver.system.loops import new_loop
from elastic_driver.system.process_name import network_id
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import Cloud, counted

if TYPE_CHECKING:
    from elastic_driver.launch.agent.clouds import Endpoint
    from elastic_driver.launch.agent.clouds import Notice as SpotNotice
    from elastic_driver.launch.agent.spot import SpotReceivers, SpotWatch

# How long killing all workers may take: a few seconds for those that the kernel holds.
_END_S = 20.0
# How long the driver has to acknowledge the last messages.
_BYE_S = 5.0
# How long a connected driver has to persist the workers' exits, and how often its connection is checked.
_KEPT_S, _LOOK_S = 10.0, 1.0
# Between two reports to the driver of how long this machine has left.
_SAY_AGAIN_S = 1.0
# How many workers there is room for, beyond two for each processor.
_WORKERS = 64
_SOCKET = "workers.sock"
_LOST = "workers here that start or connect from now on cannot reach this agent"

REFUSED = 2
"""Exit code of an agent that was never admitted."""

PREEMPTED = 75
"""Exit code of a joiner whose driver was preempted (sysexits.h EX_TEMPFAIL): it may join the next driver."""


class AgentEnd(StrEnum):
    """What an agent's end means for its host's part in the job."""

    OVER = "over"  # the job has ended
    LEFT = "left"  # the host has left, or the driver has dismissed it; the job continues
    LOST = "lost"  # agent and driver have lost contact
    TOO_LATE = "too late"  # the job was over before the driver had admitted the agent
    REFUSED = "refused"  # the driver rejects it
    STRANGE = "strange"  # whatever answers is not its driver, or does not recognize the agent
    NOT_MET = "not met"  # no driver was reachable
    FAILED = "failed"  # anything else: it was ordered to end at once, or has an internal error


@dataclass(frozen=True, slots=True)
class End:
    """How the agent ends.

    Attributes:
        how: the kind of end.
        code: its exit code.
        why: the message for standard error; "" if there is none.
        again: whether to start over, as another agent.
        job: the id of its driver's job; "" if no driver had admitted it.
    """

    how: AgentEnd
    code: int
    why: str = ""
    again: bool = False
    job: str = ""


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What an agent takes from its own host, if this host is a node of a job of nodes.

    Attributes:
        environ: returns a worker's whole environment, given the variables that the driver sets.
        screen: shows the output of the workers here.
        waits: called with the reason why the driver cannot be reached yet.
        signals: signals that make this node leave the job, besides SIGINT, SIGTERM and SIGHUP.
    """

    environ: Callable[[Mapping[str, str]], Mapping[str, str]]
    screen: NodeScreen
    waits: Callable[[str], None]
    signals: tuple[signal.Signals, ...] = ()


def run_agent(bootstrap: Bootstrap) -> int:
    """Run an agent on this process's own event loop. Blocks until it has ended.

    Args:
        bootstrap: what the agent needs; a joiner's key has been made already.

    Returns:
        The exit code: 0 when the driver has ended it, 75 when the driver was preempted, 2 when the driver never
            admitted it, else 1.
    """
    with warnings_told(partial(_warn, who=_who_says(bootstrap))):
        while True:
            end = _one_life(bootstrap, None)
            if end.why:
                _say(end.why, _who_says(bootstrap))
            if not end.again:
                return end.code


def attend(bootstrap: Bootstrap, home: NodeContext) -> End:
    """Run one agent on this process's own event loop, for a node of a job of nodes. Blocks until it has ended.

    Args:
        bootstrap: what the agent needs; its key has been made already.
        home: what it takes from its own host.

    Returns:
        Its end, not yet reported. The code is 0 when the job has succeeded, or the node has left by
        elasticrun leave; 128 + N after signal N; 2 when the agent was never admitted, else 1.
    """
    with warnings_told(partial(_warn, who=_who_says(bootstrap))):
        return _one_life(bootstrap, home)


def _one_life(bootstrap: Bootstrap, home: NodeContext | None) -> End:
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            return runner.run(_run(bootstrap, home))
    except (MemoryError, RuntimeError) as error:
        reason = shortage(error)
        if not reason:
            raise
        return End(AgentEnd.FAILED, 1, f"cannot start this agent: {reason}")
    except SettingsError as error:
        return End(AgentEnd.FAILED, 1, f"cannot start this agent: {error}")


async def _run(bootstrap: Bootstrap, home: NodeContext | None) -> End:
    return await Agent(bootstrap, home).run()


class Agent:
    """One agent, from its first try to reach the driver to its end. Used on the event loop only.

    Args:
        bootstrap: what this agent was given.
        home: what it takes from its own host; None if this host is not a node of a job of nodes.
    """

    def __init__(self, bootstrap: Bootstrap, home: NodeContext | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._bootstrap = bootstrap
        self._home = home
        self._host, self._job_id = bootstrap.host, ""  # as the driver names them, from the welcome on
        self._tasks = Tasks()
        self._workers: HostWorkers | None = None  # from the welcome on
        self._link = DriverLink(bootstrap, self)
        self._rounds = HostRounds(
            self._send,
            self,
            is_heard=lambda: self._is_heard() and not self._link.is_alone,
            is_alone=lambda: self._link.is_alone,
            on_notice=self._notified,
        )
        self._ports = HeldPorts(self._send)
        self._probes = Probes(self._send, self._tasks, is_held=self._ports.holds)
        self._socket_url = ""  # the URL of the workers' server, from its start on
        keys = KeyRoutes(upstream=self._rounds)
        self._rounds.serve(keys)
        self._server = RendezvousServer(
            (*self._rounds.routes, *keys.routes), admits=self._admits, on_error=self.failed, on_full=self._warn
        )
        self._horovod = HorovodFront(self._rounds, keys, self, tasks=self._tasks, warn=self._warn)
        self._control = ControlSocket(self._link.agent, self._ordered)
        self._closing = False
        self._leaving = ""  # why it has to leave; "" if it need not
        self._gone_at = math.inf  # when this machine will be gone, as far as known; the loop's clock
        self._signal = 0  # the signal that has asked it to leave; 0 if there was none
        self._ended: asyncio.Future[End] = self._loop.create_future()
        self._vitals: VitalsWatch | None = None  # from the welcome on
        self._stacks = StackTaker(self, self._send, self._tasks)
        self._spot: SpotWatch | None = None  # from the welcome on, if spot notices are asked for
        self._nothing_left = asyncio.Event()  # set when its workers are dead and the driver has been notified
        self._taken = asyncio.Event()  # set when the driver has acknowledged or persisted something

    async def run(self) -> End:
        """Run the agent. Blocks until it has ended and none of its workers' processes is left."""
        self._loop.set_exception_handler(self._failed_on_loop)
        async with contextlib.AsyncExitStack() as way_out:
            # Signals that were ignored at the start stay ignored, for the workers too. SIGHUP gets a handler that does
            # nothing instead of SIG_IGN, which workers would inherit.
            more = () if self._home is None else self._home.signals
            signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more)
            handlers = {**dict.fromkeys(PASSED_ON, self._pass_on), **dict.fromkeys(signals, self._interrupted)}
            for number in [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]:
                self._loop.add_signal_handler(number, handlers[number], number)
                way_out.callback(self._loop.remove_signal_handler, number)
            if self._bootstrap.job:
                here = network_id()
                # Both at once: a stopped agent answers neither, and one that is ended first reports its driver.
                obeyed, _ = await asyncio.gather(
                    drivers_here(self._bootstrap.job, here),
                    end_orphans(self._bootstrap.job, here),
                )
                self._link.known = {job_id: Driver(*each) for job_id, each in obeyed.items()}
            way_out.push_async_callback(self._control.close)
            await self._control.open()
            for url in self._bootstrap.urls:
                if (path := path_of(url)) is not None:
                    with contextlib.suppress(OSError):  # the link reports why the driver cannot be reached
                        way_out.callback(SocketFolder.at(path.parent).close)
            socket = KeptSocket(self._server.listeners, _SOCKET, say=self._warn, if_lost=_LOST)
            way_out.callback(socket.close)
            way_out.push_async_callback(self._server.close)
            way_out.callback(self._rounds.close)
            way_out.callback(self._horovod.close)
            way_out.push_async_callback(self._tasks.end)
            way_out.callback(self._probes.close)
            way_out.callback(self._ports.close)
            self._socket_url = url_of(socket.path)
            await self._server.start_local(socket.listen(), workers=_WORKERS + 2 * cores())
            self._tasks.start(socket.keep())
            if not self._bootstrap.outlives:  # else its connection shows it, as on any other machine
                died = partial(self._end, End(AgentEnd.LOST, 1, "the driver has died"))
                way_out.callback(watch_process(self._bootstrap.owner, died))
            way_out.callback(self._end_spot_watch)
            way_out.callback(self._end_vitals_watch)
            keeping = self._tasks.start(self._keep())
            end = await self._ended
            keeping.cancel()
            await self._end_workers()
            self._link.close()
            self._nothing_left.set()
        return replace(end, job=self._job_id)

    # --- events from the driver (LinkOwner) ------------------------------------------------------------------------

    def not_welcomed_yet(self, why: str, left_s: float) -> None:
        """Report the failed first try, unless the driver has dialled this agent: the driver reports that itself."""
        if self._home is not None:
            self._home.waits(why)
        elif self._bootstrap.slots:
            self._say(f"cannot reach the driver yet: {why}; retrying for another {left_s:.0f} s")

    def welcomed(self, welcome: Welcome) -> None:
        """Make the parts that need the driver's settings, the workers first."""
        self._rounds.poll_s = welcome.poll_s
        self._host, self._job_id = welcome.host, welcome.job_id
        slots = self._bootstrap.slots
        if slots:
            some = counted(slots, "slot")
            self._say(f"this host has joined job {welcome.job_id} as {welcome.host}, with {some}")
        try:
            self._workers = HostWorkers(
                welcome,
                self._mark(welcome),
                self._socket_url,
                send=self._send,
                has_room=lambda: not self._is_full(),
                has_room_for_bars=lambda: self._link.connected and self._link.channel.unseen_bytes < BAR_CREDIT_BYTES,
                on_gone=self._gone,
                on_failing=self._rounds.fails,
                more_of=self._horovod.environment,
                tasks=self._tasks,
                environ=self._environ if self._home is None else self._home.environ,
                own_folder=self._home is not None,
                screen=None if self._home is None else self._home.screen,
                stdin=self._bootstrap.stdin if self._bootstrap.stdin >= 0 else None,
            )
        except (OSError, MemoryError, RuntimeError) as error:
            self.failed(error)
        else:
            self._vitals = VitalsWatch(
                self._workers, self._send, is_heard=lambda: self._link.connected and self._is_heard()
            )
            self._vitals.start()
        if cloud := self._bootstrap.spot_notices or welcome.spot_notices:
            self._tasks.start(self._watch_spot(Cloud(cloud)))

    def _environ(self, given: Mapping[str, str]) -> Mapping[str, str]:
        """Return a worker's whole environment: what the driver gives, and on other machines the host's own below it."""
        # An agent started early for a job in etcd, or by a launcher like srun, may hold the driver's own credentials.
        return given if self._bootstrap.owner else {**without_credentials(os.environ), **given}

    def _mark(self, welcome: Welcome) -> str:
        """Return the mark of the processes here.

        The driver's own processes (a discovery script) end with its own agent, if that ends with the driver. An agent
        that does not may have a successor in this job on this machine, whose workers its guard must leave alone.
        """
        ends_together = self._bootstrap.owner and not self._bootstrap.outlives
        return welcome.job_id if ends_together else f"{welcome.job_id}-{self._link.agent}"

    def take(self, message: AgentMessage) -> None:
        """Hand a message to the part that it is for."""
        if self._workers is None or self._ended.done():
            return  # the agent is ending: it could not start, or has failed
        match message:
            case Round(round_id):
                self._rounds.begin_round(round_id)
            case Close():
                if not self._closing:
                    self._closing = True
                    self._tasks.start(self._close(message))
            case _:
                parts = (self._workers, self._rounds, self._probes, self._ports, self._stacks)
                if not any(part.take(message) for part in parts):
                    raise RendezvousProtocolError(f"unexpected message {message.name} from a driver")

    def seen(self) -> None:
        """Let the workers' output continue if the driver keeps up again."""
        self._taken.set()
        channel = self._link.channel
        has_room = channel.unseen_bytes < CREDIT_BYTES // 2 and channel.unkept_bytes < UNKEPT_BYTES
        if self._workers is not None and has_room:
            self._workers.resume()

    def alone(self) -> None:
        """Let the rounds act without a driver."""
        self._rounds.alone()

    def cannot_ask(self, why: str) -> None:
        """Warn that nothing reachable from here knows which driver has the job."""
        self._warn(
            f"cannot find out from here which driver has the job: {why}; if the machine of the present "
            "driver is lost, the workers on this host are killed after --agent-timeout"
        )

    def taken_over(self, welcome: Welcome, untold: Sequence[AgentMessage], alone_s: float) -> None:
        """Send the new driver everything that it has to know."""
        if self._workers is None:
            return  # the agent is ending, since it could not start
        within_s = None if math.isinf(self._gone_at) else max(0.0, self._gone_at - self._loop.time())
        leaves = Leaves(self._leaving, within_s) if self._leaving else None
        for message in all_again(self._workers, self._rounds, self._ports, leaves, untold, alone_s):
            self._link.send(message)
        self._probes.close()  # the driver that asked for a check is gone
        self._workers.bars.taken_over(welcome.bars)
        self.seen()

    def _is_heard(self) -> bool:
        """Return whether the driver keeps up with what it is sent."""
        return self._link.channel.unseen_bytes < CREDIT_BYTES

    def _is_full(self) -> bool:
        """Return whether to hold output back until the driver has caught up."""
        channel = self._link.channel
        return channel.unseen_bytes > CREDIT_BYTES or channel.unkept_bytes > UNKEPT_BYTES

    def _send(self, message: AgentMessage) -> None:
        self._link.send(message)
        if self._workers is not None and not self._closing and self._is_full():
            self._workers.pause()

    async def _keep(self) -> None:
        try:
            await self._link.keep()
        except PeerMismatchError as error:
            self._end(End(AgentEnd.STRANGE, REFUSED, str(error)))
        except RefusedError as error:
            self._refused(str(error), is_over=error.is_over)
        except DriverLostError as error:
            if self._workers is None:
                self._end(End(AgentEnd.NOT_MET, 1, str(error)))
            else:
                ended = self._bootstrap.slots and self._home is None
                self._end(End(AgentEnd.LOST, 1, f"{error}{'; the workers on this host were killed' if ended else ''}"))

    def _refused(self, why: str, *, is_over: bool) -> None:
        if self._workers is None:
            how = AgentEnd.TOO_LATE if is_over else AgentEnd.REFUSED
            what = "node" if self._home is not None else "host" if self._bootstrap.slots else "agent"
            self._end(End(how, REFUSED, f"the driver rejected this {what}: {why}"))
        elif is_over or self._closing:
            self._end(End(AgentEnd.LEFT, 0, why))
        else:
            again = self._bootstrap.slots > 0
            self._end(End(AgentEnd.LOST, 1, f"the driver rejected this agent when it reconnected: {why}", again=again))

    async def _close(self, order: Close) -> None:
        """End the workers, send the goodbye, and wait until the driver has acknowledged it.

        If the job continues, a later driver may need to know how they ended: wait until this one has persisted that.
        """
        assert self._workers is not None
        await self._workers.close()
        with contextlib.suppress(TimeoutError):
            while self._link.connected and not self._workers.has_said_all:
                async with asyncio.timeout(_BYE_S):
                    self._taken.clear()
                    await self._taken.wait()
        if order.exit_code < 0:
            await self._until_kept()
        self._send(Bye())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_BYE_S):
                while self._link.connected and self._link.channel.unseen_bytes:
                    self._taken.clear()
                    await self._taken.wait()
        if self._home is not None and order.exit_code >= 0:
            self._end(End(AgentEnd.OVER, min(order.exit_code, 1), order.why))
            return
        joined = "this host has left the job" if self._leaving else "the driver has released this host from the job"
        code = self._bootstrap.leave_code if order.exit_code < 0 else PREEMPTED if order.preempted else 0
        if self._home is not None and self._signal:
            code = 128 + self._signal
        self._end(End(AgentEnd.LEFT, code, joined if self._bootstrap.slots else ""))

    async def _until_kept(self) -> None:
        """Block until the driver has persisted all that a later one must know; a connected driver has limited time."""
        left_s = _KEPT_S
        while self._link.channel.has_unkept and left_s > 0:
            self._taken.clear()
            began = self._loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(_LOOK_S, left_s)):
                    await self._taken.wait()
            if self._link.connected:
                left_s -= self._loop.time() - began

    # --- for the server and its handler ----------------------------------------------------------------------------

    def _admits(self, identity: Identity) -> bool:
        return self._workers is not None and self._workers.has(identity.worker)

    def runs(self, worker: WorkerId) -> bool:
        """Return whether the worker's process exists."""
        return self._workers is not None and self._workers.runs(worker)

    def watch_threads(self, worker: WorkerId, pid: int, thread: int) -> None:
        """Record which of its threads a worker reports to live as long as it does."""
        if self._workers is not None:
            self._workers.watch_threads(worker, pid, thread)

    def pid(self, worker: WorkerId) -> int | None:
        """Return the PID of the worker's process; None if it is not running."""
        return None if self._workers is None else self._workers.pid(worker)

    def watched(self) -> list[tuple[WorkerId, int, VitalsPage | None]]:
        """Return each running worker, the PID of the process that was started for it, and its page."""
        return [] if self._workers is None else self._workers.watched()

    async def sever(self, worker: WorkerId, endpoints: Iterable[tuple[str, int]]) -> None:
        """Shut down a worker's connections to and from these addresses and ports."""
        if self._workers is not None:
            await self._workers.sever(worker, endpoints)

    def start_again(self, worker: WorkerId, env: Mapping[str, str]) -> None:
        """Start a worker's process again, with these variables."""
        if self._workers is not None:
            self._workers.start_again(worker, env)

    def _gone(self, worker: WorkerId) -> None:
        self._rounds.gone(worker)
        self._horovod.gone(worker)

    def _notified(self, notice: Notice) -> None:
        self._horovod.notified(notice)

    def _warn(self, text: str) -> None:
        self._send(Warning(text))

    # --- the end ---------------------------------------------------------------------------------------------------

    def _end(self, end: End) -> None:
        if not self._ended.done():
            self._ended.set_result(end)

    async def _end_workers(self) -> None:
        if self._workers is None:
            return
        with contextlib.suppress(TimeoutError):  # whatever the kernel holds is left to the guard
            async with asyncio.timeout(_END_S):
                await self._workers.close()
        self._workers.drop_output()

    def _pass_on(self, number: signal.Signals) -> None:
        # If the driver has started this agent, the driver orders it: a scheduler may signal both.
        if self._bootstrap.slots and self._workers is not None:
            self._workers.pass_on(number)

    def _interrupted(self, number: signal.Signals) -> None:
        name = number.name
        is_node = self._home is not None
        if (number == signal.SIGHUP and not is_node) or (number == signal.SIGINT and not self._bootstrap.slots):
            return  # the process that started this agent is ending; the driver will report when the job is over
        if self._workers is None or self._signal or not self._bootstrap.slots:
            self._end(End(AgentEnd.FAILED, 128 + number if is_node else 1, f"{name}: exiting"))
            return
        self._signal = number  # elasticrun leave is not a signal
        if is_node:
            self._workers.ends_by = number
        self._say(f"{name}: leaving the job (send it again to exit at once)")
        grace_s = self._bootstrap.grace_s if number == signal.SIGTERM else 0.0
        self._leave(f"its agent received {name}", grace_s or None)

    def _leave(self, why: str, within_s: float | None = None) -> None:
        gone_at = math.inf if within_s is None else self._loop.time() + within_s
        if not self._leaving or gone_at < self._gone_at:
            self._leaving = why
            is_first = math.isinf(self._gone_at) and within_s is not None
            self._gone_at = min(gone_at, self._gone_at)
            self._link.send(Leaves(why, within_s))
            if is_first:
                self._tasks.start(self._count_down(why))

    async def _count_down(self, why: str) -> None:
        """Keep reporting the time left: a driver that was stopped or cut off overestimates what it receives late."""
        while not self._closing:
            said = self._link.channel.last
            await asyncio.sleep(_SAY_AGAIN_S)
            left_s = max(0.0, self._gone_at - self._loop.time())
            if self._link.connected and self._link.channel.is_seen(said):
                self._link.send(Leaves(why, left_s))
                if not left_s:
                    return

    async def _watch_spot(self, cloud: Cloud) -> None:
        def load() -> tuple[type[SpotWatch], type[SpotReceivers], Callable[[], Endpoint]]:
            # The modules that speak HTTP take a while to load, and most agents never need them.
            from elastic_driver.launch.agent.clouds import endpoint_of
            from elastic_driver.launch.agent.spot import SpotReceivers, SpotWatch

            return SpotWatch, SpotReceivers, lambda: endpoint_of(cloud)

        watch, told, endpoint = await self._loop.run_in_executor(None, load)
        if not self._ended.done():
            self._spot = watch(cloud, endpoint, told(self._noticed, self._warn))

    def _noticed(self, notice: SpotNotice) -> None:
        if not self._closing:
            left = "" if notice.within_s is None else f" in {notice.within_s:.0f} s"
            if self._bootstrap.slots:
                self._say(f"{notice.why}{left}; leaving the job")
            self._leave(notice.why, notice.within_s)

    def _end_vitals_watch(self) -> None:
        if self._vitals is not None:
            self._vitals.close()

    def _end_spot_watch(self) -> None:
        if self._spot is not None:
            self._spot.close()

    async def _ordered(self, order: Order) -> Answer:
        """Carry out an order received over the local socket."""
        match order:
            case Who():
                workers = 0 if self._workers is None else len(self._workers.watched())
                alone_s = self._link.alone_s
                return AgentHere(self._job_id, self._host, self._link.connected, os.getpid(), workers, alone_s)
            case Leave(why, within_s):
                if self._workers is None:
                    self._end(End(AgentEnd.FAILED, 1, "ordered to leave before the driver had admitted this host"))
                else:
                    self._leave(why, within_s)
            case Obeys(job, of):
                is_meant = bool(job) and job == self._bootstrap.job and of == network_id()
                return Obeyed(self._job_id, *self._link.driver) if is_meant else Done(done=False)
            case EndOrphan(job, of):
                is_meant = bool(job) and job == self._bootstrap.job and of == network_id()
                is_orphan = self._workers is not None and not self._link.connected
                if not (is_meant and is_orphan):
                    return Done(done=False)
                why = "a newer agent of this job has started on this machine, and this one's driver is silent"
                self._end(End(AgentEnd.LOST, 1, why))
            case EndAlone(job):
                if not self._is_alone_of(job):
                    return Done(done=False)
                self._end(End(AgentEnd.LOST, 1, "ended by elasticrun end: its job has no driver"))
        await self._nothing_left.wait()
        return Done(done=True)

    def _is_alone_of(self, job: str) -> bool:
        """Return whether this agent belongs to the job and has no driver now."""
        return bool(job) and job == self._job_id and self._workers is not None and not self._link.connected

    def failed(self, error: BaseException) -> None:
        """End after an unexpected error, the first one."""
        if not self._ended.done():
            self._end(End(AgentEnd.FAILED, 1, shortage(error) or _internal(error, _who_says(self._bootstrap))))

    def _say(self, text: str) -> None:
        _say(text, _who_says(self._bootstrap))

    def _failed_on_loop(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or "transport" in context or "protocol" in context or "socket" in context:
            self._say(f"{context.get('message', 'error')}: {error!r}")
        else:
            self.failed(error)


def _internal(error: BaseException, who: str) -> str:
    """Print where an unexpected error was raised, and return it in one line."""
    lines = "".join(traceback.format_exception(error)).rstrip()
    _say(f"internal error; please report the lines below\n{lines}", who)
    return f"internal error in the agent: {error!r}"


def _who_says(bootstrap: Bootstrap) -> str:
    """Return the prefix of the agent's lines: the command that the user typed, if any."""
    return "elasticrun join" if bootstrap.slots and not bootstrap.alike else "elastic_driver agent"


def _say(text: str, who: str) -> None:
    """Print one line to standard error, which may be closed: the process that started the agent may be gone."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{who}: {text}", file=sys.stderr, flush=True)


def _warn(text: str, who: str) -> None:
    _say(f"warning: {text}", who)
