"""The local sockets by which this user's agents on this machine are found: to have one leave, or end without a driver.

Owns the sockets, one a living agent (``agent-ID.sock`` beside the job files, which only the user can reach), and what
is said there: an order and its answer, each a line of JSON. What an order means is the agent's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from elastic_driver.codec import CodecError, Seconds, encode, from_data, from_text
from elastic_driver.errors import LaunchError, SettingsError, with_path
from elastic_driver.rendezvous.job_files import private_folder
from elastic_driver.system.local_socket import SocketFolder, connect, is_ours

_log = logging.getLogger(__name__)

_LINE_BYTES = 8192
# An agent answers at once, unless it is stopped.
_ANSWER_S = 2.0
# How long a new agent waits for those that an earlier driver of its job has left.
ORPHANS_S = 5.0


@dataclass(frozen=True, slots=True)
class Who:
    """Asks an agent who it is."""


@dataclass(frozen=True, slots=True)
class Leave:
    """The agent's host is to leave its job. Answered when it has.

    Attributes:
        why: in words.
        within_s: the seconds that are left until this machine is gone; None when nobody has said.
    """

    why: str
    within_s: Seconds | None


@dataclass(frozen=True, slots=True)
class EndOrphan:
    """The agent is to end if an earlier driver of this job has left it here. Answered when its workers have ended.

    Attributes:
        job: what tells the job from others.
        place: the network of this machine that it is in: agents of other containers may have the same folder.
    """

    job: str
    place: str


@dataclass(frozen=True, slots=True)
class Obeys:
    """Asks an agent which driver it obeys, if it is of this job. A new one may not obey an earlier one.

    Attributes:
        job, place: see EndOrphan.
    """

    job: str
    place: str


@dataclass(frozen=True, slots=True)
class EndAlone:
    """The agent is to end, with its workers, if it has no driver now. Answered when they have ended.

    Attributes:
        job: its job's id.
    """

    job: str


Order = Who | Leave | EndOrphan | Obeys | EndAlone


@dataclass(frozen=True, slots=True)
class AgentHere:
    """The answer to Who.

    Attributes:
        job: the agent's job's id; "" until the driver has taken it in.
        host: its host's name in the job; "" for one that joins without a name, until then.
        connected: whether it has a connection to its driver now.
        pid: its process.
        workers: how many it has.
        alone_s: for how long it has not heard of its driver, seconds; 0 where it is connected.
    """

    job: str
    host: str
    connected: bool
    pid: int
    workers: int = 0
    alone_s: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Obeyed:
    """The answer to Obeys.

    Attributes:
        job: the job's id; "" for an agent that no driver has taken in yet.
        epoch, driver: of the driver, see Welcome.
    """

    job: str
    epoch: int
    driver: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to all other orders.

    Attributes:
        done: False where the order is not for this agent.
    """

    done: bool


Answer = AgentHere | Obeyed | Done
Orders = Callable[[Order], Awaitable[Answer]]
"""What an agent does with an order."""


