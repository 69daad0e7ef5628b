"""Requests to a job's driver over HTTP: its status, to drain a host, and to end the job. Blocks; for threads.

Owns the part of the driver's answers that the controller uses. No answer is not an error: the driver may not have
started yet, may have ended, or may not be elasticrun.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from elastic_driver.errors import RendezvousError
from elastic_driver.kubernetes.plan import DriverReport
from elastic_driver.rendezvous.client import RendezvousClient
from elastic_driver.rendezvous.credentials import Credential, Identity, Role
from elastic_driver.rendezvous.messages import DrainHostRequest

# A driver answers within milliseconds. While it is stopped or its pod is moving, other jobs must not wait for it.
_PATIENCE_S = 3.0

_log = logging.getLogger("elastic_driver.kubernetes")


def ask_status(url: str, key: bytes) -> DriverReport | None:
    """Request the status of the driver at this address.

    Returns:
        None if no driver with this operator's key answers, or its answer cannot be read.
    """
    answer = _ask(url, key, lambda client: client.status())
    try:
        return None if answer is None else read_status(answer)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        _log.warning("cannot read the status of the driver at %s: %r", url, error)
        return None


def ask_drain(url: str, key: bytes, host: str, within_s: float) -> str | None:
    """Request the drain of a host that leaves in ``within_s`` seconds. Returns the reply; None if no driver answers."""
    request = DrainHostRequest(host, undo=False, within_s=within_s)
    reply = _ask(url, key, lambda client: client.drain(request))
    return None if reply is None else reply.text


def ask_end(url: str, key: bytes) -> str | None:
    """Request the job's end, without a handover to another driver, while its workers get SIGTERM and the grace time.

    Returns:
        The reply, when the end is certain but workers may still be running; None if no driver answers.
    """
    reply = _ask(url, key, lambda client: client.end())
    return None if reply is None else reply.text


def read_status(answer: Mapping[str, Any]) -> DriverReport:
    """Parse the part of ``GET /v1/status`` that is used here.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: the answer has another format.
    """
    workers = answer["workers"]
    return DriverReport(
        explain=str(answer["explain"])[:1024],
        round_id=int(answer["round_id"]),
        hosts=frozenset(str(host["name"]) for host in answer["hosts"]),
        drained=frozenset(map(str, answer["drained"])),
        busy=frozenset(str(worker["host"]) for worker in workers),
        members=sum(worker["phase"] == "member" for worker in workers),
    )


def _ask(url: str, key: bytes, question: Any) -> Any:
    client = None
    try:
        client = RendezvousClient(url, Credential(Identity(Role.OPERATOR), key), patience_s=_PATIENCE_S)
        return question(client)
    except RendezvousError as error:
        _log.debug("no answer from the driver at %s: %s", url, error)
        return None
    finally:
        if client is not None:
            client.close()
