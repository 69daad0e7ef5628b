"""Journals of jobs whose drivers have died, made up."""

from __future__ import annotations

import asyncio
from pathlib import Path

from elastic_driver.core.membership import Policy, new_state
from elastic_driver.core.state import State
from elastic_driver.journal.entries import Fact, JobFacts
from elastic_driver.journal.folder import JournalFolder
from elastic_driver.journal.journal import Journal
from elastic_driver.journal.store import FolderStore
from elastic_driver.settings.journal_place import JournalPlace
from elastic_driver.settings.settings import Settings
from tests.support.fakes.job_facts import job_of_one

STATE = new_state(Policy(num_proc=1, min_num_proc=1), 0.0)
"""Of a job that has just begun."""


def settings_in(folder: Path, **more: object) -> Settings:
    """What a job is started with whose journal is there."""
    given: dict[str, object] = {"num_proc": 1, "min_num_proc": 1, "accept_agents": True}
    given["journal"] = JournalPlace(folder)
    return Settings(command=("true",), **(given | more))  # type: ignore[arg-type]


def leave(folder: Path, *facts: Fact, state: State = STATE, job: JobFacts | None = None) -> JobFacts:
    """A driver has died there, with these facts."""
    job = job or job_of_one(settings=settings_in(folder), directory=str(folder.parent))

    async def write() -> None:
        with JournalFolder.take(folder, job.job_id) as taken:
            journal = Journal(FolderStore(taken), job, epoch=4, facts=facts)
            done: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            journal.write(1.0, state, (), done.set_result)
            assert await done is None
            journal.give_up()

    asyncio.run(write())
    return job
