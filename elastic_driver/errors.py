"""Every exception class of the package, for the driver's side and for the worker's, and what errors of others mean.

Messages start with "cannot …" or name what failed, and say host, slot, round, limit and what to do where there is one.
"""

from __future__ import annotations

import errno
import re

# What a machine, a container or a user's limits may run out of.
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS)
# What the system says of connections, for those who have only typed an address.
_OF_NETWORK = {
    errno.ECONNREFUSED: "nothing listens there (connection refused)",
    errno.ECONNRESET: "the other end has ended the connection (connection reset)",
    errno.EPIPE: "nobody reads it any more (broken pipe)",
    errno.ETIMEDOUT: "no answer (connection timed out)",
    errno.EHOSTUNREACH: "no answer from that address (no route to host)",
    errno.EHOSTDOWN: "no answer from that address (host is down)",
    errno.ENETUNREACH: "this machine has no way to that network (network is unreachable)",
    errno.ENETDOWN: "this machine has no way to that network (network is down)",
}
# What asyncio puts in the place of the system's own words, or before them.
_CONNECT = "Connect call failed"
_BIND = re.compile(r"^error while attempting to bind on address .*\): ")
_NUMBER = re.compile(r"\[Errno (\d+)\]")


class ElasticError(Exception):
    """Base of every error this package raises on purpose."""


class SettingsError(ElasticError, ValueError):
    """What the user asked for cannot be: a flag, a config key, a combination of them."""


class TakeoverError(SettingsError):
    """A job that is there cannot be gone on with: it is left to another driver. Where it has a cause, that says why."""


class DiscoveryError(ElasticError):
    """The host-discovery script failed, hung, or printed something that is not a list of hosts.

    Attributes:
        may_pass: whether the same command, left alone, may work in a while: a cloud's API that is down, a timeout.
    """

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


class LaunchError(ElasticError):
    """A worker process could not be started."""


class RendezvousError(ElasticError):
    """A request to the driver's rendezvous server did not succeed."""


class RendezvousTimeoutError(RendezvousError):
    """The driver did not answer, or a key did not appear, in the time allowed."""


class RendezvousClosedError(RendezvousError):
    """The job is over: the driver answers no more rounds."""


class StaleRoundError(RendezvousError):
    """The request belongs to a round that has passed (or has not begun).

    Attributes:
        round_id: the round named in the request.
        current_round_id: the round that the driver is in.
    """

    def __init__(self, round_id: int, current_round_id: int) -> None:
        super().__init__(f"round {round_id} is not the current round {current_round_id}")
        self.round_id = round_id
        self.current_round_id = current_round_id


class RendezvousProtocolError(RendezvousError):
    """The other side said something that is not of the protocol (also: it does not let this one do that)."""


class StrangerError(RendezvousError):
    """Whoever answers at the driver's address does not prove to be this job's driver. The next time it may be it."""


class OtherCertificateError(StrangerError):
    """Whoever answers at the driver's address is another: the certificate is not the one that came with the address."""


class NoTlsError(StrangerError):
    """Whoever answers at the driver's address does not speak TLS as drivers do."""


class TurnedAwayError(StrangerError):
    """Whoever answers at the driver's address has refused, in its own words: it may have no room, or be another."""


class WrongTokenError(RendezvousError):
    """The driver, known by its certificate, has another token or key than this process. No other try can help."""


