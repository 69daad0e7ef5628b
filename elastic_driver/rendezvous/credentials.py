"""The keys of a job: one that never leaves the driver, and one derived from it for each identity.

Owns how keys are made, and the name of the variable that passes one to workers.
:mod:`~elastic_driver.rendezvous.authentication` owns how both ends prove that they hold a key;
:mod:`~elastic_driver.rendezvous.routes` owns permissions.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from elastic_driver.errors import SettingsError
from elastic_driver.hosts import WorkerId
from elastic_driver.rendezvous.environment import ENV_CHIEF, ENV_WORKER

KEY_BYTES = 32
# Both ends of a service without a token use this key, which anybody can have.
_NO_TOKEN = bytes(KEY_BYTES)
# Cost of scrypt: 16 MiB and 50 ms of CPU for each guess, where a plain HMAC allows 27,000 guesses a second.
_COST, _BLOCK_BYTES, _PARALLEL = 1 << 14, 8, 1

# A key in hexadecimal digits, shared by the workers of a job, in their environment, which only their user can read.
ENV_RANKS_KEY = "ELASTIC_DRIVER_RANKS_KEY"


class Role(StrEnum):
    """The kind of a credential."""

    WORKER = "worker"  # a process of the job; speaks for itself only
    OPERATOR = "operator"  # a process that can read the job's file: of the user who started it
    TICKET = "ticket"  # an agent that the driver started, at its first connection; valid for that one only
    JOINER = "joiner"  # an agent that the driver did not start, at its first connection; knows the join token
    AGENT = "agent"  # an agent at its later connections, with the key agreed with the driver
    CHIEF = "chief"  # the script of a job with parameter servers, at one of its starts
    MEMBER = "member"  # of a job at elasticrun rendezvous: an agent of torchrun or a Store; knows the service's token
    READER = "reader"  # a page or scraper; the only role whose secret is sent, and therefore read-only


_NUMBERED = (Role.TICKET, Role.AGENT, Role.CHIEF)


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a peer.

    Attributes:
        role: the kind of its credential.
        worker: the worker; None for other roles.
        number: number of the ticket or agent, in hexadecimal digits, or of the chief's start; "" for other roles.
    """

    role: Role
    worker: WorkerId | None = None
    number: str = ""

    def __str__(self) -> str:
        of = self.number if self.worker is None else self.worker.key
        return f"{self.role} {of}" if of else self.role

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse ``str()`` of an identity, as sent to authenticate.

        Raises:
            ValueError: no identity has this name.
        """
        text, _, of = name.partition(" ")
        role = Role(text)
        identity = cls(role, WorkerId.parse(of) if role is Role.WORKER else None, of if role in _NUMBERED else "")
        is_numbered = role is Role.WORKER or role in _NUMBERED
        if role is Role.READER or is_numbered != bool(of) or str(identity) != name:
            raise ValueError(f"there is no identity {name!r}")
        return identity


@dataclass(frozen=True, slots=True)
class Credential:
    """An identity and its key.

    Attributes:
        identity: the identity.
        key: the key, which only this end and the driver know; empty on a Unix socket, where the kernel names the user.
        source: where a person supplied the key, in words ("the file token (--token-file)"); "" if nobody did.
    """

    identity: Identity
    key: bytes = field(default=b"", repr=False)
    source: str = ""

    @property
    def is_without_token(self) -> bool:
        """Whether it is a member's credential without a token, which proves nothing."""
        return self.identity.role is Role.MEMBER and self.key == _NO_TOKEN

    @classmethod
    def of_worker(cls, environ: Mapping[str, str]) -> Self:
        """Return this process's credential as a worker. It has no key, since it asks the agent of its machine.

        Raises:
            SettingsError: the variable is missing or malformed.
        """
        name = environ.get(ENV_WORKER)
        if name is None:
            raise SettingsError(f"cannot join the job: {ENV_WORKER} is not set, although elasticrun sets it")
        return cls(Identity(Role.WORKER, WorkerId.parse(name)))

    @classmethod
    def of_chief(cls, environ: Mapping[str, str]) -> Self | None:
        """Return this process's credential as the chief; None if it is not the chief.

        Raises:
            SettingsError: the variable is malformed.
        """
        number = environ.get(ENV_CHIEF)
        if not number:
            return None
        if not number.isdecimal():
            raise SettingsError(
                f"cannot contact the driver: {ENV_CHIEF}={number!r} is not a number, as elasticrun sets it"
            )
        return cls(Identity(Role.CHIEF, number=number))


