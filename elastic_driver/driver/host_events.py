"""Events of hosts and their agents, for the core and for the user.

Owns nothing but whether the end of the driver's own machine was reported. The fleet
(:mod:`elastic_driver.launch.fleet.fleet`) decides which hosts have an agent; the core, what a silent host means.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_driver.core.events import DrainRequested, HostHeard, HostSilent, HostsUnusable
from elastic_driver.driver.stepper import Stepper
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.fleet.link import AgentFacts
from elastic_driver.launch.fleet.network_check import Checked
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.reporting.happenings import LinkMeasured, NetworkChecked
from elastic_driver.settings.settings import Settings
from elastic_driver.words import in_seconds


class HostEvents:
    """Receives the fleet's calls, as its FleetListener. Used on the event loop only.

    Args:
        settings: the user's settings.
        stepper: takes the events, and has the state.
        chronicle: reports to the user.
        on_error: takes an internal error, which ends the job.
        on_lost: called when another driver has the job, with what is known of that.
    """

    def __init__(
        self,
        settings: Settings,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        on_error: Callable[[BaseException], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._stepper = stepper
        self._chronicle = chronicle
        self._on_error = on_error
        self._on_lost = on_lost
        self._told_own_end = False

    def agent_came(self, facts: AgentFacts) -> None:
        """Report that a host has an agent."""
        slots, nodes = facts.hello.slots, self._settings.nodes
        self._chronicle.host_ready(facts.host, facts.peer, slots if facts.joined else 0)
        if facts.joined and facts.hello.alike and nodes is not None and slots != nodes.nproc_per_node:
            least, most = nodes.least * nodes.nproc_per_node, nodes.most * nodes.nproc_per_node
            self._chronicle.warning(
                f"node {facts.host} has --nproc-per-node {slots}, but the driver has {nodes.nproc_per_node}: "
                "--nnodes is converted to workers with the driver's, so the job has "
                f"{least}{'' if most == least else f' to {most}'}"
            )

    def agent_lost(self, facts: AgentFacts, why: str) -> None:
        """Report that a host's agent is lost, and its workers with it."""
        if not self._stepper.is_over:
            self._chronicle.host_lost(facts.host, why)

    def host_unready(self, host: str, failure: DialFailure) -> None:
        """Report that a wanted host has no agent yet."""
        self._chronicle.host_unready(host, failure.reason, permanent=failure.permanent)

    def warn(self, text: str) -> None:
        """Warn the user of something about a host."""
        self._chronicle.warning(text)

    def node_refused(self, why: str) -> None:
        """Report that a node was rejected, as it cannot be one of the job's."""
        self._chronicle.warning(f"rejected a node: {why}")

    def network_checked(self, report: Checked) -> None:
        """Report the result of a check of the network between hosts."""
        links = [LinkMeasured(hosts, link.rtt_s, link.speed or 0.0) for hosts, link in report.links.items()]
        self._chronicle.network_checked(
            NetworkChecked(report.admitted, report.barred, report.unheard, links, report.slow, report.took_s)
        )

    def is_left_out(self, host: str) -> bool:
        """Return whether a host gets no workers for a while."""
        return host in self._stepper.state.cuts.out

    def host_silent(self, host: str, silent_s: float, *, sure: bool) -> None:
        """Post that a host has stopped responding."""
        self._stepper.report_host(HostSilent(host, silent_s, sure))

    def host_heard(self, host: str) -> None:
        """Post that a host responds again."""
        self._stepper.report_host(HostHeard(host))

    def host_leaves(self, host: str, why: str, within_s: float | None) -> None:
        """Drain a host, as its agent requests."""
        self._stepper.post(DrainRequested(host, None, why, within_s=within_s))

    def own_machine_leaves(self, why: str, within_s: float) -> None:
        """Warn once that the machine of this process goes away."""
        if not self._told_own_end:
            self._told_own_end = True
            self._chronicle.warning(
                f"the driver's own machine goes away in {in_seconds(within_s)} ({why}): {self._after_own_end()}"
            )

    def _after_own_end(self) -> str:
        """Return what becomes of the job when the machine of this process has gone away."""
        settings = self._settings
        if settings.has_etcd:  # a journal in a folder goes away with the machine
            return (
                f"workers on other hosts continue for up to {in_seconds(settings.driver_timeout_s)}, until another "
                "driver takes over: run the same command there, unless one stands by"
            )
        after = "its progress will be lost (--durable-dir would keep it)"
        if settings.durable_dir is not None:
            after = f"if started again, it resumes from the last commit in {settings.durable_dir}"
        elif not self._stepper.state.policy.on_change.has_commits:
            after = "if started again, it resumes from its script's checkpoint"
        return f"the job ends with it, on all hosts; {after}"

    def no_host_can_be_used(self, reasons: str) -> None:
        """Post that no host can be used, unless hosts may join by themselves."""
        if not self._settings.accept_agents:
            self._stepper.post(HostsUnusable(reasons))

    def superseded(self, epoch: int) -> None:
        """Give up the job: an agent obeys another driver."""
        self._on_lost(f"one of its agents follows a newer driver (number {epoch})")

    def failed(self, error: BaseException) -> None:
        """End the job after an internal error while handling an agent."""
        self._on_error(error)
