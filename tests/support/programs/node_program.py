"""One node of a job of nodes, as a command line for torchrun has it started: settings and nodes come as JSON."""

from __future__ import annotations

import json
import os
import sys

from elastic_driver.driver.nodes import run_node
from elastic_driver.errors import SettingsError
from elastic_driver.settings.assembly import settings_from
from elastic_driver.settings.nodes import Nodes
from tests.support.processes.forked import starts_afresh
from tests.support.processes.forked_agent import fork_first_agent, fork_first_workers


def main(given_text: str, nodes_text: str, *command: str) -> int:
    """Runs the node. Returns its exit code."""
    given = {"num_proc": 1, "accept_agents": True, "on_change": "restart", "grace_s": 1.0, "agent_timeout_s": 3.0}
    try:
        settings = settings_from({**given, **json.loads(given_text), "command": command}, os.environ)
        return run_node(settings, Nodes(**json.loads(nodes_text)))
    except SettingsError as error:
        print(f"elasticrun: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    if not starts_afresh() and "tests.support.processes.forked_warm" in sys.modules:
        fork_first_agent(warms=True)
        fork_first_workers()
    sys.exit(main(*sys.argv[1:]))
