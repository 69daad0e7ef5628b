"""A job started by mpirun or srun, as seen by one of its processes: its identity there, and how the ranks meet.

Owns the steps of meeting, and the result. On one machine the launcher's variables suffice: from them a name is derived,
under which ranks find rank 0 (meeting.py). Otherwise mpi4py carries the exchange (across.py). Either way rank 0 serves
the job from then on (host.py), and everything else works as under a driver.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import SlotInfo, WorkerId
from elastic_driver.rendezvous.credentials import Credential, Identity, JobKey, Role
from elastic_driver.rendezvous.messages import RoundAssignment
from elastic_driver.system.interfaces import host_addresses
from elastic_driver.system.process_name import ProcessName, boot_id, network_id, stat_of
from elastic_driver.worker.launched import across, meeting
from elastic_driver.worker.launched.launcher import Launch
from elastic_driver.worker.launched.places import LOOPBACK, Member, address_of, address_of_root, places
from elastic_driver.worker.settings import DEFAULTS, WorkerSettings

if TYPE_CHECKING:
    from elastic_driver.worker.launched.host import JobHost

# How long rank 0 may be silent if its process cannot be seen. After the first round it is there, or gone for good.
_PATIENCE_S = 5.0
# On several hosts: how long a machine may acknowledge nothing. Otherwise a machine that is cut off would stay
# unnoticed, and a job that waits forever blocks all others. Machines that are only busy acknowledge.
_HOST_TIMEOUT_S = 30.0
# The kernel's name of the hydra process that has started a machine's ranks.
_PROXY = "hydra_pmi_proxy"
_NO_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True, slots=True)
class LaunchedJob:
    """This process's part in the job.

    Attributes:
        launch: its launcher; None if only a communicator is known.
        slot: its place.
        address: the address on which it listens for the other ranks.
        welcome: how rank 0 is reached.
        worker: its name there.
        host: the server of the job; None in all ranks but 0.
    """

    launch: Launch | None
    slot: SlotInfo
    address: str
    welcome: meeting.Welcome
    worker: WorkerId
    host: JobHost | None

    def adapt(self, settings: WorkerSettings) -> WorkerSettings:
        """Add to the worker's settings what a driver would have put into its environment."""
        key, identity = JobKey(bytes.fromhex(self.welcome.secret)), Identity(Role.WORKER, self.worker)
        patience_s = _PATIENCE_S if settings.patience_s == DEFAULTS.patience_s else settings.patience_s
        return replace(
            settings,
            rendezvous=self.welcome.url,
            credential=Credential(identity, key.of(identity)),
            ranks_key=key.of_ranks(),
            owner=self.welcome.owner,
            hostname=settings.hostname or self.worker.hostname,
            patience_s=patience_s,
            host_timeout_s=settings.host_timeout_s or (0.0 if self.welcome.owner else _HOST_TIMEOUT_S),
            launched=True,
        )

    def place(self, assignment: RoundAssignment) -> RoundAssignment:
        """Set a round assignment's address to the one that this rank has chosen."""
        return replace(assignment, address=self.address)

    def close(self, *, wait_for_others: bool) -> None:
        """Stop serving, in rank 0, before the process ends."""
        if self.host is not None:
            self.host.close(wait_for_others=wait_for_others)

    def abandon(self) -> None:
        """In a forked child, which is not part of the job: release the parent's resources."""
        if self.host is not None:
            self.host.abandon()


def meet(launch: Launch, ranks: Sequence[int] | None, settings: WorkerSettings) -> LaunchedJob | None:
    """Form one job of this process and those that were started with it. Blocks until rank 0 is reached.

    Args:
        launch: from the launcher's variables.
        ranks: the launcher's ranks that form the job, in their order; None for all.
        settings: the worker's settings.

    Returns:
        None if this process is the only one.

    Raises:
        SettingsError: they cannot meet; one sentence that says what to do.
    """
    if ranks is not None:
        _check(ranks, launch)
    if (launch.size == 1 and launch.is_on_one_host) or (ranks is not None and len(ranks) == 1):
        return None
    if not launch.is_on_one_host or not (launch.job or _proxy()):
        with across.of_ranks(across.world(launch), ranks) as comm:
            return _meet_over(comm, launch, settings)
    members = range(launch.size) if ranks is None else ranks
    rank = members.index(launch.rank)
    machine = socket.gethostname()
    workers, slots = _named([machine] * len(members)), places([machine] * len(members))
    # The launcher's name for the job is unique on this machine; so is the process's.
    name = meeting.meeting_name(f"{launch.launcher}\n{launch.job or _proxy()}", list(members))
    host = None
    if rank == 0:
        host = _make_host(workers, slots, settings)
        try:
            welcome = host.serve_where_ranks_meet(name)
        except BaseException:
            host.close(wait_for_others=False)
            raise
    else:
        welcome = meeting.ask_rank_0(name, timeout_s=settings.start_timeout_s)
        if welcome.size != len(members):
            raise SettingsError(f"cannot join the job: rank 0 says it has {welcome.size} ranks, not {len(members)}")
    return LaunchedJob(launch, slots[rank], LOOPBACK, welcome, workers[rank], host)


