"""Construction of a job's agent side from its settings: how agents are started and admitted, and what they are sent.

Owns no agent. :mod:`elastic_driver.launch.fleet` and :mod:`elastic_driver.launch.dial` run them. Knows nothing of
workers but which of their variables are sent to other machines.
"""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, cast

from elastic_driver.dialects.torchrun import VISIBLE_DEVICES, TorchrunJob
from elastic_driver.driver.agents import AgentSide, DriverAddresses
from elastic_driver.driver.policy import starts_again
from elastic_driver.driver.recording import Recording
from elastic_driver.hosts import CHIEF, is_loopback
from elastic_driver.journal.entries import Facts
from elastic_driver.launch.dial.anywhere import AnywhereDialler
from elastic_driver.launch.dial.command import BootstrapOn, CommandDialler, RshDialler
from elastic_driver.launch.dial.dialler import Dialler
from elastic_driver.launch.dial.local import LocalDialler
from elastic_driver.launch.dial.ssh import SshDialler
from elastic_driver.launch.fleet.addresses import LOOPBACK, Addresses
from elastic_driver.launch.fleet.admission import Admission, WelcomeFacts
from elastic_driver.launch.fleet.dialling import AgentReach
from elastic_driver.launch.fleet.fleet import Fleet
from elastic_driver.launch.fleet.kept import NOTHING, Keeper
from elastic_driver.launch.fleet.link import AgentFacts
from elastic_driver.launch.fleet.network_check import NetworkCheck
from elastic_driver.launch.fleet.stdin import StandardInput
from elastic_driver.launch.fleet.tickets import Tickets
from elastic_driver.launch.local.locality import addresses_of, is_local_host
from elastic_driver.launch.words import OutputSink
from elastic_driver.rendezvous.credentials import KEY_BYTES, join_key
from elastic_driver.rendezvous.server.own_certificate import OwnCertificate
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.settings.machines import NO_LAUNCHER, node_environment, remote_environment
from elastic_driver.settings.pods import AUTO_NAMES, DNS, HOSTNAME, KUBERNETES, POD
from elastic_driver.settings.settings import Settings
from elastic_driver.system.interfaces import choose_address, host_addresses, listening_addresses
from elastic_driver.system.job_clock import JobClock
from elastic_driver.system.leash import Leash
from elastic_driver.system.process_name import name_of_this_process, place_of_sockets
from elastic_driver.system.tasks import Tasks
from elastic_driver.words import OnChange


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What a driver knows of a job of nodes in addition to its settings.

    Attributes:
        token: the secret with which they authenticate; "" if all are on this machine, whose kernel identifies their
            user.
        only_here: whether all of them are on this machine.
        alike: the options that must be the same on all nodes.
        invitation: how to start them, in words.
        torchrun: the job as its workers see it.
        listener: a socket that listens on loopback, on the port where the nodes meet.
        host: the name of this node, which has an agent of its own like any other; "" for a driver that is not a node.
        node_rank: its rank among the nodes; -1 to choose one.
        address: the address at which the others reach it; "" to find it.
        leash: held by the node beside which this driver runs, which shows the workers' output and gets the signals;
            None for a driver without one.
    """

    token: str = field(repr=False)
    only_here: bool
    alike: Mapping[str, str]
    invitation: str
    torchrun: TorchrunJob
    listener: socket.socket | None = None
    host: str = ""
    node_rank: int = -1
    address: str = ""
    leash: Leash | None = None

    @property
    def port_here(self) -> int:
        """The port where nodes meet that are all on this machine; 0 if they may be elsewhere."""
        return self.listener.getsockname()[1] if self.only_here and self.listener is not None else 0


def _abroad(settings: Settings, env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a worker that are sent to other machines."""
    kept = {VISIBLE_DEVICES: env[VISIBLE_DEVICES]} if settings.virtual_local_rank else {}
    # The values of -x are among a worker's variables already, with lower precedence than those of flags and the driver.
    return {**settings.passed_env, **remote_environment(env), **kept}


