"""What the driver warns of when its own machine goes away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic_driver.core.state import Policy, new_state
from elastic_driver.driver.host_events import HostEvents
from elastic_driver.driver.stepper import Stepper
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.settings.journal_place import JournalPlace, place_of
from elastic_driver.settings.settings import Settings

pytestmark = pytest.mark.unit

IN_ETCD = place_of("etcd://localhost:2379/job", "/key")


def failed(*given: object) -> None:
    pytest.fail(f"called with {given}")


@pytest.mark.parametrize(
    ("given", "consequences"),
    [
        (
            {},
            "the job ends with it, on all hosts; its progress will be lost (--durable-dir would keep it)",
        ),
        (
            {"durable_dir": Path("/data")},
            "the job ends with it, on all hosts; if started again, it resumes from the last commit in /data",
        ),
        (
            {"journal": JournalPlace(Path("/journal"))},
            "the job ends with it, on all hosts; its progress will be lost (--durable-dir would keep it)",
        ),
        (
            {"journal": IN_ETCD, "driver_timeout_s": 90.0, "durable_dir": Path("/data")},
            "workers on other hosts continue for up to 90 s, until another driver takes over: run the same command "
            "there, unless one stands by",
        ),
    ],
)
def test_the_end_of_its_machine_is_said_once_with_what_becomes_of_the_job(
    given: dict[str, Any], consequences: str
) -> None:
    warnings: list[str] = []
    events = HostEvents(
        Settings(command=("python",), num_proc=1, min_num_proc=1, accept_agents=True, **given),
        cast(Stepper, SimpleNamespace(state=new_state(Policy(num_proc=1, min_num_proc=1), 0.0))),
        chronicle=cast(Chronicle, SimpleNamespace(warning=warnings.append)),
        on_error=failed,
        on_lost=failed,
    )
    for _ in range(2):
        events.own_machine_leaves("preempted", 30.0)
    assert warnings == [f"the driver's own machine goes away in 30 s (preempted): {consequences}"]
