"""The metadata endpoints of three clouds: their notices that a machine is about to be taken away.

Owns the protocol of these endpoints: addresses, requests, and the meaning of answers. Strict: anything that is not
exactly a notice is ignored. How often they are asked, and what follows from a notice, is up to
:mod:`elastic_driver.launch.agent.spot`. Blocks: to be used in a thread of its own.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

import requests

from elastic_driver.words import Cloud

# Variables by which the clouds' own libraries move their endpoint; Azure's has none, so the third name is ours.
ENV_AWS = "AWS_EC2_METADATA_SERVICE_ENDPOINT"  # a URL
ENV_GCP = "GCE_METADATA_HOST"  # host or host:port
ENV_AZURE = "AZURE_METADATA_SERVICE_ENDPOINT"  # a URL

# A link-local address answers in milliseconds, or never.
_CONNECT_S = 2.0
_READ_S = 5.0
# Notices have some hundred bytes.
_MOST_BYTES = 1 << 16
# Lifetime of an AWS token, seconds; the longest possible.
_TOKEN_S = 21600
# How far ahead AWS announces the end of a spot instance: two minutes, but not at all before hibernation.
_AWS_AHEAD_S = 120.0
_AWS_ACTIONS = {"terminate": "terminated", "stop": "stopped", "hibernate": "hibernated"}
# How long a preempted Google machine has from then on.
_GCP_AHEAD_S = 30.0
# How long one request to Google waits for a change.
_GCP_WAIT_S = 5
# Minimum notice of each kind, by Azure's documentation (for Terminate the minimum that can be configured).
_AZURE_AHEAD_S = {"Preempt": 30.0, "Terminate": 300.0, "Redeploy": 600.0, "Reboot": 900.0}
_AZURE_DOES = {
    "Preempt": "is evicting this spot VM",
    "Terminate": "is deleting this VM",
    "Redeploy": "is redeploying this VM to other hardware",
    "Reboot": "is rebooting this VM",
}
# Azure's first answer may take two minutes: it collects events only from then on.
_AZURE_FIRST_S = 130.0


class NotThereError(Exception):
    """The address is not this cloud's endpoint, or its answer is invalid; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A notice that this machine is going away.

    Attributes:
        key: identifies the notice; the same notice, seen again, has the same key.
        why: in words, "AWS ...".
        within_s: the seconds left; None if the cloud does not report them.
    """

    key: str
    why: str
    within_s: float | None


@dataclass(frozen=True, slots=True)
class Seen:
    """The present state of an endpoint.

    Attributes:
        notices: that the machine is going away.
        advice: anything only worth a line, each a sentence.
    """

    notices: tuple[Notice, ...] = ()
    advice: tuple[str, ...] = ()


class Endpoint(Protocol):
    """A cloud's metadata endpoint, as reached from this machine."""

    def look(self) -> Seen:
        """Return its present state. Blocks for some seconds at most.

        Raises:
            NotThereError: it does not answer, or is something else.
        """

    def close(self) -> None:
        """Close its connections. It must not be used afterwards."""


def endpoint_of(cloud: Cloud, environ: Mapping[str, str] = os.environ) -> Endpoint:
    """Return the endpoint of a cloud.

    Args:
        cloud: the cloud.
        environ: may contain other addresses of the endpoints.
    """
    match cloud:
        case Cloud.AWS:
            return _Aws(environ.get(ENV_AWS) or "http://169.254.169.254")
        case Cloud.GCP:
            return _Gcp(f"http://{environ.get(ENV_GCP) or 'metadata.google.internal'}")
        case Cloud.AZURE:
            return _Azure(environ.get(ENV_AZURE) or "http://169.254.169.254")


@dataclass(frozen=True, slots=True)
class _Answer:
    """An answer; ``date``: its time by the endpoint's clock, if the answer has one."""

    status: int
    text: str
    headers: Mapping[str, str]
    date: datetime | None


