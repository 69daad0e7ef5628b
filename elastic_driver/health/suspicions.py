"""Order of the reports on suspicions: each with the stack of its worker, and the outcome after it.

Owns the suspicions that wait for a stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from elastic_driver.core.events import WorkerHung
from elastic_driver.health.dumps import debugger, innermost
from elastic_driver.health.findings import Kind, Spared, StackWanted, WorkerCleared, WorkerSuspected
from elastic_driver.hosts import WorkerId

Outcome = WorkerCleared | WorkerHung | Spared

# For these there is no stack: the process is stopped, or its agent does not respond.
_WITHOUT = (Kind.STOPPED, Kind.TRACED, Kind.UNHEARD)


@dataclass(slots=True)
class _Pending:
    """A suspicion that waits to be reported with any of these stacks, and the outcomes to report after it."""

    suspected: WorkerSuspected
    numbers: set[int] = field(default_factory=set)
    after: list[Outcome] = field(default_factory=list)


class Suspicions:
    """Puts findings into the order in which they are reported.

    Args:
        numbers: the numbers of requested stacks, each different.
    """

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._untold: dict[WorkerId, _Pending] = {}

    def take(self, finding: WorkerSuspected | StackWanted | Outcome) -> list[WorkerSuspected | StackWanted | Outcome]:
        """Apply a finding; return what to report, and to request, now."""
        match finding:
            case WorkerSuspected():
                return self._suspect(finding)
            case StackWanted():
                if finding.worker in self._untold:
                    self._untold[finding.worker].numbers.add(finding.number)
                return [finding]
            case WorkerCleared() | WorkerHung() | Spared():
                if finding.worker not in self._untold:
                    return [finding]
                self._untold[finding.worker].after.append(finding)
                return []

    def answer(self, worker: WorkerId, number: int, text: str | None) -> list[WorkerSuspected | Outcome]:
        """Apply a stack, or its absence; return what to report with it."""
        untold = self._untold.get(worker)
        return [] if untold is None or number not in untold.numbers else self._tell(worker, text or "")

    def _suspect(self, suspected: WorkerSuspected) -> list[WorkerSuspected | StackWanted | Outcome]:
        worker = suspected.worker
        found: list[WorkerSuspected | StackWanted | Outcome] = []
        if worker in self._untold:
            found += self._tell(worker, "")
        if suspected.kind in _WITHOUT:
            return [*found, _with_stack(suspected, "")]
        self._untold[worker] = _Pending(suspected)
        if suspected.ends_s is None:  # otherwise its stack is requested for the proof
            found += self.take(StackWanted(worker, next(self._numbers)))
        return found

    def _tell(self, worker: WorkerId, text: str) -> list[WorkerSuspected | Outcome]:
        untold = self._untold.pop(worker)
        return [_with_stack(untold.suspected, text), *untold.after]


def _with_stack(suspected: WorkerSuspected, text: str) -> WorkerSuspected:
    if name := debugger(text):
        why = f"{suspected.why}; it is in a debugger ({name})"
        suspected = replace(suspected, kind=Kind.TRACED, why=why, ends_s=None)
    spared = "" if suspected.kind is Kind.TRACED else suspected.spared
    return replace(suspected, stack=text, frames=innermost(text), spared=spared)