class ControlSocket:
    """This agent's socket. Used on the event loop only.

    Args:
        agent: its number.
        orders: carries out what comes.
    """

    def __init__(self, agent: str, orders: Orders) -> None:
        self._agent = agent
        self._orders = orders
        self._folder: SocketFolder | None = None
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listens. Where that cannot be, it is logged, and the agent goes on without."""
        try:
            folder = private_folder(make=True)
            _remove_dead(folder)
            self._folder = SocketFolder.at(folder)
            listening = self._folder.listen(f"agent-{self._agent}.sock")
            self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=_LINE_BYTES)
        except (OSError, SettingsError) as error:
            _log.warning("elasticrun leave will not find this agent: %s", with_path(error))

    async def close(self) -> None:
        """Removes the socket; who waits for an answer has had it, or gets none."""
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.close()
        if self._serving:
            # What has just been decided is still to be said.
            _, late = await asyncio.wait(tuple(self._serving), timeout=0.5)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            if not is_ours(writer.get_extra_info("socket")):
                return
            with contextlib.suppress(OSError, ValueError):  # ValueError: a line that is too long, or no order
                order: Order = from_data(Order, from_text(await reader.readline()))
                writer.write(encode(Answer, await self._orders(order)) + b"\n")
                await writer.drain()
        finally:
            self._serving.discard(task)
            writer.close()


def agents_here() -> dict[Path, AgentHere]:
    """This user's living agents on this machine, by their sockets. Blocks for seconds where one is stopped.

    Raises:
        SettingsError: the folder of their sockets is not this user's alone.
    """
    answers = {path: _ask(path, Who(), _ANSWER_S) for path in _sockets()}
    return {path: answer for path, answer in answers.items() if isinstance(answer, AgentHere)}


def leave(
    host: str | None,
    job: str | None,
    limit_s: float,
    why: str = "by elasticrun leave",
    within_s: float | None = None,
) -> str:
    """Has an agent of this machine leave its job. Blocks until its last worker has ended and it has said goodbye.

    Args:
        host: its host's name in the job; None for any.
        job: the beginning of its job's id; None for any.
        limit_s: how long to wait.
        why: in words.
        within_s: the seconds that are left until this machine is gone; None when nobody has said.

    Returns:
        What became of it, in one sentence.

    Raises:
        SettingsError: there is no such agent here, or several.
        LaunchError: it has not left in that time.
    """
    agents = [
        (path, one) for path, one in agents_here().items() if host in (None, one.host) and one.job.startswith(job or "")
    ]
    if len(agents) != 1:
        there = ", ".join(sorted(f"host {one.host} of job {one.job or '?'}" for _, one in agents))
        raise SettingsError(
            f"cannot tell which agent is to leave: say --host or --job ({there})"
            if agents
            else f"no agent of yours{_of(host, job)} runs on this machine"
        )
    ((path, agent),) = agents
    if _ask(path, Leave(why, within_s), limit_s) != Done(done=True):
        raise LaunchError(f"host {agent.host} has not left its job within {limit_s:g} s")
    return f"host {agent.host} has left its job"


def end_alone(agents: Mapping[Path, AgentHere], limit_s: float) -> list[AgentHere]:
    """Has agents end that have no driver. Blocks until they have, or for that time.

    Args:
        agents: of :func:`agents_here`.
        limit_s: how long to wait.

    Returns:
        Those that have not ended: they do not answer, or have a driver again.
    """
    if not agents:
        return []
    with ThreadPoolExecutor(len(agents)) as pool:
        answers = pool.map(lambda path: _ask(path, EndAlone(agents[path].job), limit_s), agents)
        return [agent for agent, answer in zip(agents.values(), answers, strict=True) if answer != Done(done=True)]


def _of(host: str | None, job: str | None) -> str:
    return ("" if host is None else f" for host {host}") + ("" if job is None else f" for job {job}")


async def end_orphans(job: str, place: str) -> None:
    """Has agents end that an earlier driver of this job has left here. Blocks until they have, or for ORPHANS_S.

    Args:
        job: what tells it from others.
        place: the network of this machine that it is in: agents of other containers may have the same folder.
    """
    try:
        sockets = _sockets()
    except SettingsError as error:
        _log.warning("cannot look for agents of an earlier driver: %s", error)
        return
    loop = asyncio.get_running_loop()
    order = EndOrphan(job, place)
    await asyncio.gather(*(loop.run_in_executor(None, _ask, path, order, ORPHANS_S) for path in sockets))


async def drivers_here(job: str, place: str) -> dict[str, tuple[int, str]]:
    """The drivers that agents of this job here obey: epoch and name, by the job's id: there may be several such jobs.

    Blocks until they have answered. One that is stopped does not.

    Args:
        job, place: see end_orphans.
    """
    try:
        sockets = _sockets()
    except SettingsError:
        return {}
    loop = asyncio.get_running_loop()
    answers = await asyncio.gather(
        *(loop.run_in_executor(None, _ask, path, Obeys(job, place), _ANSWER_S) for path in sockets)
    )
    obeyed = sorted((each.job, each.epoch, each.driver) for each in answers if isinstance(each, Obeyed) and each.job)
    return {of: (epoch, driver) for of, epoch, driver in obeyed}


def _remove_dead(folder: Path) -> None:
    """Removes the sockets of agents that were killed."""
    for path in _sockets_in(folder):
        with contextlib.suppress(OSError):
            try:
                connect(path, 0.0).close()
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


def _sockets() -> list[Path]:
    try:
        return _sockets_in(private_folder())
    except OSError:
        return []


def _sockets_in(folder: Path) -> list[Path]:
    found = []
    for path in sorted(folder.glob("agent-*.sock")):
        with contextlib.suppress(OSError):  # it is gone this moment
            if stat.S_ISSOCK(path.lstat().st_mode):
                found.append(path)
    return found


def _ask(path: Path, order: Order, limit_s: float) -> Answer | None:
    """One order and its answer; None when there is none. A dead agent's socket is removed."""
    deadline = time.monotonic() + limit_s
    try:
        sock = connect(path, limit_s)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return None
    except OSError:
        return None
    with sock:
        try:
            sock.sendall(encode(Order, order) + b"\n")
            line = b"".join(_pieces(sock, deadline))
        except OSError:
            return None
    if not line:
        return None
    try:
        answer: Answer = from_data(Answer, from_text(line))
    except CodecError as error:
        _log.warning("cannot read what the agent at %s answers, which may be of another version: %s", path, error)
        return None
    return answer


def _pieces(sock: socket.socket, deadline: float) -> Iterator[bytes]:
    """What comes until the other end closes. Raises OSError when that takes too long."""
    size = 0
    while size <= _LINE_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(_LINE_BYTES)
        if not piece:
            return
        size += len(piece)
        yield piece
