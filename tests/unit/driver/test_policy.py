"""What settings mean to the core: which failures end a job at its start."""

from __future__ import annotations

import pytest

from elastic_driver.cli.flags import parse
from elastic_driver.driver.policy import policy_of
from elastic_driver.settings.assembly import settings_from
from elastic_driver.words import OnChange, Sizing

pytestmark = pytest.mark.unit

NODES = "--nnodes 2:3 --rdzv-endpoint localhost:29400"


@pytest.mark.parametrize(
    ("words", "ends", "sizing"),
    [
        ("-np 2 python t.py", True, Sizing.NP),
        ("-np 2 --reset-limit 3 python t.py", False, Sizing.NP),
        # Where hosts can come they are waited for.
        ("-np 2 --accept-agents python t.py", False, Sizing.NP),
        ("-np 2 --host-discovery-script ./hosts.sh python t.py", False, Sizing.NP),
        ("-np 2 --discovery kubernetes --selector app=train python t.py", False, Sizing.NP),
        ("-np 2 --blacklist-cooldown-range 1 5 python t.py", False, Sizing.NP),
        ("--nproc-per-node 2 t.py", True, Sizing.NPROC),
        ("--nproc-per-node 2 --max-restarts 0 t.py", False, Sizing.NPROC),
        (f"{NODES} t.py", True, Sizing.NNODES),
        (f"{NODES} --max-restarts 3 t.py", False, Sizing.NNODES),
        (f"{NODES} --blacklist-cooldown-range 1 5 t.py", False, Sizing.NNODES),
    ],
)
def test_whether_a_start_that_fails_ends_the_job(words: str, ends: bool, sizing: Sizing) -> None:
    policy = policy_of(settings_from(parse(words.split()), {}), OnChange.RESTART)
    assert (policy.ends_at_start, policy.sizing) == (ends, sizing)


def test_the_limits_that_users_set_are_the_cores() -> None:
    words = "-np 4 --min-np 2 --max-np 6 --elastic-timeout 11 --start-timeout 12 --drain-timeout 13 --reset-limit 3 "
    words += "--reset-window 14 --blacklist-cooldown-range 15 16 --standby 1 --accept-agents python t.py"
    policy = policy_of(settings_from(parse(words.split()), {}), OnChange.IN_PLACE)
    assert (policy.num_proc, policy.min_num_proc, policy.max_num_proc, policy.num_standby) == (4, 2, 6, 1)
    assert (policy.elastic_timeout_s, policy.start_timeout_s, policy.drain_timeout_s) == (11.0, 12.0, 13.0)
    assert (policy.reset_limit, policy.reset_window_s, policy.cooldown_range_s) == (3, 14.0, (15.0, 16.0))


def test_nodes_are_not_blamed() -> None:
    policy = policy_of(settings_from(parse([*NODES.split(), "t.py"]), {}), OnChange.RESTART)
    assert not policy.blames_hosts
