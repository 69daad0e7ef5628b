"""Access to the driver, and the tokens for it: for operators, readers and hosts that join.

Owns whom the driver's server admits, and the route by which an operator gets a token.
:mod:`elastic_driver.rendezvous.credentials` and :mod:`elastic_driver.launch.fleet.tickets` define what a token permits.
"""

from __future__ import annotations

from elastic_driver.driver.agents import AgentSide
from elastic_driver.errors import RendezvousProtocolError, SettingsError
from elastic_driver.rendezvous.credentials import Identity, JobKey, Role
from elastic_driver.rendezvous.driver_url import DriverUrl
from elastic_driver.rendezvous.messages import TokenReply
from elastic_driver.rendezvous.routes import OPERATOR, Route, RouteRequest, Routes


class Tokens:
    """The tokens of one job.

    Args:
        key: the key of the job.
        agents: have the join token, the tickets and the addresses.
        has_chief: whether the driver starts one.
    """

    def __init__(self, key: JobKey, agents: AgentSide, *, has_chief: bool) -> None:
        self._key, self._has_chief = key, has_chief
        self._tokens: dict[str, str] = {
            Role.OPERATOR: key.of(Identity(Role.OPERATOR)).hex(),
            Role.READER: key.of(Identity(Role.READER)).hex(),
            Role.JOINER: agents.join_token,
        }
        self._agents = agents

    def key_of(self, identity: Identity) -> bytes | None:
        """Return the key with which an operator or agent authenticates over TLS; None for all others.

        Workers connect to their agents. The chief is on this machine.
        """
        return self._key.of(identity) if identity.role is Role.OPERATOR else self._agents.tickets.key_of(identity)

    def admits(self, identity: Identity) -> bool:
        """Return whether a process of this user may use this identity at the driver's socket."""
        return (self._has_chief and identity.role is Role.CHIEF) or self.key_of(identity) is not None

    @property
    def routes(self) -> Routes:
        """The route by which an operator gets a token."""
        return (Route("POST", "token/*", OPERATOR, self._give),)

    async def _give(self, request: RouteRequest) -> TokenReply:
        token = self._tokens.get(request.path[0])
        if token is None:
            raise RendezvousProtocolError(f"unknown token: expected one of {', '.join(self._tokens)}")
        if not token:
            return TokenReply("", "", only_here=True)  # no hosts may join, so no listening is needed
        ways = self._agents.ways
        try:
            here = await ways.open_loopback()
            if elsewhere := self._agents.urls:
                return TokenReply(token, elsewhere[0], only_here=False)
            if request.path[0] == Role.READER:
                return TokenReply(token, here, only_here=True)  # a scraper on this machine needs no TLS
            url = DriverUrl(f"https://{here.partition('://')[2]}", await ways.certificate.make())
        except SettingsError as error:
            raise RendezvousProtocolError(str(error)) from error
        return TokenReply(token, str(url), only_here=True)
