"""A job of nodes whose journal is in etcd: any of its nodes may drive it, and it goes on when that one is lost.

Owns such a node's life. Each node is a host that joins, and has a process beside it which drives the job or stands by
to (:mod:`elastic_driver.driver.beside`). So the node that drives is lost like any other, and its own workers do not
notice when only its driver is. Where the driver is says etcd; of the endpoint only the port counts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from elastic_driver.driver.beside import DriverBeside
from elastic_driver.driver.job import run_job
from elastic_driver.driver.node import ENDING_S, LOOK_S, Node, Wait, outlive_signals, say
from elastic_driver.driver.recording import NothingLeftError
from elastic_driver.errors import in_words
from elastic_driver.etcd.client import EtcdClient, EtcdError
from elastic_driver.etcd.place import EtcdPlace
from elastic_driver.etcd.there import DriverThere, driver_there
from elastic_driver.launch.agent.agent import End, How
from elastic_driver.settings.machines import NO_LAUNCHER
from elastic_driver.system.leash import Leash, ignore_signals
from elastic_driver.system.parent import this_command
from elastic_driver.words import ExitCode

# A driver that is named there and has died is named for the rest of its lease.
_FIRST_S = 10.0
_ASK_S = 5.0


def drive(node: Node) -> int:
    """Drives the job, or stands by to: the process beside a node. Blocks until that is over. Returns its exit code.

    Raises:
        SettingsError: see run_job.
    """
    nodes = node.nodes
    settings = replace(
        node.driver_settings(),
        launcher=NO_LAUNCHER,
        standby_driver=True,
        # Each node has these of its own.
        nodes=replace(nodes, node_rank=None, local_addr=""),
    )
    ignore_signals(settings.more_signals)
    gathering = replace(
        node.gathering(),
        invitation="this node drives the job; nodes that are started with the same --journal join it",
        leash=Leash(),
    )
    while True:
        try:
            return run_job(settings, gathering=gathering)
        except NothingLeftError as error:
            # The one that this node has stood by for had died before it had begun. Had it ended the job, this node
            # would have been told, and would have let go of this process.
            say(str(error))


class NodeInEtcd:
    """See above.

    Args:
        node: which.
        place: of the job in etcd.
        environ: this process's environment as it was given.
    """

    def __init__(self, node: Node, place: EtcdPlace, environ: Mapping[str, str]) -> None:
        self._node, self._place = node, place
        self._client = EtcdClient(place, timeout_s=_ASK_S)
        self._beside = DriverBeside(this_command(), environ)

    def run(self) -> int:
        """Runs it. Blocks until its part in the job is over. Returns its exit code."""
        with self._client, self._beside:
            return self._run()

    def _run(self) -> int:
        wait = self._node.new_wait()
        while True:
            outlive_signals()
            there, why = self._driver()
            if there is None:
                refused = self._beside.outcome
                if refused == ExitCode.BAD_USAGE:
                    return refused  # it has said why
                if wait.left_s <= 0:
                    return self._node.gives_up(why, f"at {self._place}")
                if refused is not None:
                    self._beside.again()  # that job has ended
                wait.tell(why)
                time.sleep(LOOK_S)
                continue
            end = self._join(there, wait)
            code = self._node.code_of(end)
            if code is not None:
                return self._code_at(end, code)
            if end.how is How.LOST:
                wait = self._node.new_wait()
                wait.tell(f"{end.why}; its workers here were ended", at_once=True)
            elif end.how is How.TOO_LATE:
                wait.until = min(wait.until, time.monotonic() + ENDING_S)
                time.sleep(LOOK_S)

    def _driver(self) -> tuple[DriverThere | None, str]:
        """Who drives the job; or None, and why nobody can be joined yet."""
        try:
            there = driver_there(self._client, self._place)
        except EtcdError as error:
            return None, f"cannot ask {self._place} who drives the job: {in_words(error)}"
        if there is None:
            return None, f"nobody drives the job at {self._place} yet"
        if not there.urls:
            return None, f"the driver on {there.machine} does not listen yet"
        return there, ""

    def _join(self, there: DriverThere, wait: Wait) -> End:
        first_s = min(_FIRST_S, max(wait.left_s, LOOK_S))
        return self._node.join(there.urls, wait, first_s=first_s, fingerprint=there.fingerprint)

    def _code_at(self, end: End, code: int) -> int:
        """The node's exit code where it ends so. A driver knows more of a job's end than its agents."""
        if end.how is not How.OVER:
            return code
        told = self._beside.wait(ENDING_S)
        return told if code and told else code
