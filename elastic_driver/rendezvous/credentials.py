"""The keys of a job: one that never leaves the driver, and those derived from it, one for each who may say something.

Owns how keys are made, and the name of the variable that hands one to workers. How both ends prove that they hold a
key is the business of :mod:`~elastic_driver.rendezvous.authentication`; who may do what with which, of
:mod:`~elastic_driver.rendezvous.routes`.
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
# Both ends of a service without a token know it: a key that anybody can have.
_NO_TOKEN = bytes(KEY_BYTES)
# Of scrypt: 16 MiB and 50 ms of a processor for each guess, where a plain HMAC lets a script try 27,000 a second.
_COST, _BLOCK_BYTES, _PARALLEL = 1 << 14, 8, 1

# In hexadecimal digits, in a worker's environment, which only its own user can read: shared by the workers of a job.
ENV_RANKS_KEY = "ELASTIC_DRIVER_RANKS_KEY"


class Role(StrEnum):
    """What kind of credential somebody has."""

    WORKER = "worker"  # one process of the job, which speaks for itself only
    OPERATOR = "operator"  # whoever can read the job's file: the user who has started it
    TICKET = "ticket"  # an agent that the driver has started, at its first connection: good for that one
    JOINER = "joiner"  # an agent that somebody else has started, at its first connection: who knows the join token
    AGENT = "agent"  # an agent at its later connections, with the key that it has agreed on with the driver
    CHIEF = "chief"  # the script of a job with parameter servers, at one of its starts
    MEMBER = "member"  # of a job at elasticrun rendezvous: an agent of torchrun, a Store; who knows the service's token
    READER = "reader"  # pages and scrapers; the only one whose secret travels, and so it may only look


_NUMBERED = (Role.TICKET, Role.AGENT, Role.CHIEF)


@dataclass(frozen=True, slots=True)
class Identity:
    """Who somebody is.

    Attributes:
        role: what kind of credential it is.
        worker: which worker; None for other roles.
        number: which ticket or agent, in hexadecimal digits, or which start of the chief; "" for other roles.
    """

    role: Role
    worker: WorkerId | None = None
    number: str = ""

    def __str__(self) -> str:
        of = self.number if self.worker is None else self.worker.key
        return f"{self.role} {of}" if of else self.role

    @classmethod
    def parse(cls, name: str) -> Self:
        """The inverse of ``str()``, for those who prove themselves.

        Raises:
            ValueError: nobody has this name.
        """
        text, _, of = name.partition(" ")
        role = Role(text)
        identity = cls(role, WorkerId.parse(of) if role is Role.WORKER else None, of if role in _NUMBERED else "")
        is_numbered = role is Role.WORKER or role in _NUMBERED
        if role is Role.READER or is_numbered != bool(of) or str(identity) != name:
            raise ValueError(f"nobody proves himself as {name!r}")
        return identity


@dataclass(frozen=True, slots=True)
class Credential:
    """What a client authenticates with.

    Attributes:
        identity: who it is.
        key: which only it and the driver know; empty where only the kernel is asked, on a socket of this machine.
        source: where a person has given it, in words ("the file token (--token-file)"); "" where nobody has.
    """

    identity: Identity
    key: bytes = field(default=b"", repr=False)
    source: str = ""

    @property
    def is_without_token(self) -> bool:
        """Whether it is that of a member who was given no token, which proves nothing."""
        return self.identity.role is Role.MEMBER and self.key == _NO_TOKEN

    @classmethod
    def of_worker(cls, environ: Mapping[str, str]) -> Self:
        """That of the worker that this process is. It asks the agent of its machine, so it has no key.

        Raises:
            SettingsError: the variable is missing, or holds something else.
        """
        name = environ.get(ENV_WORKER)
        if name is None:
            raise SettingsError(f"cannot join the job: {ENV_WORKER} is not set, although elasticrun sets it")
        return cls(Identity(Role.WORKER, WorkerId.parse(name)))

    @classmethod
    def of_chief(cls, environ: Mapping[str, str]) -> Self | None:
        """That of the chief that this process is; None where it is none.

        Raises:
            SettingsError: the variables hold something else.
        """
        number = environ.get(ENV_CHIEF)
        if not number:
            return None
        if not number.isdecimal():
            raise SettingsError(f"cannot ask the driver: {ENV_CHIEF}={number!r} is not as elasticrun sets it")
        return cls(Identity(Role.CHIEF, number=number))


@dataclass(frozen=True, slots=True)
class JobKey:
    """The job's key. What is derived from it tells nothing of it, nor of what else was derived.

    Attributes:
        secret: the key.
        operator: the operator's, where that is not derived, since somebody knew it before the job began; else "".
    """

    secret: bytes = field(repr=False)
    operator: bytes = field(default=b"", repr=False)

    @classmethod
    def new(cls, operator: bytes = b"") -> Self:
        """One that nobody can guess."""
        return cls(secrets.token_bytes(KEY_BYTES), operator)

    def of(self, identity: Identity) -> bytes:
        """With which somebody and the driver prove themselves to each other; a reader's, in hexadecimal digits, is what
        it sends.
        """
        if identity.role is Role.OPERATOR and self.operator:
            return self.operator
        if identity.role is Role.READER and self.operator:
            # Whoever reads job after job with one operator's key is told of one token only.
            return reader_key(self.operator)
        return self._derive(str(identity))

    def of_ranks(self) -> bytes:
        """With which workers prove themselves to each other, and what they send to each other."""
        return self._derive("ranks")

    def _derive(self, purpose: str) -> bytes:
        return hmac.digest(self.secret, f"elastic_driver {purpose}".encode(), "sha256")


def reader_key(operator: bytes) -> bytes:
    """What readers send to a job whose operator's key somebody knew before it began: the same for all such jobs.

    Args:
        operator: that key, which does not follow from this one.
    """
    return hmac.digest(operator, b"elastic_driver reader", "sha256")


def reader_header(key: bytes) -> bytes:
    """What a reader's ``Authorization`` says.

    Args:
        key: the reader's.
    """
    return f"Bearer {key.hex()}".encode()


def join_key(token: str) -> bytes:
    """With which a host that joins by itself and the driver prove themselves to each other.

    Args:
        token: the join token, without white space around it.
    """
    return _stretched(token, Role.JOINER)


def member(token: str, source: str = "") -> Credential:
    """With which agents of torchrun and Stores prove themselves to ``elasticrun rendezvous``, and it to them.

    Args:
        token: the service's, without white space around it; "" for a service without one, where it proves nothing.
        source: see Credential.
    """
    return Credential(Identity(Role.MEMBER), _stretched(token, Role.MEMBER) if token else _NO_TOKEN, source)


@functools.cache
def _stretched(token: str, role: Role) -> bytes:
    """The key that follows from a text that people may have chosen. Takes a while, once for each in a process.

    The driver proves itself first, so that nobody who has its port after it is given a proof to guess from. In exchange
    any stranger gets one proof of the driver's and can try tokens against it at home: each try has to cost him.
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
    """The key that the workers of this process's job share; empty where no driver has started this process.

    Raises:
        SettingsError: the variable holds something else than a key.
    """
    text = environ.get(ENV_RANKS_KEY, "")
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b"?"
    if text and len(key) != KEY_BYTES:
        raise SettingsError(f"cannot use {ENV_RANKS_KEY}: it is not a key of {KEY_BYTES} bytes in hexadecimal digits")
    return key
