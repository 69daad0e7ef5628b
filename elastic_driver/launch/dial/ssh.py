"""An agent on another machine, started by the system's ssh.

Owns ssh's command line. The users' configuration decides everything that is not set here: user, keys, jump hosts, which
host keys are accepted, whether connections are shared. No password is ever asked for.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Mapping, Sequence
from functools import partial

from elastic_driver.launch.dial.agent_command import agent_words, quoted
from elastic_driver.launch.dial.child import Child, start_child
from elastic_driver.launch.dial.here import AGENT
from elastic_driver.launch.dial.reasons import failure
from elastic_driver.launch.words import CommandNotFoundError
from elastic_driver.rendezvous.agent_messages import Bootstrap

# No terminal; no X11, agent or port forwarding, whatever the configuration says for an interactive login; errors only.
_OPTIONS = (
    "-T",
    "-x",
    "-a",
    "-oBatchMode=yes",
    "-oClearAllForwardings=yes",
    "-oRemoteCommand=none",
    "-oLogLevel=ERROR",
)


class SshDialler:
    """Starts agents through ssh; see :class:`~elastic_driver.launch.dial.dialler.Dialler`.

    The bootstrap is sent on the agent's standard input; nothing secret is on a command line.

    Args:
        port: of the hosts' ssh servers; None for the configuration's, or 22.
        logins: by host, the login name; for other hosts the configuration decides.
        identity_file: a private key; "" for the configuration's and the agent's.
        connect_timeout_s: until a host has answered as an ssh server, seconds; rounded up.
        python: see :func:`~elastic_driver.launch.dial.agent_command.agent_words`.
        pythonpath: likewise.
        module: likewise.
        program: ssh, and arguments before all others.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        logins: Mapping[str, str] | None = None,
        identity_file: str = "",
        connect_timeout_s: float = 10.0,
        python: str = "",
        pythonpath: str | None = None,
        module: str = AGENT,
        program: Sequence[str] = ("ssh",),
    ) -> None:
        self._identity_file = identity_file
        self._logins = dict(logins or {})
        self._command = [*program, *_OPTIONS, f"-oConnectTimeout={max(1, math.ceil(connect_timeout_s))}"]
        if port is not None:
            self._command += ["-p", str(port)]
        if identity_file:
            self._command += ["-i", identity_file]
        self._agent = agent_words(python, pythonpath, module)

    def shows_bootstrap(self, host: str) -> bool:
        """Return False: the bootstrap is sent on the standard input."""
        return False

    async def dial(self, host: str, bootstrap: Bootstrap) -> Child:
        """Start an agent on a host through ssh; see Dialler."""
        # ssh itself only warns, and continues with other keys. It interprets ~ and % in its own way.
        key = os.path.expanduser(self._identity_file)
        if key and "%" not in key and not await asyncio.to_thread(os.access, key, os.R_OK):
            raise CommandNotFoundError(
                f"cannot start an agent on {host}: cannot read ssh's identity file {self._identity_file}"
            )
        login = self._logins.get(host)
        command = [*self._command, *(() if login is None else ("-l", login)), "--", host, quoted(self._agent)]
        # Not with its group: a connection that ssh keeps for the user's other sessions may depend on a process there
        # (of ProxyCommand). Processes that serve this ssh alone end with it.
        return await start_child(command, bootstrap.to_json() + b"\n", partial(failure, "ssh", host), with_group=False)
