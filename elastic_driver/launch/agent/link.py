"""The agent's end of its connection to the driver: one connection after another, for as long as its lease lasts.

Owns dialling in, the lease, and the verdict that the driver is gone. What the messages mean is its owner's business.
Used on the event loop only.

A driver is alive as long as its kernel acknowledges: the agent waits for a stopped driver, however long. When nothing
has been acknowledged for ``agent_timeout_s``, on the old connection or on a new one, it is gone; the driver knows that
limit, and continues without this host only later. If another driver may take over, the lease is extended for as long as
the driver's machine reports that no driver runs (:mod:`~elastic_driver.launch.agent.lease`), or etcd does, if it
records the driver (:mod:`~elastic_driver.launch.agent.driver_locator`). A driver that still sends, but cannot be sure
that it still has the job, is obeyed for as long as the agent would wait for another one.

Each driver of a job has a higher epoch than those before it. The agent obeys the highest that has welcomed it, and no
other; each driver has a channel of its own.

TCP retransmits lost data ever less often, so a connection would stay unusable for as long again as the network was
down. The agent therefore dials further connections beside a silent one, again and again, and uses the first that works.
It does so when only one direction is silent, too: then what the agent sends is acknowledged, but nothing arrives from
the driver, whose TCP retransmits at its own pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, NamedTuple, Protocol

from elastic_driver.errors import (
    ElasticError,
    NoTlsError,
    OtherCertificateError,
    RejectedError,
    RendezvousProtocolError,
    UnverifiedDriverError,
    WrongTokenError,
    in_words,
)
from elastic_driver.launch.agent import machine
from elastic_driver.launch.agent.dial_in import AuthenticatedConnection, dial_in
from elastic_driver.launch.agent.driver_locator import DriverLocator
from elastic_driver.launch.agent.lease import STUCK_S, Lease
from elastic_driver.launch.agent.pauses import ASK_AGAIN_S, PausesBeside, ask_again_after_s
from elastic_driver.launch.agent.refusals import refuses
from elastic_driver.rendezvous.agent_messages import (
    PROTOCOL,
    AgentMessage,
    Bootstrap,
    Hello,
    InDoubt,
    Refused,
    Welcome,
    decoded,
)
from elastic_driver.rendezvous.channel import Channel, FrameConnection
from elastic_driver.rendezvous.credentials import KEY_BYTES, Credential, Identity, Role
from elastic_driver.rendezvous.frames import Frame, Message
from elastic_driver.system.local_socket import path_of
from elastic_driver.system.process_name import boot_id, name_of_this_process, place_of_sockets
from elastic_driver.version import __version__

if TYPE_CHECKING:
    from elastic_driver.etcd.driver_record import RegisteredDriver

_LOOK_S = 0.5
# A check this much later than due means that this process was stopped.
_LATE_S = 0.5
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
# While another driver is about to take the job over, within two seconds.
_MAX_PAUSE_ALONE_S = 0.25
# Limit of one try, from connect to welcome. Longer than a busy driver takes, and no longer than a lease.
_TRY_S = 10.0
# A driver that is only just starting may not listen yet.
_LEAST_FIRST_S = 10.0
# A peer that does not recognize this agent will not do so later; but an earlier program may still hold the port.
_STRANGER_S = 2.0
# Three heartbeats: from then on another connection is dialled at each check of a silent one.
_BESIDE_S = 1.5
# Limit of one of these, until it carries frames: no longer than a healthy network takes.
_TRY_BESIDE_S = 3.0
_EARLIER = "an earlier driver of the job answered (epoch {}; this agent knows epoch {})"


class DriverLostError(ElasticError):
    """The driver has not been heard from for too long, or never."""


class RefusedError(ElasticError):
    """The driver rejects this agent, now or for good.

    Args:
        why: the driver's reason.
        is_over: whether the reason is that the job is over.
    """

    def __init__(self, why: str, *, is_over: bool = False) -> None:
        super().__init__(why)
        self.is_over = is_over


class PeerMismatchError(RefusedError):
    """The peer is not the driver, or has another token than this agent; the message says what to do."""


class LinkOwner(Protocol):
    """Receives the events of the link. Called on the event loop."""

    def not_welcomed_yet(self, why: str, left_s: float) -> None:
        """Called when the first try to reach the driver has failed; tries continue for left_s seconds."""

    def welcomed(self, welcome: Welcome) -> None:
        """Called once when the driver has admitted this agent, before its first message."""

    def take(self, message: AgentMessage) -> None:
        """Called with each message of the driver. May raise RendezvousProtocolError, which closes the connection."""

    def seen(self) -> None:
        """Called when the driver has acknowledged or persisted some of what was sent."""

    def alone(self) -> None:
        """Called when the connection to the driver is lost, and another driver may take over."""

    def cannot_ask(self, why: str) -> None:
        """Called once per driver if, as far as this host can see, nothing records which driver has the job."""

    def taken_over(self, welcome: Welcome, untold: Sequence[AgentMessage], alone_s: float) -> None:
        """Called when another driver has the job, and has admitted this agent, before its first message.

        Args:
            welcome: its welcome.
            untold: the messages that the previous driver has not persisted, in order.
            alone_s: how long the previous driver had not been heard from, seconds.
        """

    def failed(self, error: BaseException) -> None:
        """Called when an internal error has occurred while a message of the driver was handled."""


class Driver(NamedTuple):
    """Identifies a driver of the job.

    Attributes:
        epoch: higher than those of the drivers before it; 0 for one without a journal.
        name: distinguishes it from others with the same epoch, which a copied journal can cause; "" if not known.
    """

    epoch: int
    name: str

    def may_follow(self, known: Driver) -> bool:
        """Return whether an agent that knows the other driver may obey this one."""
        return self.epoch > known.epoch or (self.epoch == known.epoch and known.name in ("", self.name))


class _Silence(NamedTuple):
    """How long a connection has been silent.

    Attributes:
        unheard_s: since the driver's machine last acknowledged anything, seconds.
        silent_s: since the driver last sent anything, seconds.
    """

    unheard_s: float
    silent_s: float

    @property
    def is_long(self) -> bool:
        """Whether to dial another: also if the driver's kernel acknowledges but nothing arrives."""
        return self.unheard_s > _BESIDE_S or self.silent_s > STUCK_S