def agents_of(
    recorded: Recording,
    clock: JobClock,
    outputs: OutputSink,
    chronicle: Chronicle,
    heard_s: float,
    local: LocalDialler,
    node_job: NodeJob | None,
    on_change: OnChange,
    stdin: StandardInput,
    bars: str,
) -> AgentSide:
    """Create the parts that start agents and serve them. To be called on the event loop's thread, before it runs."""
    job, settings, journal = recorded.job, recorded.job.settings, recorded.journal
    facts = Facts() if recorded.before is None else recorded.before.facts
    keeper: Keeper[Any] = journal or NOTHING
    token = job.join_token if node_job is None else node_job.token
    # Without a token, nobody knows the key: nodes of this machine use the socket, which needs none.
    key = join_key(token) if token else secrets.token_bytes(KEY_BYTES)
    tickets = Tickets(clock, join_key=key if settings.accept_agents else None, keeper=keeper)
    tickets.take_over(facts.agents.values(), facts.tickets.values())
    certificate = OwnCertificate(facts.ways.certificate)
    tasks = Tasks()
    ways = DriverAddresses(
        settings.rendezvous_address,
        addresses=lambda: listening_addresses(host_addresses(), words=settings.network_interfaces),
        certificate=certificate,
        # Agents of a lost driver find the next one through etcd.
        ports=settings.driver_ports if node_job is None or node_job.leash is None else (*settings.driver_ports, 0),
        listener=None if node_job is None else node_job.listener,
        opens=node_job is not None or settings.opens_port,
        # If the driver may move to another machine, all its agents connect over TCP.
        is_wide=recorded.lock is not None or (settings.accept_agents and (node_job is None or not node_job.only_here)),
        # If etcd names the driver, the next one need not be at the same address: the last one may just be stopped.
        before=None if recorded.lock is not None else facts.ways,
        limit_s=settings.driver_timeout_s,
        folder=settings.journal_folder,
        keeper=keeper,
        say=chronicle.warning,
    )
    remote = _remote_dialler(settings)
    is_local = _is_this_pod if pod_names(settings) in (POD, HOSTNAME) else is_local_host
    if recorded.lock is not None:
        if remote is not None:
            remote = AnywhereDialler(local, remote, is_here=is_local, is_ambiguous=is_loopback)
        is_local = _never
    check: NetworkCheck | None = None
    if settings.check_network:
        check = NetworkCheck(settings.port_range, tasks, keeper=keeper, admitted=facts.admitted)
    # A chief that outlives its driver is started by this machine's agent, as if it had a host of its own here.
    more = (CHIEF,) if settings.num_parameter_servers and settings.has_journal else ()
    fleet = Fleet(
        tickets=tickets,
        reach=AgentReach(
            ways.to,
            agent_timeout_s=settings.agent_timeout_s,
            host_timeout_s=settings.host_timeout_s,
            fingerprint=certificate.make,
            job=_name_of_job(recorded),
            owner=name_of_this_process(),
            host="" if node_job is None else node_job.host,
            node_rank=-1 if node_job is None else node_job.node_rank,
            more=more,
        ),
        local=local,
        remote=remote,
        is_local=lambda name: name in more or is_local(name),
        addresses_of=addresses_of,
        address=_addresses_of(settings, node_job),
        tasks=tasks,
        check=check,
        keeper=keeper,
        clock=clock,
    )
    fleet.take_over(facts.revoked.values(), facts.leavers.values())

    def variables(facts: AgentFacts, env: Mapping[str, str]) -> dict[str, str]:
        if node_job is None:
            return dict(env) if facts.local else _abroad(settings, env)
        return node_environment(job.environment, env) if facts.local else dict(env)

    welcome_facts = WelcomeFacts(
        job_id=job.job_id,
        poll_s=heard_s,
        cwd=job.directory,
        umask=job.umask,
        # TensorFlow has threads once it is imported: processes forked from it would hang.
        warm=settings.warm_starts and not settings.num_parameter_servers,
        # They will be restarted again and again, and mostly several on a host.
        warm_first=starts_again(settings) and on_change.restarts,
        preload=settings.preload,
        prefix_timestamp=settings.prefix_timestamp,
        agent_timeout_s=settings.agent_timeout_s,
        alike=None if node_job is None else node_job.alike,
        spot_notices=settings.spot_notices or "",
        epoch=0 if journal is None else journal.epoch,
        driver=secrets.token_hex(16) if journal is None else journal.driver,
        driver_timeout_s=0.0 if journal is None else settings.driver_timeout_s,
        place=place_of_sockets(),
        etcd=None if recorded.lock is None else recorded.lock.place.of_agents(),
        etcd_cluster="" if recorded.lock is None else recorded.lock.cluster_id,
        bars=bars,
    )
    return AgentSide(
        tickets,
        Admission(tickets, welcome_facts, fleet, keeper),
        fleet,
        Addresses(fleet, chronicle.warning),
        variables,
        outputs,
        stdin,
        ways,
        tasks,
        token,
        meets_at=0 if node_job is None else node_job.port_here,
        invitation="" if node_job is None else node_job.invitation,
    )


