"""Docstrings as Markdown for the API pages: examples are code, references are names."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|mod|meth|attr):`~?([\w.]+)`")


class Markdown(griffe.Extension):
    """Rewrites every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Once for each object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Examples fenced, roles as plain names.

    >>> print(as_markdown("See :func:`fedshift.run`."))
    See `run`.
    """
    named = ROLE.sub(lambda found: f"`{found[1].rsplit('.', 1)[-1]}`", text)
    parts = re.split(r"\n\s*\n", named)
    return "\n\n".join(f"```python\n{part}\n```" if part.lstrip().startswith(">>>") else part for part in parts)
