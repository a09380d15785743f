"""Text of others as it is shown: names of clients, classes and labels are only text, whatever is in them.

The screen (:class:`Screen`), tables (:class:`Sheet`) and pictures (``plots/style.py``) call :func:`plain`, and nobody else
has to: what goes there is given as it is. Pages escape by themselves.
"""

from __future__ import annotations

import unicodedata
from typing import Any

from rich.console import Console, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

# control characters (terminals obey them), halves of surrogate pairs (bytes that were no UTF-8), line separators
_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # they let text run backwards


def plain(text: str, lines: bool = True) -> str:
    r"""The text with every character visible; ``lines`` says whether it may have several.

    >>> plain("\x1b[31mred"), plain("a\nb", lines=False), plain("[bold] Zürich")
    ('\\x1b[31mred', 'a\\nb', '[bold] Zürich')
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) if character != "\n" or not lines else character for character in text)


def _shown(character: str) -> str:
    hidden = unicodedata.category(character) in _HIDDEN or character in _TURNING
    return character.encode("unicode_escape").decode() if hidden else character


class Sheet(Table):
    """A table whose heads and cells are only text; what shall be bold is given as :class:`rich.text.Text`.

    >>> sheet = Sheet("client", title="[all]")
    >>> sheet.add_row("[/]")
    >>> Screen(width=40).print(sheet)  # doctest: +NORMALIZE_WHITESPACE
    [all]
    ┏━━━━━━━━┓
    ┃ client ┃
    ┡━━━━━━━━┩
    │ [/]    │
    └────────┘
    """

    def __init__(self, *heads: str, title: str | None = None, caption: str | None = None, **how: Any) -> None:
        shown = [None if text is None else Text(plain(text)) for text in (title, caption)]
        for text, style in zip(shown, ("table.title", "table.caption"), strict=True):
            if text is not None:
                text.stylize(style)
        super().__init__(title=shown[0], caption=shown[1], **how)
        for head in heads:
            self.add_column(head)

    def add_column(self, header: RenderableType = "", footer: RenderableType = "", **how: Any) -> None:
        """As rich's."""
        super().add_column(_only_text(header), _only_text(footer), **how)

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """As rich's."""
        super().add_row(*(cell if cell is None else _only_text(cell) for cell in cells), **how)


def _only_text(shown: RenderableType) -> RenderableType:
    return Text(plain(shown)) if isinstance(shown, str) else shown


class _Doing(Status):
    """A spinner whose words are only text."""

    def update(self, status: RenderableType | None = None, **how: Any) -> None:
        """As rich's."""
        super().update(None if status is None else _only_text(status), **how)


class Screen(Console):
    """A console without markup: ``print(text, style="bold")`` is bold, and brackets are brackets."""

    def __init__(self, **how: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **how)

    def render_str(self, text: str, **how: Any) -> Text:
        """Every string on its way to the screen."""
        return super().render_str(plain(text), **how)

    def status(self, status: RenderableType, **how: Any) -> Status:
        """A spinner while something takes its time."""
        return _Doing(_only_text(status), console=self, **how)