@dataclass(frozen=True, slots=True)
class JobKey:
    """The job's key. A derived key reveals neither this key nor other derived ones.

    Attributes:
        secret: the key.
        operator: the operator's key, if it was set before the job began instead of derived; else "".
    """

    secret: bytes = field(repr=False)
    operator: bytes = field(default=b"", repr=False)

    @classmethod
    def new(cls, operator: bytes = b"") -> Self:
        """Make a random key."""
        return cls(secrets.token_bytes(KEY_BYTES), operator)

    def of(self, identity: Identity) -> bytes:
        """Return the key shared by an identity and the driver; a reader sends its key, in hexadecimal digits."""
        if identity.role is Role.OPERATOR and self.operator:
            return self.operator
        if identity.role is Role.READER and self.operator:
            # A tool that reads many jobs with one operator's key needs only one reader's token.
            return reader_key(self.operator)
        return self._derive(str(identity))

    def of_ranks(self) -> bytes:
        """Return the key with which workers authenticate to each other, and their messages."""
        return self._derive("ranks")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self.secret, f"elastic_driver {purpose}".encode(), "sha256")


def reader_key(operator: bytes) -> bytes:
    """Return the readers' key of all jobs that were given this operator's key.

    Args:
        operator: the operator's key, which cannot be computed from the result.
    """
    return hmac.digest(operator, b"elastic_driver reader", "sha256")


def reader_header(key: bytes) -> bytes:
    """Return the ``Authorization`` header of a reader.

    Args:
        key: the reader's key.
    """
    return f"Bearer {key.hex()}".encode()


def join_key(token: str) -> bytes:
    """Return the key shared by the driver and a host that joins by itself.

    Args:
        token: the join token, stripped of white space.
    """
    return _stretched(token, Role.JOINER)


def member(token: str, source: str = "") -> Credential:
    """Return the credential shared by ``elasticrun rendezvous`` and its members: torchrun's agents and Stores.

    Args:
        token: the service's token, stripped of white space; "" for a service without one, where it proves nothing.
        source: where a person supplied it, as in Credential.
    """
    return Credential(Identity(Role.MEMBER), _stretched(token, Role.MEMBER) if token else _NO_TOKEN, source)


@functools.cache
def _stretched(token: str, role: Role) -> bytes:
    """Derive a key from a text that a person may have chosen. Slow, but done once for each text in a process.

    The driver authenticates first, so that a later owner of its port gets no proof to guess from. In exchange any
    stranger gets one proof of the driver's and can test tokens against it offline: each test must be expensive.
    """
    return hashlib.scrypt(
        token.encode(),
        salt=f"elastic_driver {role}".encode(),
        n=_COST,
        r=_BLOCK_BYTES,
        p=_PARALLEL,
        dklen=KEY_BYTES,
    )


def ranks_key(environ: Mapping[str, str]) -> bytes:
    """Return the key shared by the workers of this process's job; empty if no driver has started this process.

    Raises:
        SettingsError: the variable does not hold a key.
    """
    text = environ.get(ENV_RANKS_KEY, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if text and len(key) != KEY_BYTES:
        raise SettingsError(f"cannot use {ENV_RANKS_KEY}: it is not a key of {KEY_BYTES} bytes in hexadecimal digits")
    return key