class _Line:
    """One connection to the driver.

    Attributes:
        url: where it leads.
        met: the connection itself; set before anything is sent on it.
        broken: resolves to the reason why it is no longer used.
    """

    met: AuthenticatedConnection

    def __init__(self, url: str) -> None:
        self.url = url
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class DriverLink:
    """Keeps this agent connected to the driver, and decides when that is gone.

    Args:
        bootstrap: what this agent was given.
        owner: receives the events of the link.

    Attributes:
        agent: this agent's number, in hexadecimal digits.
        channel: carries the messages; a new one for each driver.
        driver: the driver that has welcomed this agent last.
        known: by job, the driver that other agents of this machine obey. To be set before the first hello.
    """

    def __init__(self, bootstrap: Bootstrap, owner: LinkOwner) -> None:
        self._loop = asyncio.get_running_loop()
        self.agent = secrets.token_hex(16)
        self.channel = Channel(self._take, on_seen=owner.seen)
        self.driver = Driver(0, "")
        self.known: Mapping[str, Driver] = {}
        self._bootstrap = bootstrap
        self._owner = owner
        self._first_credential = Credential(
            Identity.parse(bootstrap.identity), bytes.fromhex(bootstrap.key), bootstrap.source
        )
        # Used to reconnect. The driver learns it from the first hello; repeating it proves that the ticket was not
        # stolen.
        self._own_credential = Credential(Identity(Role.AGENT, number=self.agent), secrets.token_bytes(KEY_BYTES))
        self._fingerprint = bootstrap.fingerprint
        self._urls = list(bootstrap.urls)
        self._is_welcomed = False  # whether any driver has welcomed it yet
        self._line: _Line | None = None  # the current one, welcomed or waiting for its welcome
        self._older: _Line | None = None  # its predecessor
        self._door = self._urls[0], ""  # where to find the driver: its URL, and the address that has welcomed last
        self._door_tells = False  # whether the driver's own machine answers there
        self._next: _Line | None = None  # a working one, to use instead of a silent one
        self._answered: asyncio.Future[None] | None = None
        # Asks which driver has the job, if that is recorded; ended by keep(), or when the record moves.
        self._following: asyncio.Task[None] | None = None
        self._is_in_doubt = False  # whether the driver doubts that it still has the job
        self._successor = Driver(0, "")  # the driver that has the job now, according to the record
        self._trying: asyncio.Timeout | None = None  # the try in progress
        self._lease = Lease(bootstrap.agent_timeout_s, clock=self._loop.time)
        self._pauses_beside = PausesBeside(STUCK_S)

    @property
    def connected(self) -> bool:
        """Whether the driver can be reached now."""
        return self.channel.connected

    @property
    def is_alone(self) -> bool:
        """Whether there is no connection, and another driver may take over."""
        return self._lease.waits and not self.channel.connected

    @property
    def alone_s(self) -> float:
        """How long the driver has not been heard from, seconds; 0 while there is a connection."""
        return 0.0 if self.connected else max(0.0, self._lease.unheard_s)

    def send(self, message: AgentMessage) -> None:
        """Send a message to the driver, now or once there is a connection again. Never blocks."""
        self.channel.send(message.message(), lasts=message.lasts)

    async def keep(self) -> None:
        """Dial in, and again whenever the connection breaks. Runs until it is canceled.

        Raises:
            RefusedError: the driver has rejected this agent.
            DriverLostError: it is gone.
        """
        until = self._loop.time() + (self._bootstrap.first_s or max(self._lease.timeout_s, _LEAST_FIRST_S))
        line = await self._dial(lambda: until - self._loop.time())
        try:
            while True:
                line = await self._keep_one(line)
        finally:
            self._follow_at(None)

    async def _keep_one(self, line: _Line) -> _Line:
        """Wait until that connection breaks, and return the one that replaces it. Blocks until then."""
        looking = self._loop.create_task(self._look(line))
        try:
            why = await line.broken
        finally:
            looking.cancel()
        older = self._older = line
        tells = self._lease.waits and self._door_tells
        asking = self._loop.create_task(self._ask_whether_it_is_gone()) if tells else None
        try:
            return await self._dial(lambda: self._lease.left_s, f"the connection was lost: {why}")
        finally:
            if asking is not None:
                asking.cancel()
            # Only now: the driver would wait no more than a second for an agent whose connection is closed.
            older.met.connection.abort("replaced by a new connection")
            self._older = None

    def close(self) -> None:
        """Close the connection once everything has been sent."""
        self.channel.flush()
        self.channel.detach()
        line, self._line = self._line, None
        if line is not None:
            line.met.connection.finish("the agent is exiting")
        if self._next is not None:
            self._next.met.connection.abort("the agent is exiting")

    # --- dialling --------------------------------------------------------------------------------------------------

    async def _ask_whether_it_is_gone(self) -> None:
        """Renew the lease as long as the driver's machine reports that no driver runs. Runs until it is canceled.

        Separate from the dialling, which also tries the other URLs and may take longer than a lease.
        """
        pause_s = ASK_AGAIN_S
        while True:
            asked_at = self._lease.now()
            is_refused = await refuses(*self._door)
            if is_refused:
                self._lease.refused(asked_at)
            pause_s = ask_again_after_s(pause_s, self._lease.timeout_s, is_refused=is_refused)
            await asyncio.sleep(pause_s)

    def _follow_at(self, driver_locator: DriverLocator | None) -> None:
        """Ask there from now on which driver has the job; nowhere if None."""
        if self._following is not None:
            self._following.cancel()
        self._following = None if driver_locator is None else self._loop.create_task(self._follow(driver_locator))

    async def _follow(self, driver_locator: DriverLocator) -> None:
        """Ask which driver has the job whenever the driver is silent or in doubt itself. Runs until it is canceled.

        Asks once while all is well, too, so that an agent that cannot ask is warned before it matters.
        """
        is_first = True
        while True:
            is_well = self.channel.connected and not self._lease.is_in_doubt
            if is_first or not is_well:
                asked_at = self._lease.now()
                try:
                    self._told_of(await driver_locator.ask(again=not is_well), asked_at)
                except Exception as error:  # whatever prevents an answer, it asks again
                    if is_first:
                        self._owner.cannot_ask(in_words(error))
                is_first = False
            await asyncio.sleep(ASK_AGAIN_S)

    def _told_of(self, there: RegisteredDriver | None, asked_at: float) -> None:
        """Act on which driver had the job when that was asked; None for no driver."""
        if there is None:
            self._lease.refused(asked_at)
            return
        driver = Driver(there.epoch, there.name)
        if driver in (self.driver, self._successor) or not there.urls or not driver.may_follow(self.driver):
            return
        self._successor = driver
        self._urls = list(dict.fromkeys((*there.urls, *self._urls)))
        if self._trying is not None:
            # The previous driver's machine may take long to answer.
            with contextlib.suppress(RuntimeError):  # its time is over
                self._trying.reschedule(self._loop.time())

    @property
    def _has_successor(self) -> bool:
        """Whether another driver is known to have the job."""
        return self._successor.epoch > self.driver.epoch

    async def _dial(self, time_left_s: Callable[[], float], why: str = "") -> _Line:
        """Dial until the driver has welcomed this agent, and return the connection. Blocks until then.

        Args:
            time_left_s: returns the seconds left until dialling is given up.
            why: the reason for dialling, reported if there is no time left to try.
        """
        pause_s, strange_since = _FIRST_PAUSE_S, None
        first, has_failed = not self._is_welcomed, False
        while time_left_s() > 0:
            strange: PeerMismatchError | None = None
            only_strangers = True
            urls = self._urls
            for url in tuple(urls):
                if (left_s := time_left_s()) <= 0 or urls is not self._urls:
                    break  # the URLs before used up the time; or the URLs have changed
                try:
                    # While another driver is about to take over, URLs that have never answered get only a short try.
                    is_shy = self._lease.waits and url != self._door[0]
                    async with asyncio.timeout(min(_TRY_BESIDE_S if is_shy else _TRY_S, max(left_s, 0.1))) as trying:
                        self._trying = trying
                        line = await self._try(url)
                except WrongTokenError as error:
                    raise self._shut_out(url, error) from error
                except UnverifiedDriverError as error:
                    strange = self._shut_out(url, error)
                    why = f"{url}: {error}"
                except (OSError, RendezvousProtocolError) as error:  # includes TimeoutError
                    only_strangers = False
                    why = f"{url}: {in_words(error)}"
                else:
                    # The other URLs may be on networks that this machine cannot reach.
                    self._urls.sort(key=lambda each: each != url)
                    return line
                finally:
                    self._trying = None
            now, left_s = self._loop.time(), time_left_s()
            if first and not has_failed and not only_strangers and left_s > 0:
                has_failed = True
                self._owner.not_welcomed_yet(why, left_s)
            strange_since = None if not only_strangers else strange_since or now
            if strange is not None and strange_since is not None and now - strange_since > _STRANGER_S:
                if first:
                    raise strange
                if await _is_another_jobs(self._bootstrap, self._urls, self._first_credential):
                    raise RefusedError("the driver there was started later and does not know this agent")
            await asyncio.sleep(min(pause_s, max(0.0, left_s)))
            pause_s = min(2 * pause_s, _MAX_PAUSE_ALONE_S if self._lease.waits else _MAX_PAUSE_S)
        if not first and strange_since is not None:
            raise DriverLostError("the driver is gone: another process now answers at its address")
        if not first and self._lease.is_waited_out:
            why = f"no other driver has taken over within {self._lease.driver_timeout_s:.0f} s ({why})"
        is_asked = first and self._bootstrap.slots and not self._bootstrap.alike
        question = "; check that this is its URL and that it is running" if is_asked else ""
        raise DriverLostError(f"cannot reach the driver: {why}{question}")

    def _shut_out(self, url: str, error: UnverifiedDriverError | WrongTokenError) -> PeerMismatchError:
        """Return an error that says why this agent was rejected, and what to do about it."""
        if not self._bootstrap.slots:
            return PeerMismatchError(f"cannot reach the driver at {url}: {error}")
        advice = _advice(error, is_node=bool(self._bootstrap.alike))
        return PeerMismatchError(f"cannot join the job at {url}: {error}{advice}")

    async def _try(self, url: str) -> _Line:
        line, self._next = self._next, None
        answered = self._answered = self._loop.create_future()
        try:
            line = self._line = line or await self._connect(url)
            if line.broken.done():
                raise ConnectionResetError(line.broken.result())
            connection = line.met.connection
            connection.write(0, 0, 0, [self._hello(connection).message().pack()])
            await answered
        except BaseException:
            is_late = self._trying is not None and self._trying.expired()
            if line is not None and self._line is line and is_late and _has_result(answered):
                return line  # the welcome arrived at the last moment, and the driver counts on this connection
            self._line = None
            if line is not None:
                line.met.connection.abort("the connection is being retried")
            raise
        finally:
            self._answered = None
        return line

    async def _connect(self, url: str) -> _Line:
        """Return a connection on which nothing has been sent yet."""
        line = _Line(url)
        line.met = await dial_in(
            url,
            self._own_credential if self._is_welcomed else self._first_credential,
            fingerprint=self._fingerprint,
            on_frame=lambda frame: self._on_frame(line, frame),
            on_lost=lambda why: self._lost(line, why),
        )
        return line

    def _hello(self, connection: FrameConnection) -> Hello:
        bootstrap = self._bootstrap
        return Hello(
            agent=self.agent,
            protocol=PROTOCOL,
            version=__version__,
            resumes=self._is_welcomed,
            seen=self.channel.seen,
            key="" if self._is_welcomed else self._own_credential.key.hex(),
            host=bootstrap.host,
            slots=bootstrap.slots,
            machine=machine.machine_name(),
            boot_id=boot_id(),
            cores=machine.cores(),
            python=machine.python(),
            pid=machine.pid(),
            owner=name_of_this_process(),
            address=bootstrap.address or connection.ends[1],
            addresses=machine.addresses(),
            labels=" ".join(bootstrap.labels),
            node_rank=bootstrap.node_rank,
            alike=bootstrap.alike,
            epoch=self.driver.epoch,
            driver=self.driver.name,
        )

    # --- on the connection -----------------------------------------------------------------------------------------

    def _on_frame(self, line: _Line, frame: Frame) -> None:
        try:
            self._received(line, frame)
        except RendezvousProtocolError:
            raise
        except Exception as error:  # what the message ordered is not done, and the driver does not send it again
            self._owner.failed(error)

    def _received(self, line: _Line, frame: Frame) -> None:
        if line is not self._line:
            return  # a late frame of an older connection: it is sent again on the new one
        if self._answered is None or self._answered.done():
            self._hear(line)
            self.channel.received(frame)
            return
        answer = decoded(frame.messages[0]) if len(frame.messages) == 1 and frame.first == 0 else None
        match answer:
            case Welcome():
                self._welcomed(line, answer)
                self._answered.set_result(None)
            case Refused(why, is_over, epoch):
                if epoch < self.driver.epoch:
                    raise RendezvousProtocolError(_EARLIER.format(epoch, self.driver.epoch))
                self._answered.set_exception(RefusedError(why, is_over=is_over))
            case _:
                raise RendezvousProtocolError("cannot read frame: the driver must answer welcome or refused")

    def _welcomed(self, line: _Line, welcome: Welcome) -> None:
        """Begin to obey the driver that has sent this welcome.

        Raises:
            RendezvousProtocolError: this agent may not obey it.
        """
        met, driver = line.met, Driver(welcome.epoch, welcome.driver)
        known = self.driver if self._is_welcomed else self.known.get(welcome.job_id, self.driver)
        if not driver.may_follow(known):
            raise RendezvousProtocolError(_EARLIER.format(driver.epoch, known.epoch))
        is_first = not self._is_welcomed
        is_another = not is_first and driver != self.driver
        # Pin the certificate of the driver once authenticated: a token's thief can no longer pose as the driver.
        self._fingerprint = self._fingerprint or met.fingerprint
        self._is_welcomed, self.driver = True, driver
        self._door = line.url, met.connection.ends[0]
        alone_s = self.alone_s
        # A loopback address of a driver on another machine is a tunnel, whose end says nothing about the driver.
        is_ours = path_of(line.url) is None and ip_address(self._door[1].partition("%")[0]).is_loopback
        self._door_tells = welcome.etcd is None and (not is_ours or welcome.place == place_of_sockets())
        if is_first or is_another:
            self._lease.begin(welcome.agent_timeout_s, welcome.driver_timeout_s)
            self._is_in_doubt = False
            # A later driver may have other servers, or other credentials.
            self._follow_at(None if welcome.etcd is None else DriverLocator(welcome.etcd, welcome.etcd_cluster))
        self._hear(line)
        if is_first:
            self._owner.welcomed(welcome)
        elif is_another:
            self._begin_anew(welcome, alone_s)
        seen, kept = (0, 0) if is_another else (welcome.seen, welcome.kept)
        self.channel.attach(met.connection, seen, kept)

    def _begin_anew(self, welcome: Welcome, alone_s: float) -> None:
        """Switch to another driver, which has taken the job over."""
        if self._older is not None:
            # Before the new driver's messages: the previous driver may be alive, and must not be obeyed any longer.
            self._older.met.connection.abort("another driver has the job")
        untold = [decoded(message) for message in self.channel.unkept()]
        self.channel = Channel(self._take, on_seen=self._owner.seen)
        self._owner.taken_over(welcome, untold, alone_s)

    def _take(self, message: Message) -> None:
        match decoded(message):
            case InDoubt(is_so):
                self._is_in_doubt = is_so
                if is_so:
                    self._lease.doubts(0.0, says_so=True)
                else:
                    self._lease.sure()
            case other:
                self._owner.take(other)

    def _lost(self, line: _Line, why: str) -> None:
        if line.broken.done():
            return
        line.broken.set_result(why)
        if line is not self._line:
            return
        was_connected = self.channel.connected
        self.channel.detach()
        self._line = None
        if was_connected and self._lease.waits:
            self._owner.alone()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(ConnectionResetError(why))

    # --- while it is silent ----------------------------------------------------------------------------------------

    def _hear(self, line: _Line) -> _Silence:
        """Return how long the driver has been silent on this connection, and record it in the lease."""
        connection = line.met.connection
        silence = _Silence(connection.unheard_s, self._loop.time() - connection.heard_at)
        self._lease.heard(silence.unheard_s)
        if self._following is not None:
            self._lease.doubts(silence.silent_s, says_so=self._is_in_doubt)
        return silence

    async def _look(self, line: _Line) -> None:
        """Abandon a connection on which nothing is acknowledged; before that, dial others beside it."""
        tries: deque[asyncio.Task[None]] = deque()
        late = 0  # how many checks in a row were late

        def end_tries() -> None:
            while tries:
                tries.pop().cancel()

        try:
            while line is self._line:
                silence = self._hear(line)
                if silence.unheard_s > self._lease.timeout_s:
                    line.met.connection.abort(f"nothing was acknowledged for {silence.unheard_s:.0f} s")
                elif self._lease.left_s <= 0:
                    line.met.connection.abort("the driver may have lost the job to another driver")
                elif silence.is_long or self._has_successor:
                    while tries and tries[0].done():
                        tries.popleft()
                    # A process that was stopped has not yet read what arrived meanwhile; a busy one is late repeatedly.
                    is_sure = late != 1 or self._has_successor
                    if is_sure and (silence.unheard_s > _BESIDE_S or (not tries and self._may_dial_beside())):
                        tries.append(self._loop.create_task(self._try_beside(line)))
                else:
                    end_tries()
                due = self._loop.time() + _LOOK_S
                await asyncio.sleep(_LOOK_S)
                late = late + 1 if self._loop.time() - due > _LATE_S else 0
        finally:
            end_tries()

    def _may_dial_beside(self) -> bool:
        """Return whether to dial another now although the driver's kernel acknowledges what is sent on this one."""
        return self._has_successor or self._pauses_beside.is_over(self._loop.time())

    async def _try_beside(self, silent: _Line) -> None:
        """Dial another connection, and switch to it if this one is still silent then, or an earlier driver's."""
        line, url = None, self._urls[0]
        with contextlib.suppress(OSError, ElasticError):  # includes TimeoutError
            async with asyncio.timeout(_TRY_BESIDE_S):
                line = await self._connect(url)
        if line is None:
            if self._has_successor and self._urls[0] == url:
                self._urls.append(self._urls.pop(0))
            return
        is_silent = self._hear(silent).is_long
        if silent is not self._line or not (is_silent or self._has_successor):
            line.met.connection.abort("the first connection works again")
            return
        self._next = line
        self._lost(silent, "it was silent, and another connection works" if is_silent else "another driver has the job")


