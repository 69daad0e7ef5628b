"""An extension of Griffe for two forms in this project's docstrings that it does not parse."""

from __future__ import annotations

import re
from typing import Any

import griffe

# Several parameters with one description, whose names take more than one line.
_NAMES_THAT_GO_ON = re.compile(r"^( *(?:\w+, )*\w+,)\n +(?=\w+[,:])", re.MULTILINE)
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=`)")


class OurForm(griffe.Extension):
    """Joins the names of parameters that share a description, and shows references to other objects as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = obj.docstring.value
        while (joined := _NAMES_THAT_GO_ON.sub(r"\1 ", text)) != text:
            text = joined
        obj.docstring.value = _ROLE.sub("", text)
