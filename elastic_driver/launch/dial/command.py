"""An agent on another machine, started by a user's command: an rsh agent, or a template.

Owns both command lines.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from functools import partial
from typing import Literal

from elastic_driver.errors import SettingsError
from elastic_driver.launch.dial.agent_command import agent_words, quoted, with_bootstrap, with_limit
from elastic_driver.launch.dial.child import Child, start_child
from elastic_driver.launch.dial.dialler import DialFailure
from elastic_driver.launch.dial.here import AGENT
from elastic_driver.launch.dial.reasons import failure
from elastic_driver.rendezvous.agent_messages import NOTHING_GIVEN, NOTHING_GIVEN_WHY, Bootstrap

BootstrapOn = Literal["stdin", "command"]
"""How the agent gets its bootstrap: on its standard input, or as a word of its command line. Others can read a command
line, there and in logs, so the bootstrap must be valid for one use only.
"""


class RshDialler:
    """Starts agents by ``AGENT HOST WORD...`` as MPI does; see :class:`~elastic_driver.launch.dial.dialler.Dialler`.

    The words are quoted once for a shell, through which such programs pass them (rsh, ssh, or mpi-operator's
    kubexec.sh: ``kubectl exec POD -- /bin/sh -c "$*"``). kubexec.sh forwards no input and prints every word. So the
    bootstrap is first sent on the agent's standard input; on a host where nothing arrives there, it is a word of the
    next agent's command, and must be valid for one use only.

    Args:
        rsh_agent: the program and arguments of its own, split as a shell would.
        bootstrap_on: see :data:`BootstrapOn`; None for both, as above.
        python: see :func:`~elastic_driver.launch.dial.agent_command.agent_words`.
        pythonpath: likewise.
        module: likewise.

    Raises:
        SettingsError: the text cannot be split, or is empty.
    """

    def __init__(
        self,
        rsh_agent: str,
        *,
        bootstrap_on: BootstrapOn | None = None,
        python: str = "",
        pythonpath: str | None = None,
        module: str = AGENT,
    ) -> None:
        self._program = _split(rsh_agent, "--rsh-agent")
        self._bootstrap_on = bootstrap_on
        self._without_input: set[str] = set()  # hosts where nothing has arrived
        self._agent = agent_words(python, pythonpath, module)

    def shows_bootstrap(self, host: str) -> bool:
        """Return whether the next bootstrap on this host is in a command line."""
        return self._bootstrap_on == "command" or host in self._without_input

    async def dial(self, host: str, bootstrap: Bootstrap) -> Child:
        """Start an agent on a host; see Dialler."""
        agent, given = with_limit(self._agent), bootstrap.to_json() + b"\n"
        if self.shows_bootstrap(host):
            agent, given = with_bootstrap(self._agent, bootstrap), b""
        command = [*self._program, host, *(quoted([word]) for word in agent)]
        return await start_child(command, given, partial(self._explain, host, bootstrap.to_word()))

    def _explain(self, host: str, hidden: str, returncode: int, lines: list[str]) -> DialFailure:
        if self._bootstrap_on is None and _was_given_nothing(returncode, lines):
            self._without_input.add(host)
        return failure(os.path.basename(self._program[0]), host, returncode, lines, hidden=hidden)


class CommandDialler:
    """Starts agents by a template: ``srun -w {host}``; see :class:`~elastic_driver.launch.dial.dialler.Dialler`.

    The template is split into words as a shell would, without one. In each, ``{host}`` becomes the host's name, and
    ``{command}`` the agent's command line, quoted for a shell: ``docker exec -i {host} sh -c {command}``. If the
    template has no ``{command}``, the agent's words are appended. Other braces are kept.

    Args:
        template: the text.
        bootstrap_on: see :data:`BootstrapOn`.
        python: see :func:`~elastic_driver.launch.dial.agent_command.agent_words`.
        pythonpath: likewise.
        module: likewise.

    Raises:
        SettingsError: the template cannot be split, is empty, or has no ``{host}``: all agents would start on one.
    """

    def __init__(
        self,
        template: str,
        *,
        bootstrap_on: BootstrapOn = "stdin",
        python: str = "",
        pythonpath: str | None = None,
        module: str = AGENT,
    ) -> None:
        self._template = _split(template, "--launcher-command")
        if not any("{host}" in word for word in self._template):
            raise SettingsError(f"cannot use --launcher-command {template!r}: it needs the placeholder {{host}}")
        self._bootstrap_on = bootstrap_on
        self._agent = agent_words(python, pythonpath, module)

    def shows_bootstrap(self, host: str) -> bool:
        """Return whether bootstraps are in command lines."""
        return self._bootstrap_on == "command"

    async def dial(self, host: str, bootstrap: Bootstrap) -> Child:
        """Start an agent on a host; see Dialler."""
        agent, given = self._agent, bootstrap.to_json() + b"\n"
        if self._bootstrap_on == "command":
            agent, given = with_bootstrap(agent, bootstrap), b""
        line = quoted(agent)
        command = [_filled(word, host, line) for word in self._template]
        if not any("{command}" in word for word in self._template):  # noqa: RUF027
            command += agent
        explain = partial(failure, os.path.basename(command[0]), host, hidden=bootstrap.to_word())
        return await start_child(command, given, explain)


def _filled(word: str, host: str, line: str) -> str:
    return line.join(part.replace("{host}", host) for part in word.split("{command}"))


def _was_given_nothing(returncode: int, lines: Sequence[str]) -> bool:
    """Return whether the agent reports that: not all such programs pass on both the exit code and the messages."""
    return returncode == NOTHING_GIVEN or any(line.rstrip().endswith(NOTHING_GIVEN_WHY) for line in lines)


def _split(text: str, flag: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"cannot read {flag} {text!r}: {error}") from None
    if not words:
        raise SettingsError(f"cannot use {flag}: it is empty")
    return words