async def _is_another_jobs(bootstrap: Bootstrap, urls: Sequence[str], credential: Credential) -> bool:
    """Return whether a driver answers that has the job's secret but does not recognize this agent.

    Only a joiner can know, since it has a secret that drivers share. It then need not wait for its lease to end before
    it joins the driver that a cluster has restarted at the same address. A node has to find out which driver has the
    job.
    """
    if bootstrap.identity != Role.JOINER or bootstrap.alike:
        return False
    for url in urls:
        with contextlib.suppress(OSError, ElasticError):  # includes TimeoutError
            async with asyncio.timeout(_TRY_BESIDE_S):
                met = await dial_in(url, credential, on_frame=lambda _: None, on_lost=lambda _: None)
            met.connection.abort("it was only dialled to identify the driver")
            return True
    return False


def _has_result(future: asyncio.Future[None]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _advice(error: UnverifiedDriverError | WrongTokenError, *, is_node: bool) -> str:
    """Return advice for the person who started the agent, to append to the error; "" if the error suffices."""
    match error:
        case RejectedError():
            return ""
        case WrongTokenError() if is_node:
            return "; give all nodes the same join token"
        case WrongTokenError():
            return "; elasticrun jobs --write-join-token FILE, on the driver's machine, writes the current one"
        case NoTlsError() if is_node:
            return "; check that the port is the job's"
        case NoTlsError() | OtherCertificateError():
            return "; use the URL that the driver prints"
        case _ if is_node:
            return "; check that all nodes have the same join token and that the port is the job's"
        case _:
            return "; use the URL and the token that this job's driver prints"
