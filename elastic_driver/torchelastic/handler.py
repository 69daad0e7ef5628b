"""The handler of ``torchrun --rdzv-backend=elastic``: torch's agent asks it for its place, and whether to restart.

Owns the agent's side of ``elasticrun rendezvous``: its number, its heartbeat, the store at which workers rendezvous if
its group rank is 0, and the translation to the interface of torch's agent. Decides nothing about membership.

Two threads: the agent's own, which calls the handler, and the heartbeat (``elastic-beat``), a daemon, which ends with
:meth:`ElasticHandler.shutdown` or the process. Each second it reports that the agent is alive, in a request that is
parked until there is news; so the agent's own poll (``num_nodes_waiting``, each ``--monitor-interval``) costs no
request.
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_driver.errors import (
    RendezvousError,
    RendezvousProtocolError,
    SettingsError,
    UnverifiedDriverError,
    WrongTokenError,
)
from elastic_driver.hosts import is_loopback, with_number
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.node_messages import (
    Formed,
    Member,
    NodeReply,
    NodeRequest,
    Outcome,
    Saying,
    Standing,
    Terms,
)
from elastic_driver.rendezvous.token_file import ENV_TOKEN_FILE
from elastic_driver.torch_private.agents import AGENTS_BARRIER, AGENTS_RANKS, RESTART_COUNT, give_back_a_restart
from elastic_driver.torch_private.groups import c10d
from elastic_driver.torchelastic.generation_store import GenerationStore
from elastic_driver.torchelastic.store import service_client

NAME = "elastic"
"""The value of ``--rdzv-backend``."""

_log = logging.getLogger(__name__)

_PORT = 29400  # torchrun's own default, if its --rdzv-endpoint has none
# A node that misses this many heartbeats is lost ...
_LOST_BEATS = 3.0
# ... and notices its own silence here earlier: then the state of its generation is unknown.
_STALE_BEATS = 2.5
# How long the agent's own thread waits for a heartbeat, once, if there was none for longer than that.
_FRESH_S = 0.5
_JOIN_POLL_S = 5.0
_GOODBYE_S = 1.0
_KEYS = ("grow", "heartbeat", "join_timeout", "last_call_timeout", "patience", "token_file")
# Parameters of torch's c10d rendezvous without a meaning here: commands written for it still work.
_NOT_USED = (
    "close_timeout",
    "heartbeat_timeout",
    "is_host",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
    "store_type",
    "timeout",
)


@dataclass(frozen=True, slots=True)
class HandlerSettings:
    """The settings in torchrun's flags.

    Attributes:
        endpoint: of the service, as a URL (``--rdzv-endpoint``).
        job: ``--rdzv-id``.
        terms: of the job: ``--nnodes`` and ``--rdzv-conf``.
        local_addr: this node's address for other nodes (``--local-addr``); "" to detect it.
        token_file: with the service's token; "" for a service without one.
        join_timeout_s: how long to wait for enough nodes while nothing runs, seconds.
        patience_s: how long the service may be unreachable while the agent asks for a place, seconds.
        heartbeat_s: between heartbeats, seconds.
    """

    endpoint: str
    job: str
    terms: Terms
    local_addr: str = ""
    token_file: str = ""
    join_timeout_s: float = 600.0
    patience_s: float = 300.0
    heartbeat_s: float = 1.0

    @classmethod
    def of(cls, parameters: RendezvousParameters) -> Self:
        """Read the settings from torch's parameters.

        Raises:
            SettingsError: a parameter is invalid.
        """
        given = dict(parameters.config)
        for key in given:
            if key in _NOT_USED:
                _log.info("--rdzv-conf %s is ignored by the backend %s", key, NAME)
            elif key not in _KEYS:
                near = difflib.get_close_matches(key, _KEYS, 1)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(_KEYS)}"
                raise SettingsError(f"cannot use --rdzv-conf {key}: {hint}")
        grow = str(given.get("grow", "restart"))
        if grow not in ("now", "restart"):
            raise SettingsError(f"cannot use --rdzv-conf grow={grow}: expected now or restart")
        heartbeat_s = _seconds(given, "heartbeat", 1.0)
        if heartbeat_s <= 0:
            raise SettingsError("cannot use --rdzv-conf heartbeat=0: it must be above 0 seconds")
        if not parameters.run_id:
            raise SettingsError("cannot join without the job's id: give --rdzv-id")
        return cls(
            endpoint=_endpoint(parameters.endpoint),
            job=parameters.run_id,
            terms=Terms(
                parameters.min_nodes,
                parameters.max_nodes,
                _seconds(given, "last_call_timeout", 1.0),
                grow == "now",
                _LOST_BEATS * heartbeat_s,
            ),
            local_addr=parameters.local_addr or "",
            token_file=str(given.get("token_file", os.environ.get(ENV_TOKEN_FILE, ""))),
            join_timeout_s=_seconds(given, "join_timeout", 600.0),
            patience_s=_seconds(given, "patience", 300.0),
            heartbeat_s=heartbeat_s,
        )


class ElasticHandler(RendezvousHandler):
    """The rendezvous handler of one agent.

    Args:
        settings: from torchrun's flags.

    Raises:
        SettingsError: the token cannot be read, or the endpoint is invalid.
    """

    def __init__(self, settings: HandlerSettings) -> None:
        for feature in (RESTART_COUNT, AGENTS_RANKS, AGENTS_BARRIER):
            feature.has_parts()  # warns of missing parts now, and not only when a node is lost
        self._settings = settings
        try:
            self._client = service_client(
                settings.endpoint, settings.token_file or None, patience_s=settings.patience_s
            )
            self._beats = service_client(settings.endpoint, settings.token_file or None, patience_s=_GOODBYE_S)
        except RendezvousError as error:
            raise SettingsError(f"cannot use --rdzv-endpoint: {error}") from error
        self._node = secrets.token_hex(16)
        self._name = socket.gethostname()
        self._address = settings.local_addr or _own_address(settings.endpoint)
        self._server: c10d.TCPStore | None = None  # at which this agent's workers, and those of others, may rendezvous
        self._state = threading.Condition()  # guards all below; notified when a heartbeat was answered
        self._formed: Formed | None = None
        self._store: GenerationStore | None = None  # of that generation
        self._restart = (0, "")  # number of a generation that has ended, and why
        self._heard_at = time.monotonic()  # when the last answered heartbeat was sent
        self._has_waited = False
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._left = False
        self._told_in = 0  # the last generation in which torch's agent was notified to restart

    # --- what torch's agent calls ------------------------------------------------------------------------------------

    def get_backend(self) -> str:
        """Return the value of ``--rdzv-backend``."""
        return NAME

    def get_run_id(self) -> str:
        """Return the job's id."""
        return self._settings.job

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers use a store in group rank 0's agent, which binds its port before sending it."""
        return True

    def is_closed(self) -> bool:
        """Return False: an ended job may start again under its id."""
        return False

    def set_closed(self) -> None:
        """Do nothing: an agent that leaves must not close the rendezvous for others."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Ask for this node's place. Blocks until it has one.

        Raises:
            RendezvousTimeoutError: there were not enough nodes in time.
            RendezvousConnectionError: the service cannot be reached, or does not accept the token.
            RendezvousStateError: the service rejected the node, since other nodes have other flags.
            SystemExit: with 0: the job has ended while this node was a spare.
        """
        # A new store for each generation: gloo hangs on keys of the previous one.
        before = self._formed
        self._server = c10d.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._start_beating()
        formed, after_loss = self._placed(self._server.port)
        if before is not None and after_loss and self._told_in < before.number and give_back_a_restart():
            _log.info("the loss of another node is not counted against --max-restarts")
        rank = formed.rank_of(self._node)
        assert rank is not None
        first = formed.members[0]
        if rank:
            self._server = None
        store = GenerationStore(
            self._client,
            f"torchrun/{self._settings.job}/{formed.scope}",
            len(formed.members),
            lambda: self._restart[0] >= formed.number,
        )
        with self._state:
            self._store = store
        _log.info(
            "generation %d of job %s: node %d of %d", formed.number, self._settings.job, rank, len(formed.members)
        )
        bootstrap = RendezvousStoreInfo(_address_of(first, formed), first.port)
        return RendezvousInfo(store, rank, len(formed.members), bootstrap)

    def num_nodes_waiting(self) -> int:
        """Return 1 if the agent has to stop its workers and ask for its place again; else 0."""
        with self._state:
            formed = self._formed
            if formed is None:
                return 0
            if self._is_stale() and not self._has_waited and self._restart[0] < formed.number:
                # This process was stopped, or the service cannot be reached. Its last answer may be out of date.
                self._state.wait_for(lambda: not self._is_stale(), _FRESH_S)
                self._has_waited = True
            number, why = self._restart
            if number < formed.number:
                # A single node could continue training while the others, out of its reach, do the same.
                if not (self._is_stale() and len(formed.members) == 1 and self._settings.terms.most > 1):
                    return 0
                why = "the rendezvous cannot be reached, and other nodes may have continued without this one"
        self._told_in = formed.number
        _log.warning("generation %d ends: %s", formed.number, why)
        return 1

    def shutdown(self) -> bool:
        """Leave the job. torch's agent calls this when it ends, but not when a signal ends it."""
        self._leave(Outcome.SUCCEEDED if sys.exc_info()[0] is None else Outcome.FAILED)
        return True

    # --- its place ---------------------------------------------------------------------------------------------------

    def _placed(self, port: int) -> tuple[Formed, bool]:
        """Wait for a place. Returns the generation, and whether nodes of the previous one were lost."""
        member = Member(self._node, self._name, self._address, port)
        forming_since = time.monotonic()
        said = ""
        while True:
            left_s = forming_since + self._settings.join_timeout_s - time.monotonic()
            if left_s <= 0:
                self._leave(Outcome.FAILED)
                raise RendezvousTimeoutError(
                    f"cannot join job {self._settings.job} within {self._settings.join_timeout_s:g} s (--rdzv-conf "
                    f"join_timeout): {said}"
                )
            reply = self._join(member, min(left_s, _JOIN_POLL_S))
            match reply.standing:
                case Standing.PLACED:
                    assert reply.formed is not None
                    with self._state:
                        self._formed = reply.formed
                        self._heard_at = time.monotonic()
                        self._has_waited = False
                    return reply.formed, reply.after_loss
                case Standing.OVER:
                    _log.info("job %s has ended without this node", self._settings.job)
                    self._leave(Outcome.LEFT)
                    sys.exit(0)  # torch has an error for this, but fails on it
                case Standing.SPARE:
                    forming_since = time.monotonic()  # waiting is a spare's purpose
                case _:
                    pass  # it waits for others
            if reply.why != said:
                said = reply.why
                _log.info("job %s: %s", self._settings.job, said)

    def _join(self, member: Member, wait_s: float) -> NodeReply:
        number = 0 if self._formed is None else self._formed.number
        request = NodeRequest(Saying.JOIN, self._settings.job, member, self._settings.terms, number, wait_s=wait_s)
        try:
            answer = self._client.say_node(request.to_json(), wait_s=wait_s)
            return NodeReply.from_json(answer or b"")
        except RendezvousProtocolError as error:
            self._leave(Outcome.FAILED)
            raise RendezvousStateError(str(error)) from error
        except RendezvousError as error:
            self._leave(Outcome.FAILED)
            hint = f"; specify its file with --rdzv-conf token_file=FILE, or {ENV_TOKEN_FILE}"
            has_hint = isinstance(error, UnverifiedDriverError | WrongTokenError) and not self._settings.token_file
            raise RendezvousConnectionError(f"{error} (elasticrun rendezvous){hint if has_hint else ''}") from error

    # --- the heartbeat -----------------------------------------------------------------------------------------------

    def _start_beating(self) -> None:
        if self._thread is None:
            atexit.register(self._leave, Outcome.LEFT)
            # A daemon: it may be waiting for the service while the process ends.
            self._thread = threading.Thread(target=self._beat, name="elastic-beat", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        number, version, start, tells = 0, 0, 0, False
        settings = self._settings
        member = Member(self._node, self._name, self._address, 0)
        while not self._ended.is_set():
            with self._state:
                formed = self._formed
            number, asked = 0 if formed is None else formed.number, number
            if number != asked:
                version = 0  # the last answer was about another generation
            sent_at = time.monotonic()
            request = NodeRequest(
                Saying.BEAT,
                settings.job,
                member,
                settings.terms,
                number,
                formed if tells else None,
                version,
                start,
                settings.heartbeat_s,
            )
            try:
                answer = self._beats.say_node(request.to_json(), wait_s=settings.heartbeat_s)
                reply = None if answer is None else NodeReply.from_json(answer)
            except RendezvousError as error:
                _log.debug("a heartbeat was not answered: %s", error)
                self._ended.wait(settings.heartbeat_s / 4)
                continue
            tells, known_start = False, start
            with self._state:
                store = self._store
                if reply is not None:
                    start = reply.start
                    version = reply.version
                    tells = reply.standing is Standing.UNKNOWN
                    if reply.standing is Standing.RESTART:
                        self._restart = (max(number, self._restart[0]), reply.why)
                self._heard_at = max(self._heard_at, sent_at)
                if not self._is_stale():
                    self._has_waited = False
                self._state.notify_all()
            if start != known_start and store is not None:
                store.look()  # the service was restarted: others may wait there for this agent's writes

    def _is_stale(self) -> bool:
        return time.monotonic() - self._heard_at > _STALE_BEATS * self._settings.heartbeat_s

    def _leave(self, outcome: Outcome) -> None:
        """Leave the job, once. Blocks for at most some seconds."""
        if self._left or self._thread is None:
            return
        self._left = True
        atexit.unregister(self._leave)
        self._ended.set()
        self._beats.close()
        self._client.close()
        self._thread.join()
        request = NodeRequest(
            Saying.LEAVE,
            self._settings.job,
            Member(self._node, self._name, self._address, 0),
            self._settings.terms,
            outcome=outcome,
        )
        settings = self._settings
        with contextlib.suppress(RendezvousError):
            client = service_client(settings.endpoint, settings.token_file or None, patience_s=_GOODBYE_S)
            client.say_node(request.to_json())
            client.close()


def _endpoint(text: str) -> str:
    """Return the service's URL. Raises SettingsError."""
    if not text:
        raise SettingsError("cannot join without the rendezvous' address: give --rdzv-endpoint HOST:PORT")
    url = text if "://" in text else f"https://{text}"
    url, sign, fingerprint = url.partition("#")
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port is None:
            url = f"{parts.scheme}://{with_number(parts.hostname, _PORT)}"
        url += sign + fingerprint
        DriverUrl.parse(url)
    except (ValueError, RendezvousError):
        raise SettingsError(f"cannot use --rdzv-endpoint {text[:200]!r}: expected HOST:PORT") from None
    return url


def _own_address(endpoint: str) -> str:
    """Return this machine's address on its route to the service. Sends nothing."""
    parts = urlsplit(endpoint)
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(parts.hostname, parts.port, 0, socket.SOCK_DGRAM):
            with socket.socket(family, kind, protocol) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                return str(probe.getsockname()[0])
    except OSError as error:
        _log.debug("cannot determine this machine's address: %s", error)
    return socket.gethostname()


def _address_of(first: Member, formed: Formed) -> str:
    """Return the address at which all nodes reach the first node.

    A node on the service's machine may have a loopback address, which other machines cannot use. Then its name is used.
    """
    if not is_loopback(first.address) or all(is_loopback(member.address) for member in formed.members):
        return first.address
    return first.name


def _seconds(given: dict[str, Any], key: str, default: float) -> float:
    try:
        value = float(given.get(key, default))
    except (TypeError, ValueError):
        value = -1.0
    if not 0 <= value <= 1e7:
        raise SettingsError(f"cannot use --rdzv-conf {key}={given[key]}: expected seconds")
    return value
