"""``elastic.run``: calls a training function in one round after another until it returns."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar, cast

from elastic_driver.errors import HorovodInternalError, HostsUpdatedInterrupt
from elastic_driver.system.installed import within_installed
from elastic_driver.words import ReadyCause
from elastic_driver.worker.durable.commits import durable
from elastic_driver.worker.rounds.advice import advice
from elastic_driver.worker.rounds.current import current, current_round
from elastic_driver.worker.rounds.runtime import Runtime, runtime
from elastic_driver.worker.state import State

_log = logging.getLogger("elastic_driver.worker")

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=State)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function, whose first argument is its state, so that it survives membership changes.

    The state is synced to all ranks and the function is called. When a collective fails, the state is restored to its
    last commit; when hosts joined or left, it is kept. Either way this process then joins the next round, and the
    function is called again, from its top: it must resume from the state.

    In a job started by mpirun or srun the ranks never change: a failed collective ends the training.

    The decorated function raises what the function raises, and also:
        NotInitializedError: ``init()`` was not called.
        SystemExit: with code 0, if the driver no longer has a place for this process.
    """

    @functools.wraps(func)
    def wrapper(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        process = runtime()
        process.note_exception(raised=True)
        process.say_if_fixed()
        if (planned := current_round().planned) is not None:
            with current_round().kept_out():
                state._prepare(planned)
        again = process.join_late()
        while True:
            try:
                if again:
                    state.on_reset()
                _enter(process, state, func)
                result = func(state, *args, **kwargs)
                _finish(state)
                process.note_exception(raised=False)
                process.note_end_of_training()
                advice().leave_run()
                return result
            except Exception as error:
                if not isinstance(error, HorovodInternalError) and not _is_caused_by_round(error):
                    raise
                if process.is_launched:
                    raise  # there is no other round
                # The driver reports what happened, once; each rank's own view is logged for debugging.
                _log.info("elastic_driver: round %d: %s", current().assignment.round_id, error)
                cause, detail = ReadyCause.INTERNAL_ERROR, str(error)
                where, raised = _origin(error)
            except HostsUpdatedInterrupt as interrupt:
                cause, detail = ReadyCause.HOSTS_UPDATED, interrupt.reason
                where, raised = "", False
            # Outside the handlers, so that the old round's frames, and the buffers in them, are freed by now.
            if cause is ReadyCause.HOSTS_UPDATED:
                cause, detail = _settle(process, detail)
            if cause is ReadyCause.INTERNAL_ERROR:
                process.break_round(detail)
                state.restore()
            process.reset(cause, commits=state._commits, detail=detail, where=where, raised=raised)
            again = True

    return cast(Callable[Concatenate[S, P], R], wrapper)


def _settle(process: Runtime, detail: str) -> tuple[ReadyCause, str]:
    """Complete the operations in flight before a planned change; return the cause for leaving, since the round may
    break.
    """
    try:
        process.settle_round()
    except HorovodInternalError as error:
        return (
            ReadyCause.INTERNAL_ERROR,
            f"cannot complete the operations that were under way when hosts changed: {error}",
        )
    return ReadyCause.HOSTS_UPDATED, detail


def _is_caused_by_round(error: Exception) -> bool:
    """Return whether a framework's process group raised the error because the round is broken."""
    joined = current_round().joined
    return joined is not None and joined.accounts_for(error)


def _origin(error: Exception) -> tuple[str, bool]:
    """Return the innermost line of the user's code in the traceback, and whether that code raised the error.

    It did not if the error is a framework's, from a process group that broke with the round.
    """
    where, raised, level = "", False, error.__traceback__
    while level is not None:
        filename = level.tb_frame.f_code.co_filename
        raised = not filename.startswith(_PACKAGE)
        if raised and not within_installed(filename):
            where = f"{os.path.basename(filename)}:{level.tb_lineno}"
        level = level.tb_next
    return where, raised and isinstance(error, HorovodInternalError)


def _enter(process: Runtime, state: State, func: Callable[..., object]) -> None:
    """Sync the state with the round, and report to the driver."""
    on_disk = durable()
    if on_disk is not None:
        on_disk.enter(state)
    if current().assignment.sync:
        state.sync()
    process.report_running(state._commits)
    advice().enter_run(func, lambda: state._commits, current().progress()[0])


def _finish(state: State) -> None:
    on_disk = durable()
    if on_disk is not None and current_round().initialized:
        on_disk.finish(state, rank=current_round().slot.rank)
