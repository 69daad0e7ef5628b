"""A job of nodes whose journal is in etcd: any of its nodes may drive it, and it continues if that one is lost.

Owns such a node's life. Each node is a host that joins, and has a process beside it that drives the job or stands by
(:mod:`elastic_driver.driver.node_driver`). So the loss of the driving node is like that of any other, and its own
workers are unaffected if only its driver is lost. etcd has the driver's address; only the port of the endpoint counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from elastic_driver.driver.job import run_job
from elastic_driver.driver.node import ENDING_S, LOOK_S, Node, Wait, outlive_signals, say
from elastic_driver.driver.node_driver import NodeDriver
from elastic_driver.driver.recording import NothingLeftError
from elastic_driver.errors import in_words
from elastic_driver.etcd.client import EtcdClient, EtcdError, EtcdRefusedError
from elastic_driver.etcd.driver_record import RegisteredDriver, driver_key, parse_driver
from elastic_driver.etcd.messages import Get
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.journal.etcd_records import Ended, ended_key, parse_ended
from elastic_driver.journal.folder import JournalError
from elastic_driver.launch.agent.agent import AgentEnd, End
from elastic_driver.settings.machines import NO_LAUNCHER
from elastic_driver.system.leash import Leash, ignore_signals
from elastic_driver.system.parent import this_command
from elastic_driver.words import ExitCode

# A driver that has died remains registered there for the rest of its lease.
_FIRST_S = 10.0
_LATER_S = 1.0
_ASK_S = 5.0
_AGAIN_S = 1.0


class _Look(NamedTuple):
    """The job's entries in etcd.

    Attributes:
        there: the driver to join; None for none.
        has_nobody: whether no driver has the job.
        ended: how the job of this node has ended; None if it has not.
        ended_last: the last job that has ended; "" if unknown.
        why: why there is no driver to join, in words.
    """

    there: RegisteredDriver | None = None
    has_nobody: bool = False
    ended: Ended | None = None
    ended_last: str = ""
    why: str = ""


def drive(node: Node) -> int:
    """Drive the job, or stand by, as the process beside a node. Blocks until that is over. Returns its exit code.

    Raises:
        SettingsError: as run_job does.
    """
    nodes = node.nodes
    settings = replace(
        node.driver_settings(),
        launcher=NO_LAUNCHER,
        standby_driver=True,
        # Each node has its own.
        nodes=replace(nodes, node_rank=None, local_addr=""),
    )
    ignore_signals(settings.more_signals)
    node_job = replace(
        node.node_job(),
        invitation="this node runs the driver; nodes started with the same --journal join it",
        leash=Leash(),
    )
    said = ""
    while True:
        try:
            return run_job(settings, node_job=node_job)
        except NothingLeftError as error:
            # The driver for which this node has stood by had died before it had begun. If it had ended the job, this
            # node would have been notified, and would have released this process.
            why = str(error)
        except JournalError as error:
            cause = error.__cause__
            if not isinstance(cause, EtcdError) or isinstance(cause, EtcdRefusedError):
                raise
            why = f"cannot run the driver on this node yet: {error}"
        if why != said:
            said = why
            say(why)
        time.sleep(_AGAIN_S)


class NodeInEtcd:
    """A node of a job whose journal is in etcd.

    Args:
        node: the node.
        place: the place of the job in etcd.
        environ: this process's environment as it was given.
    """

    def __init__(self, node: Node, place: EtcdPlace, environ: Mapping[str, str]) -> None:
        self._node, self._place = node, place
        self._beside = NodeDriver(this_command(), environ, has_ended=self._has_another_ended)
        self._job = ""  # the job of which it was a node
        # The job that had ended last when this node looked for one; None before the first answer.
        self._ended_before: str | None = None
        self._client = EtcdClient(place, timeout_s=_ASK_S)

    def run(self) -> int:
        """Run the node. Blocks until its part in the job is over. Returns its exit code."""
        with self._client, self._beside:
            return self._run()

    def _run(self) -> int:
        wait = self._node.new_wait()
        strange_until = math.inf
        while True:
            outlive_signals()
            look = self._look()
            if look.ended is not None:
                say(f"job {look.ended.job} ended without this node, with exit code {look.ended.exit_code}")
                return look.ended.exit_code
            if look.has_nobody and self._beside.is_refused and not self._job:
                return ExitCode.BAD_USAGE  # it has said why
            if wait.left_s <= 0:
                return self._node.gives_up(look.why, f"at {self._place}")
            if look.there is None:
                if look.has_nobody:
                    self._ended_before = look.ended_last
                    self._beside.again()
                wait.tell(look.why)
                time.sleep(LOOK_S)
                continue
            end = self._join(look.there, wait)
            self._job = end.job or self._job
            if end.how is AgentEnd.STRANGE:
                # For the rest of a lease another program than the dead driver may answer there.
                strange_until = min(strange_until, time.monotonic() + look.there.lease_s + _LATER_S)
                if time.monotonic() < strange_until:
                    time.sleep(_AGAIN_S)
                    continue
            strange_until = math.inf
            code = self._node.code_of(end)
            if code is not None:
                return self._code_at(end, code)
            if end.how is AgentEnd.LOST:
                wait = self._node.new_wait()
                wait.tell(f"{end.why}; its workers on this node were stopped", at_once=True)
            elif end.how is AgentEnd.TOO_LATE:
                wait.until = min(wait.until, time.monotonic() + ENDING_S)
            time.sleep(LOOK_S)

    def _look(self) -> _Look:
        """Look in etcd for the driver to join."""
        try:
            read = self._client.txn([], [Get(driver_key(self._place)), Get(ended_key(self._place))])
            there, ended = parse_driver(read.found[0]), parse_ended(read.found[1])
        except EtcdError as error:
            return _Look(why=f"cannot find the driver of the job at {self._place}: {in_words(error)}")
        ended_last = "" if ended is None else ended.job
        if self._ended_before is None:
            self._ended_before = ended_last
        if ended is not None and ended.job == self._job:
            return _Look(ended=ended, ended_last=ended_last)
        if there is None:
            why = f"the job at {self._place} has no driver yet"
            return _Look(has_nobody=True, why=why, ended_last=ended_last)
        if not there.urls:
            return _Look(why=f"the driver on {there.machine} is not listening yet", ended_last=ended_last)
        return _Look(there, ended_last=ended_last)

    def _has_another_ended(self) -> bool:
        """Return whether a job has ended since this node looked for one: then the driver beside has ended with it."""
        try:
            with EtcdClient(self._place, timeout_s=_ASK_S) as client:  # another thread uses the other
                ended = parse_ended(client.range(ended_key(self._place)).found)
        except EtcdError:
            return False
        return ended is not None and self._ended_before is not None and ended.job != self._ended_before

    def _join(self, there: RegisteredDriver, wait: Wait) -> End:
        first_s = min(_FIRST_S, max(wait.left_s, LOOK_S))
        return self._node.join(there.urls, wait, first_s=first_s, fingerprint=there.fingerprint)

    def _code_at(self, end: End, code: int) -> int:
        """Return the node's exit code for such an end: the job's own, if known."""
        if end.how is not AgentEnd.OVER or not code:
            return code
        self._beside.wait(ENDING_S)  # if it drives the job, it reports the job's end
        ended = self._look().ended
        return code if ended is None else ended.exit_code
