"""Tables on narrow terminals: columns go on below, no word is cut, nothing is lost."""

from __future__ import annotations

import io

import pytest

from fedshift.results.plain import Screen, Sheet

HEADS = (
    "original\nlast",
    "original\nbest-val",
    "corrupted (unseen)\nlast",
    "corrupted (unseen)\nbest-val",
    "kB up\nclient",
)


def printed(sheet: Sheet, width: int) -> str:
    screen = Screen(file=io.StringIO(), width=width)
    screen.print(sheet)
    return str(screen.file.getvalue())  # type: ignore[attr-defined]


def made() -> Sheet:
    sheet = Sheet(
        title="All of them", caption="What the words of the heads mean, in a sentence of its own", title_justify="left"
    )
    for name in ("method", "adapter"):
        sheet.add_column(name, no_wrap=True)
    for head in HEADS:
        sheet.add_column(head, justify="right")
    sheet.add_row("fedicon-us", "fdse-align", *(f"{n}1.{n} ~" for n in range(1, 6)))
    return sheet


@pytest.mark.parametrize("width", [48, 60, 80, 100, 120, 240])
def test_no_word_is_cut(width: int) -> None:
    text = printed(made(), width)
    lines = text.rstrip().split("\n")
    assert max(map(len, map(str.rstrip, lines))) <= width
    assert "…" not in text
    words = {word for head in ("method adapter", *HEADS) for word in head.split()}
    shown = {word for line in lines if "┃" in line for word in line.replace("┃", " ").split()}
    assert shown == words
    rows = [line for line in lines if line.startswith("│")]
    assert all(row.startswith("│ fedicon-us │ fdse-align │") for row in rows)  # every part says whose it is
    cells = [cell.strip() for row in rows for cell in row.strip("│").split("│")[2:]]
    assert cells == [f"{n}1.{n} ~" for n in range(1, 6)]  # once each, in their order
    assert text.count("All of them") == 1
    assert "What the words of the heads mean" in " ".join(text.split())


def test_what_fits_is_one_table() -> None:
    text = printed(made(), 120)
    assert text.count("┏") == 1
    assert printed(made(), 80).count("┏") == 2


def test_a_word_wider_than_the_screen_is_the_last_to_be_cut() -> None:
    sheet = Sheet("client", "a", "b")
    sheet.add_row("north", "x" * 60, "1")
    text = printed(sheet, 40)
    assert max(map(len, text.split("\n"))) <= 40
    assert "north" in text
    assert "1" in text


@pytest.mark.parametrize("length", [12, 40, 52, 58, 90])
@pytest.mark.parametrize("width", [40, 80])
def test_long_names_cost_no_numbers(length: int, width: int) -> None:
    sheet = Sheet(title="t")
    for name in ("method", "adapter"):
        sheet.add_column(name, no_wrap=True)
    for head in ("original\nmean", "corrupted\nmean"):
        sheet.add_column(head, justify="right")
    sheet.add_row("m" * length, "head-ensemble", "71.5", "62.25")
    text = printed(sheet, width)
    assert max(map(len, text.split("\n"))) <= width
    assert "71.5" in text
    assert "62.25" in text
