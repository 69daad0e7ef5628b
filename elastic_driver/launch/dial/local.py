"""An agent on this machine, as a child process.

Owns its start. It dies with this process, even while stopped: see :mod:`elastic_driver.launch.dial.child`. If the job
has a journal, it does not: another driver may take over, and the agent waits for it (decision 44).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from elastic_driver.launch.dial.child import Child, start_child
from elastic_driver.launch.dial.early import EarlyAgent, local_command
from elastic_driver.launch.dial.here import AGENT, local_environment, shared_stdin
from elastic_driver.launch.dial.reasons import failure
from elastic_driver.rendezvous.agent_messages import Bootstrap

# An agent that has sent its goodbye still removes its socket, and answers orders there. One that has not received the
# order, or hangs, is killed.
_GRACE_S = 1.0


class LocalDialler:
    """Starts agents here; see :class:`~elastic_driver.launch.dial.dialler.Dialler`.

    Args:
        module: what to run; the agent.
        early: a process of the same module that was started before; for the first agent.
        outlives: whether agents continue when this process dies. They have no standard input then.
        environ: their environment, if their workers get it, too, with the variables of the driver; None for this
            process's.
    """

    def __init__(
        self,
        *,
        module: str = AGENT,
        early: EarlyAgent | None = None,
        outlives: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._environ = environ
        self._module = module
        self._early = early
        self._outlives = outlives

    def shows_bootstrap(self, host: str) -> bool:
        """Return False: the bootstrap is sent on the standard input."""
        return False

    async def dial(self, host: str, bootstrap: Bootstrap) -> Child:
        """Start an agent here; the host is a name of this machine."""
        stdin = () if self._outlives else shared_stdin()
        told = replace(bootstrap, stdin=stdin[0] if stdin else -1, outlives=self._outlives)
        given = told.to_json() + b"\n"
        explain = partial(failure, "", host)
        spawned = None if self._early is None else self._early.take()
        if spawned is not None:
            try:
                spawned.give(given, outlives=self._outlives)
            except OSError:
                spawned.end()
            else:
                return Child(spawned, explain, _GRACE_S)
        command = local_command(self._module)
        env = local_environment(self._environ)
        return await start_child(
            command, given, explain, env=env, grace_s=_GRACE_S, more=stdin, outlives=self._outlives
        )

    def settled(self) -> None:
        """Dismiss the early process if it was not dialled: it is known now whether this machine has an agent."""
        if self._early is not None:
            self._early.dismiss()
