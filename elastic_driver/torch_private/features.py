"""A feature that needs private parts of torch, and the check whether they are there.

Owns the rule: a feature is checked when its module is imported, or at its first use where the part of torch that it
needs is slow to import. What torch lacks costs that feature only. One that cannot do without raises
:class:`~elastic_driver.errors.UnsupportedTorchError` where it begins; the others go on, and warn once of what is lost.
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
    """What of this library needs private parts of torch, and whether they are there.

    Args:
        name: as the user knows it.
        changes: yields what is not in torch as it is used here.
        loss: what the user loses where the feature goes on without them; "" where it cannot.
        late: whether it is looked up at its first use, since an import of that part of torch takes long.
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
            found = found or [str(error)]  # what is gone above is why
        return found

    @property
    def changes(self) -> list[str]:
        """What is not in torch as it is used here."""
        if self._found is None:
            self._found = self._looked_up()
        return self._found

    @property
    def is_there(self) -> bool:
        """Whether torch has all that it needs."""
        return not self.changes

    def check(self) -> None:
        """Raises UnsupportedTorchError unless torch has all that it needs."""
        if self.changes:
            raise UnsupportedTorchError(f"cannot use {self.name} with {self._reason()}")

    def note(self, change: str) -> None:
        """Records a change that shows only when the feature is at work."""
        if change not in self.changes:
            self.changes.append(change)

    def has_parts(self) -> bool:
        """Whether torch has all that it needs; where it does not, warns once in this process of what is lost."""
        if self.changes and not self._has_warned:
            self._has_warned = True
            _log.warning("elastic_driver: %s: %s, with %s", self.name, self._loss, self._reason())
        return self.is_there

    def told(self) -> str:
        """What is lost, and by which changes."""
        return f"{self.name}: {self._loss or 'cannot be used'} ({'; '.join(self.changes)})"

    def _reason(self) -> str:
        return f"torch {torch.__version__}: {'; '.join(self.changes)}. It works with torch {tried_with()}"


def tried_with() -> str:
    """The versions of torch that this was tried with, in words."""
    return ", ".join(f"{version}.x" for version in TRIED_WITH)


def has(owner: Any, *names: str) -> Iterator[str]:
    """Names that an object must have."""
    for name in names:
        if not hasattr(owner, name):
            yield f"{getattr(owner, '__name__', owner)}.{name} is gone"


def takes(function: Any, *names: str) -> Iterator[str]:
    """Parameters that a function must have."""
    missing = [name for name in names if name not in inspect.signature(function).parameters]
    if missing:
        yield f"{function.__qualname__} has no parameter {', '.join(missing)}"


def mentions(function: Any, *names: str) -> Iterator[str]:
    """Names of attributes, or strings, that must occur in the code of a function: those have no other trace."""
    found = set(_words_of(inspect.unwrap(function).__code__))
    for name in names:
        if name not in found:
            yield f"{function.__qualname__} does not know {name} any more"


def _words_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _words_of(constant)
        elif isinstance(constant, str):
            yield constant
