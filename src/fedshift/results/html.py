"""Results as a notebook shows them: the headline as an HTML table. Every text is escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from rich.text import Text

from fedshift.results.plain import Sheet, plain

if TYPE_CHECKING:
    from fedshift.results.result import Result


def result_html(result: Result) -> str:
    """The table, and the notes beneath it."""
    notes = "".join(f"<li>{escape(plain(note))}</li>" for note in result.notes)
    return sheet_html(result.table()) + (
        f"<details><summary>Notes</summary><ul>{notes}</ul></details>" if notes else ""
    )


def sheet_html(sheet: Sheet) -> str:
    """A table for a terminal as one for a page.

    >>> sheet = Sheet("client", title="All")
    >>> sheet.add_row("<b>")
    >>> sheet_html(sheet)
    '<table><caption>All</caption><thead><tr><th>client</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    title = f"<caption>{_text(sheet.title)}</caption>" if sheet.title else ""
    heads = "".join(f"<th>{_text(column.header)}</th>" for column in sheet.columns)
    cells = zip(*(list(column.cells) for column in sheet.columns), strict=True)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table>{title}<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _text(cell: object) -> str:
    text = escape(cell.plain if isinstance(cell, Text) else str(cell)).replace("\n", "<br>")
    bold = isinstance(cell, Text) and "bold" in {str(cell.style), *(str(span.style) for span in cell.spans)}
    return f"<b>{text}</b>" if bold else text
