"""The local sockets by which this user's agents on this machine are found, to make one leave or end without a driver.

Owns the sockets, one per living agent (``agent-ID.sock`` beside the job files, which only the user can reach), and
their protocol: an order and its answer, each a line of JSON. What an order means is the agent's business.
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
# How long a new agent waits for agents left over from an earlier driver of its job to end.
ORPHANS_S = 5.0


@dataclass(frozen=True, slots=True)
class Who:
    """Asks an agent to identify itself."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Orders the agent's host to leave its job. Answered once it has left.

    Attributes:
        why: the reason, in words.
        within_s: the seconds until this machine is gone; None if not known.
    """

    why: str
    within_s: Seconds | None


@dataclass(frozen=True, slots=True)
class EndOrphan:
    """Orders the agent to end if an earlier driver of this job left it here. Answered once its workers have ended.

    Attributes:
        job: identifies the job.
        place: the network of this machine that it is in: agents of other containers may share the folder.
    """

    job: str
    place: str


@dataclass(frozen=True, slots=True)
class Obeys:
    """Asks an agent of this job which driver it obeys. A new agent may not obey an earlier driver.

    Attributes:
        job, place: see EndOrphan.
    """

    job: str
    place: str


@dataclass(frozen=True, slots=True)
class EndAlone:
    """Orders the agent to end, with its workers, if it has no driver now. Answered once they have ended.

    Attributes:
        job: its job's id.
    """

    job: str


Order = Who | Leave | EndOrphan | Obeys | EndAlone


@dataclass(frozen=True, slots=True)
class AgentHere:
    """The answer to Who.

    Attributes:
        job: the id of the agent's job; "" until the driver has admitted it.
        host: its host's name in the job; "" until then for one that joins without a name.
        connected: whether it has a connection to its driver now.
        pid: of its process.
        workers: how many it has.
        alone_s: how long it has not heard from its driver, seconds; 0 if connected.
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
        job: the job's id; "" for an agent that no driver has admitted yet.
        epoch, driver: of the driver, see Welcome.
    """

    job: str
    epoch: int
    driver: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer to all other orders.

    Attributes:
        done: False if the order is not meant for this agent.
    """

    done: bool


Answer = AgentHere | Obeyed | Done
Orders = Callable[[Order], Awaitable[Answer]]
"""How an agent carries out an order."""


class ControlSocket:
    """This agent's socket. Used on the event loop only.

    Args:
        agent: its number.
        orders: carries out the orders received.
    """

    def __init__(self, agent: str, orders: Orders) -> None:
        self._agent = agent
        self._orders = orders
        self._folder: SocketFolder | None = None
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Start to listen. If that is impossible, log a warning and continue without the socket."""
        try:
            folder = private_folder(make=True)
            _remove_dead(folder)
            self._folder = SocketFolder.at(folder)
            listening = self._folder.listen(f"agent-{self._agent}.sock")
            self._server = await asyncio.start_unix_server(self._serve, sock=listening, limit=_LINE_BYTES)
        except (OSError, SettingsError) as error:
            _log.warning(
                "cannot open this agent's control socket: %s; elasticrun leave will not find the agent",
                with_path(error),
            )

    async def close(self) -> None:
        """Remove the socket, once orders just carried out are answered; others get no answer."""
        if self._server is not None:
            self._server.close()
        if self._folder is not None:
            self._folder.close()
        if self._serving:
            # Orders just carried out are still to be answered.
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
            with contextlib.suppress(OSError, ValueError):  # ValueError: the line is too long, or not an order
                order: Order = from_data(Order, from_text(await reader.readline()))
                writer.write(encode(Answer, await self._orders(order)) + b"\n")
                await writer.drain()
        finally:
            self._serving.discard(task)
            writer.close()


def agents_here() -> dict[Path, AgentHere]:
    """Return this user's living agents on this machine, by their sockets. Blocks for seconds if one is stopped.

    Raises:
        SettingsError: the folder of their sockets is not this user's alone.
    """
    answers = {path: _ask(path, Who(), _ANSWER_S) for path in _sockets()}
    return {path: answer for path, answer in answers.items() if isinstance(answer, AgentHere)}


def leave(
    host: str | None,
    job: str | None,
    limit_s: float,
    why: str = "elasticrun leave was run there",
    within_s: float | None = None,
) -> str:
    """Make an agent of this machine leave its job. Blocks until its last worker has ended and it has sent its goodbye.

    Args:
        host: its host's name in the job; None for any.
        job: the beginning of its job's id; None for any.
        limit_s: how long to wait, seconds.
        why: the reason, in words.
        within_s: the seconds until this machine is gone; None if not known.

    Returns:
        The result, in one sentence.

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
            f"cannot choose which agent is to leave: several run on this machine ({there}); pass --host or --job"
            if agents
            else f"cannot find an agent of yours{_of(host, job)} on this machine"
        )
    ((path, agent),) = agents
    if _ask(path, Leave(why, within_s), limit_s) != Done(done=True):
        raise LaunchError(f"host {agent.host} did not leave its job within {limit_s:g} s")
    return f"host {agent.host} has left its job"


def end_alone(agents: Mapping[Path, AgentHere], limit_s: float) -> list[AgentHere]:
    """End agents that have no driver. Blocks until they have ended, or for limit_s.

    Args:
        agents: from :func:`agents_here`.
        limit_s: how long to wait, seconds.

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
    """End agents left here by an earlier driver of this job. Blocks until they have ended, or for ORPHANS_S.

    Args:
        job: identifies the job.
        place: the network of this machine that it is in: agents of other containers may share the folder.
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
    """Return epoch and name of the drivers that agents of this job here obey, by job id: several jobs may match.

    Blocks until they have answered. A stopped agent does not.

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
    obeyed = sorted(
        (answer.job, answer.epoch, answer.driver) for answer in answers if isinstance(answer, Obeyed) and answer.job
    )
    return {of: (epoch, driver) for of, epoch, driver in obeyed}


def _remove_dead(folder: Path) -> None:
    """Remove the sockets of agents that were killed."""
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
        with contextlib.suppress(OSError):  # just deleted
            if stat.S_ISSOCK(path.lstat().st_mode):
                found.append(path)
    return found


def _ask(path: Path, order: Order, limit_s: float) -> Answer | None:
    """Send an order and return its answer; None if there is none. A dead agent's socket is removed."""
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
        _log.warning("cannot read the answer of the agent at %s, which may run another version: %s", path, error)
        return None
    return answer


def _pieces(sock: socket.socket, deadline: float) -> Iterator[bytes]:
    """Yield what arrives until the other end closes. Raises OSError if that takes too long."""
    size = 0
    while size <= _LINE_BYTES:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(_LINE_BYTES)
        if not piece:
            return
        size += len(piece)
        yield piece
