"""Signals and operators that end the job from outside; and signals that are passed on to the workers.

Owns the signal handlers for as long as the job runs. Decides nothing: the core decides what a request to end means.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping

from elastic_driver.core.events import StopRequested
from elastic_driver.driver.chief import ChiefKeeper
from elastic_driver.driver.stepper import Stepper
from elastic_driver.launch.fleet.workers import Workers
from elastic_driver.launch.words import PASSED_ON
from elastic_driver.reporting.chronicle import Chronicle
from elastic_driver.settings.settings import Settings
from elastic_driver.system import parent
from elastic_driver.words import counted, in_seconds

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Handles signals and requests to end for one job. Used on the event loop only.

    Args:
        settings: the user's settings.
        stepper: takes the events, and has the state.
        chronicle: reports them.
        workers: the workers to end, or to pass signals on to.
        chief: ends with them; None if there is none.
        hand_over: leaves the job to another driver.

    Attributes:
        preempted: whether SIGTERM ended the job, and not an operator.
    """

    def __init__(
        self,
        settings: Settings,
        stepper: Stepper,
        *,
        chronicle: Chronicle,
        workers: Workers,
        chief: ChiefKeeper | None,
        hand_over: Callable[[str], object],
    ) -> None:
        self._settings = settings
        self._stepper = stepper
        self._chronicle = chronicle
        self._workers = workers
        self._chief = chief
        self._hand_over = hand_over
        self.preempted = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Handle signals for as long as this context lasts.

        Signals that were ignored at the start stay ignored, for the workers too: nohup, and a shell's background jobs.
        """
        loop = asyncio.get_running_loop()
        ending = dict.fromkeys((*_ENDING, *(signal.Signals[name] for name in self._settings.more_signals)))
        handlers = dict.fromkeys(PASSED_ON, self.pass_on) | dict.fromkeys(ending, self.interrupt)
        numbers = [number for number in handlers if signal.getsignal(number) is not signal.SIG_IGN]
        taken = [each for number in numbers for each in parent.numbers_of(number)]
        for each in taken:
            loop.add_signal_handler(each, self._take, handlers, each)
        for number in parent.early_signals():
            loop.call_soon(handlers[number], number)
        try:
            yield
        finally:
            for each in taken:
                loop.remove_signal_handler(each)

    def _take(self, handlers: Mapping[signal.Signals, Callable[[signal.Signals], None]], number: int) -> None:
        meant = parent.news(number)
        if meant is not None:
            handlers[meant](meant)

    def pass_on(self, number: signal.Signals) -> None:
        """Pass a signal on to the workers."""
        which = "" if number == signal.SIGQUIT else " that handle it"
        self._chronicle.remark(f"{number.name}: passed on to the workers{which}")
        self._workers.pass_on(number)

    def interrupt(self, number: signal.Signals) -> None:
        """End the job; at the second signal kill its workers at once. Or leave it to another driver."""
        name = number.name
        if self._settings.hands_over and number == signal.SIGTERM and not parent.is_last():  # the last one ends it
            if not self._stepper.is_over:
                limit = in_seconds(self._settings.driver_timeout_s)
                self._hand_over(
                    f"{name} (--hand-over); its workers continue without a driver for at most {limit} "
                    "(--driver-timeout)"
                )
            return
        if self._stepper.is_over:
            if self._workers.living or self._chief is not None:  # otherwise the job's end is reported already
                self._chronicle.warning(f"{name} again: killing all workers now")
            self._workers.kill_all()
            if self._chief is not None:
                self._chief.kill()
            return
        self._chronicle.warning(f"{name}: stopping all workers (repeat to kill them at once)")
        self.preempted = number == signal.SIGTERM
        if self._settings.is_torchruns:
            self._workers.end_by(number)
        self._stepper.post(StopRequested(number, name))

    def end(self) -> str:
        """End the job for an operator, as SIGTERM does, except that a second request has no effect.

        Returns:
            The action taken, in words.
        """
        if self._stepper.is_over:
            return "the job is already ending"
        number = len(self._workers.living)
        self._chronicle.warning("elasticrun end: stopping all workers")
        self._stepper.post(StopRequested(signal.SIGTERM, "elasticrun end"))
        grace = f"SIGTERM, then SIGKILL after {self._settings.grace_s:g} s (--grace-time)"
        return f"the job is ending; {counted(number, 'worker')} get{'s' if number == 1 else ''} {grace}"
