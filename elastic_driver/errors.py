"""All exception classes of the package, for the driver and for workers, and the wording of foreign errors.

Messages start with "cannot …" or name the failure, and say host, slot, round, limit and remedy where they apply.
"""

from __future__ import annotations

import errno
import re

# Resources of a machine, a container or a user's limits that may run out.
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT, errno.ENOBUFS)
# The system's errors of connections, for users who have only typed an address.
_OF_NETWORK = {
    errno.ECONNREFUSED: "nothing listens there (connection refused)",
    errno.ECONNRESET: "the other end has ended the connection (connection reset)",
    errno.EPIPE: "its reader has closed it (broken pipe)",
    errno.ETIMEDOUT: "no answer (connection timed out)",
    errno.EHOSTUNREACH: "no answer from that address (no route to host)",
    errno.EHOSTDOWN: "no answer from that address (host is down)",
    errno.ENETUNREACH: "this machine has no way to that network (network is unreachable)",
    errno.ENETDOWN: "this machine has no way to that network (network is down)",
}
# asyncio replaces the system's own words with these, or puts them first.
_CONNECT = "Connect call failed"
_BIND = re.compile(r"^error while attempting to bind on address .*\): ")
_NUMBER = re.compile(r"\[Errno (\d+)\]")


class ElasticError(Exception):
    """Base of every error this package raises on purpose."""


class SettingsError(ElasticError, ValueError):
    """A setting of the user's is invalid: a flag, a config key, a combination of them."""


class TakeoverError(SettingsError):
    """This driver cannot take over an existing job, and leaves it to another driver. Its cause, if any, says why."""


class DiscoveryError(ElasticError):
    """The host-discovery script failed, hung, or printed something that is not a list of hosts.

    Attributes:
        may_pass: whether the same command may work later, unchanged: a cloud's API was down, a timeout.
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
    """The job is over: the driver starts no more rounds."""


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
    """The peer's message violates the protocol, or the peer does not permit the request."""


class UnverifiedDriverError(RendezvousError):
    """The process at the driver's address does not prove that it is this job's driver. A retry may reach the driver."""


class OtherCertificateError(UnverifiedDriverError):
    """The process at the driver's address is another: its certificate is not the one given with the address."""


class NoTlsError(UnverifiedDriverError):
    """The process at the driver's address does not speak TLS as drivers do."""


class RejectedError(UnverifiedDriverError):
    """The process at the driver's address sent a refusal, with its reason, instead of authenticating.

    Unless the driver's certificate is known, the process may not be the driver. A retry may succeed.
    """


class WrongTokenError(RendezvousError):
    """The driver, proven by its certificate, has another token or key than this process. Retries cannot help."""


class HorovodInternalError(ElasticError, RuntimeError):
    """A collective failed, because a peer is gone or the driver ended the round.

    Inside a function under ``elastic.run`` it means: restore the last commit and join the next round. The name is
    Horovod's, which users' code knows.

    Attributes:
        unreachable: ranks that this one could not reach, or whose machines have become silent.
    """

    def __init__(self, *args: object, unreachable: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.unreachable = unreachable


class MismatchError(ElasticError, ValueError, RuntimeError):
    """The ranks submitted operations of one name that do not match. Raised on all of them.

    The program is at fault, not a peer, so it is not a HorovodInternalError: the next round would end the same way.
    """


class DuplicateNameError(ElasticError, ValueError, RuntimeError):
    """An operation was submitted under the name of one that is still in progress."""


class UnsupportedOperationError(ElasticError, ValueError, RuntimeError):
    """The operation is not supported for such tensors. Horovod raises a RuntimeError here, so this is one.

    It is not a HorovodInternalError: the next round would end the same way.
    """


class UnsupportedTorchError(ElasticError, ImportError):
    """This version of PyTorch lacks a private part that a feature needs; the message names it, and versions with it.

    It is not a HorovodInternalError: the next round would end the same way.
    """


class DeviceLaneError(ElasticError, RuntimeError):
    """A device's tensors cannot be transferred as ELASTIC_DRIVER_DEVICE_LANE demands. Raised on all members.

    It is not a HorovodInternalError: the next round would end the same way.
    """


class NotInitializedError(ElasticError, ValueError):
    """The library was used before ``init()``. Horovod raises ValueError here, so this is one."""


class ForkedProcessError(NotInitializedError):
    """A process forked from a worker (a data loader's, for instance) tried to act as that worker."""


class HostsUpdatedInterrupt(BaseException):
    """A request to leave the round at this commit, because hosts were added or removed. Not an error.

    It derives from BaseException so that a user's ``except Exception`` cannot swallow it.

    Args:
        skip_sync: for Horovod's signature, without effect: either all members of a round sync, or none.
        reason: which hosts, for people.
    """

    def __init__(self, skip_sync: bool = False, *, reason: str = "") -> None:  # noqa: FBT001, FBT002 - Horovod's
        super().__init__(skip_sync)
        self.skip_sync = skip_sync
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class DurableError(ElasticError):
    """A commit cannot be written to disk, or training cannot resume from the ones there."""


class ShardsLostError(ElasticError):
    """Shards of a state were lost with the workers that held them, and there is no copy to resume from."""


class JobFailedError(ElasticError):
    """The job ended without success.

    Attributes:
        exit_code: of ``elasticrun`` (see ``elastic_driver.words.ExitCode``).
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def shortage(error: BaseException) -> str:
    """Describe the resource that the machine lacks, if that is the error; "" for all others."""
    if isinstance(error, MemoryError):
        return "no memory is left"
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):  # Python gives no more details
        return "no thread can be started; the limit of processes (ulimit -u) or of memory (ulimit -v) is reached"
    if isinstance(error, OSError) and error.errno in _SHORT:
        return in_words(error)
    return ""


def in_words(error: BaseException) -> str:
    """Describe an error to people: an OSError without its number and other additions of Python and asyncio.

    The path or the address is left to the sentence around it; see also :func:`with_path`.
    """
    if isinstance(error, MemoryError):
        return str(error) or shortage(error)  # it has a text of its own if numpy or torch has raised it
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
    """Describe an error to people as :func:`in_words` does, after the error's path if it has one."""
    path = getattr(error, "filename", None)
    return f"{path}: {in_words(error)}" if path else in_words(error)


def _of_number(number: int | None) -> str:
    return _OF_NETWORK.get(number or 0) or errno.errorcode.get(number or 0, "no connection")
