"""The page as one document: combines its parts, and defines what a browser may run of it.

Owns the list of its parts. They are written for a ``style`` and a ``script`` element, and refer to nothing outside.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

from elastic_driver.reporting import palette

_PARTS = ("words.js", "curves.js")


@cache
def document() -> str:
    """Return the page, without any content about a job."""
    folder = Path(__file__).parent
    page = folder.joinpath("page.html").read_text("utf-8").replace("/* palette */", palette.colors())
    for name in _PARTS:
        page = page.replace(f"/* {name} */", folder.joinpath(name).read_text("utf-8"))
    return page


def policy(page: str) -> str:
    """Return the policy for the browser: it may load and run the document's parts, by their digests, and nothing else.

    The server of the page adds that it must not be framed, which a document cannot declare by itself.
    """

    def digests(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found) or "'none'"

    return (
        f"default-src 'none'; script-src {digests('script')}; style-src {digests('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
