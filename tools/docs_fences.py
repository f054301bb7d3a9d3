"""Examples in docstrings (``>>>``) as code in the reference, wherever in the docstring they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe


def fenced(docstring: str) -> str:
    """Put runs of lines that begin with ``>>>`` or ``...`` between fences."""
    return re.sub(r"(?m)((?:^>>> .*\n?|^\.\.\. .*\n?)+)", lambda match: f"```pycon\n{match[1].rstrip()}\n```\n", docstring)


class Fences(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
