"""Text of others as it is shown: names of clients, classes and labels are only text, whatever is in them.

The screen (:class:`Screen`), tables (:class:`Sheet`) and pictures (``plots/style.py``) call :func:`plain`, and nobody else
has to: what goes there is given as it is. Pages escape by themselves.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
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

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich's where there is room. Otherwise columns are as wide as their words, and go on below, behind those that
        name a row (the first one, and all that may not wrap), so that no word is cut.
        """
        needs = [self._measure_column(console, options, column) for column in self.columns]
        room = options.max_width - self._extra_width
        if not self.columns or sum(need.maximum for need in needs) <= room or self.width is not None:
            yield from super().__rich_console__(console, options)
            return
        named = max(1, next((n for n, column in enumerate(self.columns) if not column.no_wrap), 0))
        widest = max((need.minimum for need in needs[named:]), default=0)
        if sum(need.minimum + 1 for need in needs[:named]) + widest + 2 > options.max_width:
            named = 1  # names as long as the screen is wide
        bands = list(_bands([need.minimum + 1 for need in needs], options.max_width - 1, named))
        for band in bands:
            shown = (*range(named), *band)
            widths = _widths([needs[n] for n in shown], options.max_width - 1 - len(shown))
            part = copy(self)
            part.columns = [
                replace(self.columns[n], _index=index, width=max(1, width - 2))  # without its padding
                for index, (n, width) in enumerate(zip(shown, widths, strict=True))
            ]
            part.title = self.title if band is bands[0] else None
            part.caption = None
            yield from Table.__rich_console__(part, console, options)
        if self.caption is not None:  # as wide as the screen, however narrow the last columns are
            yield self.caption

    def add_column(self, header: RenderableType = "", footer: RenderableType = "", **how: Any) -> None:
        """As rich's."""
        super().add_column(_only_text(header), _only_text(footer), **how)

    def add_row(self, *cells: RenderableType | None, **how: Any) -> None:
        """As rich's."""
        super().add_row(*(cell if cell is None else _only_text(cell) for cell in cells), **how)


def _bands(needs: Sequence[int], room: int, named: int) -> Iterator[range]:
    """Columns that stand side by side, behind those that name a row.

    >>> list(_bands([10, 4, 4, 4, 4], 19, 1)), list(_bands([10, 30, 4], 19, 1))
    ([range(1, 3), range(3, 5)], [range(1, 2), range(2, 3)])
    """
    room, begun = room - sum(needs[:named]), named
    for n in range(named + 1, len(needs)):
        if sum(needs[begun : n + 1]) > room:
            yield range(begun, n)
            begun = n
    yield range(begun, len(needs))


def _widths(needs: Sequence[Measurement], room: int) -> list[int]:
    """As wide as their words, and wider from the left to the right while there is room.

    >>> _widths([Measurement(5, 9), Measurement(5, 30)], 20), _widths([Measurement(5, 9), Measurement(5, 5)], 8)
    ([9, 11], [4, 4])
    """
    widths, spare = [need.minimum for need in needs], room - sum(need.minimum for need in needs)
    for n, need in enumerate(needs):
        more = min(max(spare, 0), need.maximum - need.minimum)
        widths[n], spare = widths[n] + more, spare - more
    for _ in range(-spare):  # a screen narrower than their words: at the cost of the widest
        widths[widths.index(max(widths))] -= 1
    return widths


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