class HorovodInternalError(ElasticError, RuntimeError):
    """A collective failed, because a peer is gone or the driver ended the round.

    Inside a function under ``elastic.run`` it means: restore the last commit and join the next round. The name is
    Horovod's, which users' code knows.

    Attributes:
        unreachable: ranks that this one could not reach, or of whose machines nothing was heard any more.
    """

    def __init__(self, *args: object, unreachable: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.unreachable = unreachable


class MismatchError(ElasticError, ValueError, RuntimeError):
    """The ranks submitted operations of one name that do not fit together. Raised on all of them.

    It is a fault of the program, not of a peer, so it is no HorovodInternalError: another round would end the same way.
    """


class DuplicateNameError(ElasticError, ValueError, RuntimeError):
    """An operation was submitted under a name that is under way already."""


class UnsupportedOperationError(ElasticError, ValueError, RuntimeError):
    """An operation is none that there is for such tensors. Horovod raises a RuntimeError here, so this is one.

    It is no HorovodInternalError: another round would end the same way.
    """


class UnsupportedTorchError(ElasticError, ImportError):
    """This version of PyTorch lacks a private part that a feature needs; says which, and what versions have it.

    It is no HorovodInternalError: another round would end the same way.
    """


class DeviceLaneError(ElasticError, RuntimeError):
    """Tensors of a device cannot go the way that ELASTIC_DRIVER_DEVICE_LANE asks for. Raised on all members.

    It is no HorovodInternalError: another round would end the same way.
    """


class NotInitializedError(ElasticError, ValueError):
    """The library was used before ``init()``. Horovod raises ValueError here, so this is one."""


class ForkedProcessError(NotInitializedError):
    """A process that was forked from a worker (a data loader's, for instance) tried to act as that worker."""


class HostsUpdatedInterrupt(BaseException):
    """A request to leave the round at this commit, because hosts were added or removed. Not an error.

    It derives from BaseException so that a user's ``except Exception`` cannot swallow it.

    Args:
        skip_sync: for Horovod's signature, without effect: whether a round syncs is the same for all its members.
        reason: which hosts, for people.
    """

    def __init__(self, skip_sync: bool = False, *, reason: str = "") -> None:  # noqa: FBT001, FBT002 - Horovod's
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class DurableError(ElasticError):
    """A commit cannot be put on disc, or what is there cannot be gone on from."""


class ShardsLostError(ElasticError):
    """Pieces of a sharded state went with who held them, and there is no copy to go on from."""


class JobFailedError(ElasticError):
    """The job ended without success.

    Attributes:
        exit_code: what ``elasticrun`` exits with (see ``elastic_driver.words.ExitCode``).
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def shortage(error: BaseException) -> str:
    """What the machine lacks, in words, where an error says that; "" for all others."""
    if isinstance(error, MemoryError):
        return "no memory is left"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):  # all that Python says
        return "no thread can be started; the limit of processes (ulimit -u) or of memory (ulimit -v) is reached"
    if isinstance(error, OSError) and error.errno in _SHORT:
        return in_words(error)
    return ""


def in_words(error: BaseException) -> str:
    """What an error says, for people: an OSError without its number and the rest that Python and asyncio put around it.

    The path or the address that it is about is left to the sentence around it; see also :func:`with_path`.
    """
    if isinstance(error, MemoryError):
        return str(error) or shortage(error)  # which says more where numpy or torch has raised it
    if not isinstance(error, OSError):
        return shortage(error) or str(error) or type(error).__name__
    if hasattr(error, "library") and not isinstance(error, TimeoutError):  # it is OpenSSL's
        return str(getattr(error, "reason", None) or error).replace("_", " ").lower()
    text = str(error.strerror or error)
    if error.errno is None and (several := _NUMBER.findall(text)):  # asyncio's "Multiple exceptions: [Errno 111] ..."
        return "; ".join(dict.fromkeys(_of_number(int(number)) for number in several))
    if error.errno in _OF_NETWORK or _CONNECT in text:
        return _of_number(error.errno)
    if isinstance(error, TimeoutError) and (not error.args or text.endswith("timed out")):
        return "no answer in time"
    return _BIND.sub("", text) or type(error).__name__


def with_path(error: BaseException) -> str:
    """The same behind the path that the error is about, if it is about one."""
    path = getattr(error, "filename", None)
    return f"{path}: {in_words(error)}" if path else in_words(error)


def _of_number(number: int | None) -> str:
    return _OF_NETWORK.get(number or 0) or errno.errorcode.get(number or 0, "no connection")
