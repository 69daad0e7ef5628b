"""Works out, when it is imported, what each process would anew when it first says something: the forms of messages.

With the types of a driver and an agent that is a tenth of what a short job costs. To be imported last, where programs
are forked from (tests/support/processes/forked.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys

from elastic_driver import codec


def _work_out() -> None:
    for name in [name for name in sys.modules if name.startswith("elastic_driver.")]:
        for kind in list(vars(sys.modules[name]).values()):
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                with contextlib.suppress(TypeError, NameError):  # it is in no message
                    codec._form_of(kind)


_work_out()
