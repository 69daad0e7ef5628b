"""``python -m elastic_driver.launch.agent``: runs an agent; its bootstrap is a line on standard input, or a word.

Owns the command line, which launchers write, not users.
"""

from __future__ import annotations

import os
import select
import sys

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.launch.agent.agent import REFUSED, run_agent
from elastic_driver.rendezvous.agent_messages import NOTHING_GIVEN, NOTHING_GIVEN_WHY, Bootstrap

_STDIN = 0
_MOST_BYTES = 1 << 20


def main(argv: list[str]) -> int:
    """Run an agent. Blocks until it has ended. Returns its exit code."""
    try:
        match argv:
            case []:
                bootstrap = _given(None)
            case ["--given-within", limit] if limit.isdecimal():
                bootstrap = _given(float(limit))
            case ["--bootstrap", word]:
                bootstrap = Bootstrap.from_word(word)
            case _:
                options = "[--given-within SECONDS | --bootstrap WORD]"
                print(f"usage: python -m elastic_driver.launch.agent {options}", file=sys.stderr)
                return REFUSED
    except RendezvousProtocolError as error:
        print(f"elastic_driver agent: {error}", file=sys.stderr)
        return REFUSED
    if bootstrap is None:
        print(f"elastic_driver agent: {NOTHING_GIVEN_WHY}", file=sys.stderr)
        return NOTHING_GIVEN
    if bootstrap.stdin >= 0:
        os.set_inheritable(bootstrap.stdin, False)  # else all child processes of this agent would inherit it
    return run_agent(bootstrap)


def _given(limit_s: float | None) -> Bootstrap | None:
    """Read the bootstrap from standard input; None if nothing arrives. Blocks until then.

    Args:
        limit_s: time limit for its first byte, seconds; None for no limit.

    Raises:
        RendezvousProtocolError: it is something else.
    """
    poll = select.poll()
    poll.register(_STDIN, select.POLLIN)
    try:
        has_come = poll.poll(None if limit_s is None else limit_s * 1000)
        line = sys.stdin.buffer.readline(_MOST_BYTES) if has_come else b""
    except (OSError, AttributeError):  # it is closed
        line = b""
    return Bootstrap.from_json(line) if line else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