def _addresses_of(settings: Settings, node_job: NodeJob | None) -> Callable[[AgentFacts, str], str]:
    """Return a function from a host's agent, and its address by route, to its workers' listening address."""

    def address(facts: AgentFacts, route: str) -> str:
        if node_job is not None and node_job.only_here:
            return LOOPBACK
        if node_job is not None and facts.local:
            route = node_job.address or route
        return choose_address(facts.hello.addresses, route=route, words=settings.network_interfaces, host=facts.host)

    return address


def _never(name: str) -> bool:
    """Return False: with a driver that may move, no name means this machine."""
    return False


def _is_this_pod(name: str) -> bool:
    """Return whether a pod's name is that of the driver's own pod. Name servers do not know it."""
    return name.lower() == socket.gethostname().lower()


def _remote_dialler(settings: Settings) -> Dialler | None:
    """Return what starts agents on other machines; None if they connect by themselves."""
    if settings.launcher == NO_LAUNCHER:
        return None
    python = settings.remote_python or ""
    bootstrap_on = cast("BootstrapOn | None", settings.launcher_bootstrap)
    if settings.rsh_agent is not None:
        return RshDialler(shlex.join(settings.rsh_agent), python=python, bootstrap_on=bootstrap_on)
    if settings.launcher_command is not None:
        return CommandDialler(settings.launcher_command, python=python, bootstrap_on=bootstrap_on or "stdin")
    return SshDialler(
        port=settings.ssh_port,
        logins=settings.logins,
        identity_file=settings.ssh_identity_file or "",
        connect_timeout_s=settings.ssh_connect_timeout_s,
        python=python,
    )


def _name_of_job(recorded: Recording) -> str:
    """Return the name that identifies this job and its predecessor on each host, if its driver is restarted.

    A journal belongs to one job: waiting agents of another job were not left by its driver.
    """
    settings = recorded.job.settings
    durable = str(settings.durable_dir or "")
    # etcd's servers may have other names the next time.
    journal = [] if recorded.lock is None else ["", recorded.lock.place.prefix]
    if settings.journal_folder is not None:
        journal = ["", os.path.abspath(settings.journal_folder)]
    return sha256(os.fsencode("\0".join((os.getcwd(), durable, *settings.command, *journal)))).hexdigest()[:32]


def pod_names(settings: Settings) -> str:
    """Return which of a pod's names is its host's; "" if hosts are not pods."""
    if settings.discovery != KUBERNETES:
        return ""
    if settings.pod_names != AUTO_NAMES:
        return settings.pod_names
    if settings.launcher == NO_LAUNCHER:
        return HOSTNAME  # the name under which elasticrun join has its host join
    return DNS if settings.rsh_agent is None and settings.launcher_command is None else POD
