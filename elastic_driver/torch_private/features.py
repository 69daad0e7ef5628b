"""A feature that needs private parts of torch, and the check whether they exist.

Owns the rule: a feature is checked when its module is imported, or at its first use if its part of torch is slow to
import. A missing part affects that feature only. A feature that cannot work without it raises
:class:`~elastic_driver.errors.UnsupportedTorchError` at its start; the others continue, and warn once of the loss.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from elastic_driver.errors import UnsupportedTorchError

TRIED_WITH = ("2.9", "2.13", "2.14")

_log = logging.getLogger("elastic_driver.worker")


class Feature:
    """A feature of this library that needs private parts of torch, and whether they exist.

    Args:
        name: the feature's name for users.
        changes: yields the parts that this torch lacks or has changed.
        loss: what the user loses if the feature continues without them; "" if it cannot.
        late: whether to check at the first use, since importing that part of torch takes long.
    """

    def __init__(self, name: str, changes: Callable[[], Iterable[str]], loss: str = "", *, late: bool = False) -> None:
        self.name, self._look, self._loss = name, changes, loss
        self._found: list[str] | None = None if late else self._looked_up()
        self._has_warned = False

    def _looked_up(self) -> list[str]:
        found = []
        try:
            for change in self._look():
                found.append(change)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            found = found or [str(error)]  # the earlier change is the cause
        return found

    @property
    def changes(self) -> list[str]:
        """The parts that this torch lacks or has changed."""
        if self._found is None:
            self._found = self._looked_up()
        return self._found

    @property
    def is_there(self) -> bool:
        """Whether torch has all required parts."""
        return not self.changes

    def check(self) -> None:
        """Raise UnsupportedTorchError unless torch has all required parts."""
        if self.changes:
            raise UnsupportedTorchError(f"cannot use {self.name} with {self._reason()}")

    def note(self, change: str) -> None:
        """Record a change that is only detected while the feature runs."""
        if change not in self.changes:
            self.changes.append(change)

    def has_parts(self) -> bool:
        """Return whether torch has all required parts; if not, warn once in this process of the loss."""
        if self.changes and not self._has_warned:
            self._has_warned = True
            _log.warning("elastic_driver: %s: %s, with %s", self.name, self._loss, self._reason())
        return self.is_there

    def told(self) -> str:
        """Return a text with the loss, and the changes that cause it."""
        return f"{self.name}: {self._loss or 'cannot be used'} ({'; '.join(self.changes)})"

    def _reason(self) -> str:
        return f"torch {torch.__version__}: {'; '.join(self.changes)}. It works with torch {tried_with()}"


def tried_with() -> str:
    """Return the versions of torch that this was tested with, in words."""
    return ", ".join(f"{version}.x" for version in TRIED_WITH)


def has(owner: Any, *names: str) -> Iterator[str]:
    """Yield a change for each of these names that the object lacks."""
    for name in names:
        if not hasattr(owner, name):
            yield f"{getattr(owner, '__name__', owner)}.{name} is gone"


def takes(function: Any, *names: str) -> Iterator[str]:
    """Yield a change if the function lacks one of these parameters."""
    missing = [name for name in names if name not in inspect.signature(function).parameters]
    if missing:
        yield f"{function.__qualname__} has no parameter {', '.join(missing)}"


def mentions(function: Any, *names: str) -> Iterator[str]:
    """Yield a change for each name or string missing in the function's code, for attributes that leave no other
    trace.
    """
    found = set(_words_of(inspect.unwrap(function).__code__))
    for name in names:
        if name not in found:
            yield f"{function.__qualname__} no longer uses {name}"


def _words_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _words_of(constant)
        elif isinstance(constant, str):
            yield constant
