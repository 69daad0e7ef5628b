"""``python -m elastic_driver.launch.agent``: an agent. What it needs comes as a line on standard input, or in a word.

Owns the command line, which a launcher wrote and no user.
"""

from __future__ import annotations

import sys

from elastic_driver.errors import RendezvousProtocolError
from elastic_driver.launch.agent.agent import REFUSED, run_agent
from elastic_driver.rendezvous.agent_messages import Bootstrap

_MOST_BYTES = 1 << 20


def main(argv: list[str]) -> int:
    """Runs an agent. Blocks until it has ended. Returns its exit code."""
    try:
        match argv:
            case []:
                bootstrap = Bootstrap.from_json(sys.stdin.buffer.readline(_MOST_BYTES))
            case ["--bootstrap", word]:
                bootstrap = Bootstrap.from_word(word)
            case _:
                print("usage: python -m elastic_driver.launch.agent [--bootstrap WORD]", file=sys.stderr)
                return REFUSED
    except RendezvousProtocolError as error:
        print(f"elastic_driver agent: {error}", file=sys.stderr)
        return REFUSED
    return run_agent(bootstrap)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
