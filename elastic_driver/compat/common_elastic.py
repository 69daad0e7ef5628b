"""``horovod.common.elastic``: the states, and ``run_fn``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from elastic_driver.worker.run import run
from elastic_driver.worker.state import ObjectState, State

__all__ = ["ObjectState", "State", "reset", "run_fn"]


def reset() -> None:
    """What Horovod's scripts hand to :func:`run_fn`: leaves the round and joins the next. Here ``run`` does it."""


def run_fn(func: Callable[..., Any], reset: Callable[[], None]) -> Callable[..., Any]:
    """Makes ``func(state, ...)`` elastic.

    Args:
        func: the training function.
        reset: called after each reset, when this process is in the new round, before the state's own reset and
            callbacks. Unlike in Horovod it need not, and must not, shut down and init again: that is done by then.
    """
    elastic = run(func)

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Any:
        state_reset = state.on_reset

        def on_reset() -> None:
            reset()
            state_reset()

        # On the instance, where run looks; taken away again, so that a state can go through several functions.
        vars(state)["on_reset"] = on_reset
        try:
            return elastic(state, *args, **kwargs)
        finally:
            vars(state).pop("on_reset", None)

    return wrapper
