"""Private parts of torchrun: its agent and its launcher."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from elastic_driver.torch_private.features import Feature, mentions

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
"""Prefixes of the keys by which torch's agents agree on ranks."""
COUNT_AT_BARRIER = "/num_members"
LAST_AT_BARRIER = "/last_member"
"""Suffixes of the keys of their barrier: the count of arrivals, and the mark that all have arrived."""

_LOG_CHOICES = {
    "log_dir": "_root_log_dir",
    "redirects": "_redirects",
    "tee": "_tee",
    "local_ranks_filter": "_local_ranks_filter",
}


def _restart_count_changes() -> Iterator[str]:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    yield from mentions(SimpleElasticAgent.__init__, "_remaining_restarts")
    yield from mentions(SimpleElasticAgent._invoke_run, "_remaining_restarts", "_restart_workers")


def _agents_ranks_changes() -> Iterator[str]:
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    yield from mentions(SimpleElasticAgent._assign_worker_ranks, ROLE_INFO, ASSIGNED_RANKS)


def _agents_barrier_changes() -> Iterator[str]:
    from torch.distributed.elastic.utils import store

    for name, key in (("_NUM_MEMBERS", COUNT_AT_BARRIER), ("_LAST_MEMBER_CHECKIN", LAST_AT_BARRIER)):
        if getattr(store, name, None) != key:
            yield f"{store.__name__}.{name} is no longer {key}"


def _log_choices_changes() -> Iterator[str]:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    yield from mentions(LogsSpecs.__init__, *_LOG_CHOICES.values())


RESTART_COUNT = Feature(
    "torchrun --rdzv-backend=elastic",
    _restart_count_changes,
    "the loss of another node counts against --max-restarts, as a failure of this node's workers does",
    late=True,
)
AGENTS_RANKS = Feature(
    "torchrun --rdzv-backend=elastic",
    _agents_ranks_changes,
    "the loss of a node while ranks are assigned may end the other nodes' agents",
    late=True,
)
AGENTS_BARRIER = Feature(
    "torchrun --rdzv-backend=elastic",
    _agents_barrier_changes,
    "agents that wait for each other at the end may wait for five minutes if the service is restarted meanwhile",
    late=True,
)
LOG_CHOICES = Feature(
    "elastic_launch",
    _log_choices_changes,
    "logs_specs is ignored: output goes to this process's own streams",
    late=True,
)


def give_back_a_restart() -> bool:
    """Make the calling agent of torch not count the last failure of its workers. Returns whether that worked.

    It counts before it calls anything, and can only be found up the stack. An agent without restarts left
    (``--max-restarts=0``) has ended by then.
    """
    if not RESTART_COUNT.has_parts():
        return False
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    frame = inspect.currentframe()
    while frame is not None:
        agent = frame.f_locals.get("self")
        if isinstance(agent, SimpleElasticAgent):
            if agent._remaining_restarts >= agent.get_worker_group().spec.max_restarts:
                return False  # the generation did not end by a failure
            agent._remaining_restarts += 1
            return True
        frame = frame.f_back
    RESTART_COUNT.note("the calling agent is not a SimpleElasticAgent")
    return RESTART_COUNT.has_parts()


def log_choices(specs: Any) -> dict[str, Any]:
    """Return the settings of a LogsSpecs, by the names of torchrun's flags."""
    LOG_CHOICES.has_parts()
    return {flag: getattr(specs, name, None) for flag, name in _LOG_CHOICES.items()}