class _Http:
    """Requests to one endpoint. Uses no proxy, and follows no redirect."""

    def __init__(self, base: str) -> None:
        self._base = base.rstrip("/")
        self._session = requests.Session()
        self._session.trust_env = False

    def close(self) -> None:
        """Close the connections to the endpoint."""
        self._session.close()

    def ask(self, method: str, path: str, headers: Mapping[str, str], read_s: float = _READ_S) -> _Answer:
        """Send a request and return the answer.

        Raises:
            NotThereError: there is no answer, or it is too large or too slow.
        """
        try:
            with self._session.request(
                method,
                f"{self._base}{path}",
                headers=dict(headers),
                timeout=(_CONNECT_S, read_s),
                allow_redirects=False,
                stream=True,
            ) as response:
                deadline, body = time.monotonic() + _READ_S, b""
                for piece in response.iter_content(4096):
                    body += piece
                    if len(body) > _MOST_BYTES or time.monotonic() > deadline:
                        raise NotThereError(f"the answer of {self._base} is too long or too slow")
                date = _date(response.headers.get("Date", ""))
                return _Answer(response.status_code, body.decode("utf-8", "replace"), response.headers, date)
        except (requests.RequestException, ValueError) as error:  # ValueError: the address is invalid
            raise NotThereError(f"{self._base} does not answer ({type(error).__name__})") from error

    def unexpected(self, answer: _Answer) -> NotThereError:
        """Return the error to raise for an unusable answer."""
        return NotThereError(f"{self._base} returned HTTP status {answer.status}")