def meet_in(comm: across.Communicator, launch: Launch | None, settings: WorkerSettings) -> LaunchedJob | None:
    """Form one job of a communicator's processes. All of them call it. Blocks until rank 0 is reached.

    Returns:
        None if this process is the only one.

    Raises:
        SettingsError: no job can be formed of this communicator.
    """
    if across.is_null(comm):
        raise SettingsError(
            "cannot init with a null communicator: this process is not in it, so it must not call init()"
        )
    if comm.Is_inter():
        raise SettingsError("cannot init with an intercommunicator: merge it first (comm.Merge())")
    if comm.Get_size() == 1:
        return None
    with across.of_ranks(comm, None) as own:
        return _meet_over(own, launch, settings)


def _meet_over(comm: across.Communicator, launch: Launch | None, settings: WorkerSettings) -> LaunchedJob | None:
    rank = comm.Get_rank()
    own = Member(_machine(settings), socket.gethostname(), tuple(host_addresses()))
    members: list[Member] = comm.allgather(own)
    if len(members) == 1:
        return None
    machines = [member.machine for member in members]
    slots, workers = places(machines), _named([member.hostname for member in members])
    host, welcome, problem = None, None, ""
    if rank == 0:
        host = _make_host(workers, slots, settings)
        try:
            if len(set(machines)) == 1:
                welcome = host.serve_here()
            else:
                welcome = host.serve(address_of_root(members, settings.interface), settings.port_range)
        except Exception as error:  # sent to all, or they would wait for the broadcast
            problem = str(error)
            host.close(wait_for_others=False)
    welcome, problem = comm.bcast((welcome, problem), root=0)
    if welcome is None:
        raise SettingsError(f"rank 0 cannot serve the job: {problem}")
    address = welcome.host
    if own.machine != members[0].machine:
        address = address_of(own, settings.interface, _way_to(welcome.host))
    return LaunchedJob(launch, slots[rank], address, welcome, workers[rank], host)


def _make_host(workers: Sequence[WorkerId], slots: Sequence[SlotInfo], settings: WorkerSettings) -> JobHost:
    from elastic_driver.worker.launched.host import JobHost  # late: only rank 0 is a server

    return JobHost(workers, slots, start_timeout_s=settings.start_timeout_s)


def _check(ranks: Sequence[int], launch: Launch) -> None:
    shown = list(ranks)
    if len(set(ranks)) != len(shown) or any(rank < 0 or (launch.size and rank >= launch.size) for rank in ranks):
        raise SettingsError(f"cannot init with comm={shown}: expected ranks from 0 to {launch.size - 1}, each once")
    if launch.rank not in ranks:
        raise SettingsError(
            f"cannot init with comm={shown}: this process is rank {launch.rank}, which is not among them, so it "
            "does not belong to the job and must not call init()"
        )


def _named(hostnames: Sequence[str]) -> list[WorkerId]:
    """Return the ranks' names. The number is the rank: hosts may share a name, and local ranks would be ambiguous."""
    return [WorkerId(_NO_NAME.sub("-", name) or "host", rank, 0) for rank, name in enumerate(hostnames)]


def _machine(settings: WorkerSettings) -> str:
    """Return an id of this machine, and of the container on it."""
    return "\n".join((socket.gethostname(), settings.machine, *filter(None, (boot_id(), network_id()))))


def _proxy() -> str:
    """Return the MPICH process that started this machine's ranks; "" if it is not an ancestor of this one."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            name, fields = stat_of(pid)
            if name.decode(errors="replace") == _PROXY:
                return str(ProcessName.of(pid))
            pid = int(fields[1])
    return ""


def _way_to(address: str) -> str:
    """Return this machine's own end of a route to an address; "" if there is none."""
    try:
        family, *_, place = socket.getaddrinfo(address, 9, 0, socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as way:
            way.connect(place)  # sends nothing
            return str(way.getsockname()[0])
    except OSError:
        return ""