class _Aws(_Http):
    """Instance metadata, version 2: every request needs a token, which is fetched first."""

    _token = ""

    def look(self) -> Seen:
        """Return the notices and advice for this instance."""
        action = self._get("spot/instance-action")
        notice = None if action is None else _instance_action(action)
        rebalance = self._get("events/recommendations/rebalance")
        advice: tuple[str, ...] = ()
        if rebalance is not None and _has_notice_time(rebalance.text):
            advice = ("AWS recommends replacing this spot instance: its risk of interruption is elevated",)
        return Seen(() if notice is None else (notice,), advice)

    def _get(self, path: str) -> _Answer | None:
        """Return an item; None if there is none."""
        for is_last in (False, True):
            self._token = self._token or self._new_token()
            answer = self.ask("GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token})
            if answer.status == 200:
                return answer
            if answer.status == 404:
                return None
            self._token = ""  # 401: it has expired
            if answer.status != 401 or is_last:
                raise self.unexpected(answer)
        raise AssertionError("unreachable")

    def _new_token(self) -> str:
        answer = self.ask("PUT", "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)})
        if answer.status != 200 or not re.fullmatch(r"[!-~]{1,1024}", answer.text):
            raise self.unexpected(answer)
        return answer.text


def _instance_action(answer: _Answer) -> Notice | None:
    data = _object(answer.text)
    action, at = data.get("action"), _instant(data.get("time"))
    if not isinstance(action, str) or action not in _AWS_ACTIONS or at is None:
        return None
    left_s = 0.0 if action == "hibernate" else _left_s(at, answer, _AWS_AHEAD_S)
    return Notice(
        f"{action} {data['time']}", f"AWS is reclaiming this spot instance: it will be {_AWS_ACTIONS[action]}", left_s
    )


def _has_notice_time(text: str) -> bool:
    return _instant(_object(text).get("noticeTime")) is not None


class _Gcp(_Http):
    """The metadata server. One request waits there for a change; the other value is read in between."""

    _etag = ""

    def look(self) -> Seen:
        """Return the notices and advice for this machine."""
        # Without the ETag of the last answer, the request would wait although a change has happened before.
        wait = f"?wait_for_change=true&timeout_sec={_GCP_WAIT_S}&last_etag={self._etag}" if self._etag else ""
        preempted = self._get(f"preempted{wait}")
        etag = preempted.headers.get("ETag", "")
        self._etag = etag if re.fullmatch(r"[0-9A-Za-z_-]{1,128}", etag) else ""
        if preempted.text.strip() == "TRUE":
            return Seen((Notice("preempted", "Google is preempting this spot VM", _GCP_AHEAD_S),))
        match self._get("maintenance-event").text.strip():
            case "TERMINATE_ON_HOST_MAINTENANCE":
                # Announced a minute ahead, and an hour ahead for a machine with GPUs.
                why = "Google is stopping this VM for host maintenance"
                return Seen((Notice("maintenance", why, None),))
            case "MIGRATE_ON_HOST_MAINTENANCE":
                return Seen(advice=("Google is about to live-migrate this VM, which pauses it for a moment",))
            case _:
                return Seen()

    def _get(self, path: str) -> _Answer:
        headers = {"Metadata-Flavor": "Google"}
        answer = self.ask("GET", f"/computeMetadata/v1/instance/{path}", headers, _GCP_WAIT_S + _READ_S)
        if answer.status != 200 or answer.headers.get("Metadata-Flavor") != "Google":
            self._etag = ""
            raise self.unexpected(answer)
        return answer


class _Azure(_Http):
    """Scheduled Events. All machines of a set receive them, so this machine's name has to be known.

    No event is ever acknowledged (StartRequests): that would speak for all machines that it names, and for everything
    else that runs on this one.
    """

    _has_answered = False
    _name = ""

    def look(self) -> Seen:
        """Return the notices and advice for this machine."""
        read_s = _READ_S if self._has_answered else _AZURE_FIRST_S
        if not self._name:
            name = self._get("instance/compute/name?api-version=2021-02-01&format=text", _READ_S)
            self._name = name.text.strip().casefold()
        answer = self._get("scheduledevents?api-version=2020-07-01", read_s)
        self._has_answered = True
        events = _object(answer.text).get("Events")
        if not isinstance(events, list):
            raise self.unexpected(answer)
        ours = [event for event in events if isinstance(event, dict) and self._concerns(event.get("Resources"))]
        notices = tuple(notice for event in ours if (notice := _scheduled_event(event, answer)) is not None)
        freezes = any(event.get("EventType") == "Freeze" for event in ours)
        return Seen(notices, ("Azure is about to pause this VM for a few seconds (Freeze)",) if freezes else ())

    def _concerns(self, resources: Any) -> bool:
        names = resources if isinstance(resources, list) else []
        return bool(self._name) and any(isinstance(name, str) and name.casefold() == self._name for name in names)

    def _get(self, path: str, read_s: float) -> _Answer:
        answer = self.ask("GET", f"/metadata/{path}", {"Metadata": "true"}, read_s)
        if answer.status != 200:
            raise self.unexpected(answer)
        return answer


def _scheduled_event(event: Mapping[str, Any], answer: _Answer) -> Notice | None:
    kind, number, status = (event.get(name) for name in ("EventType", "EventId", "EventStatus"))
    not_before = event.get("NotBefore")
    if not (isinstance(kind, str) and kind in _AZURE_AHEAD_S and isinstance(number, str) and 0 < len(number) <= 128):
        return None
    if status == "Started":
        left_s = 0.0
    elif status == "Scheduled" and isinstance(not_before, str) and (at := _date(not_before)) is not None:
        left_s = _left_s(at, answer, _AZURE_AHEAD_S[kind])
    else:
        return None
    return Notice(f"{number} {status} {not_before}", f"Azure {_AZURE_DOES[kind]} ({kind})", left_s)


def _left_s(at: datetime, answer: _Answer, ahead_s: float) -> float:
    """Return the seconds from an answer to a point in time by the cloud's clock.

    This machine's own clock is used only if the answer has no date, and only for plausible results: it may be off.
    """
    if answer.date is not None:
        return max(0.0, (at - answer.date).total_seconds())
    left_s = (at - datetime.now(UTC)).total_seconds()
    return left_s if 0.0 < left_s <= ahead_s else ahead_s


def _object(text: str) -> Mapping[str, Any]:
    """Parse a JSON object; an empty one for anything else."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _instant(text: Any) -> datetime | None:
    """Parse a time as AWS writes it, "2017-09-18T08:22:00Z"; None for anything else."""
    if not isinstance(text, str) or not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text, re.ASCII):
        return None
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        return None


def _date(text: str) -> datetime | None:
    """Parse a time as HTTP and Azure write it, "Mon, 19 Sep 2016 18:29:47 GMT"; None for anything else."""
    if not text.endswith(" GMT"):
        return None
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
