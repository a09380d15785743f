"""What a person is told after a client has joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedshift.join.classification import AVERAGES
from fedshift.join.joining import Joined
from fedshift.results.plain import Sheet

MOST = 30  # classes in the table


def headline(joined: Joined) -> str:
    """Who joined what."""
    why = "the best on validation" if joined.validated else "the last one"
    return (
        f"{joined.client} joined {joined.method}, seed {joined.seed} (round {joined.round}, {why}), "
        f"with adapter {joined.adapter}"
    )


def summary(joined: Joined) -> Sheet:
    """How many images of which class, how sure, and how right where that is known."""
    table = Sheet()
    known = joined.right is not None
    for column in ("predicted", "images", "mean confidence", *(["right in %"] if known else [])):
        table.add_column(column, justify="left" if column == "predicted" else "right")
    by_class: dict[str, list[int]] = {}
    for i, item in enumerate(joined.predictions):
        by_class.setdefault(item.label, []).append(i)
    ranked = sorted(by_class, key=lambda label: -len(by_class[label]))
    for label in ranked[:MOST]:
        table.add_row(label, *_numbers(joined, by_class[label]))
    if len(ranked) > MOST:
        rest = [i for label in ranked[MOST:] for i in by_class[label]]
        table.add_row(f"{len(ranked) - MOST} more classes", *_numbers(joined, rest))
    table.add_section()
    table.add_row("all", *_numbers(joined, range(len(joined.predictions))))
    return table


def classes_table(report: Mapping[str, Any]) -> Sheet:
    """Answers compared with labels, of the classes with most images."""
    table = Sheet(title="Compared with the labels", title_justify="left")
    for column in ("class", "precision", "recall", "F1", "images"):
        table.add_column(column, justify="left" if column == "class" else "right")
    classes: Mapping[str, Mapping[str, Any]] = report["classes"]
    largest = sorted(classes, key=lambda name: -classes[name]["support"])[:MOST]
    for name in (name for name in classes if name in largest):
        table.add_row(name, *_shares(classes[name]))
    if len(classes) > MOST:
        table.add_row(f"{len(classes) - MOST} smaller classes: see report.json")
    table.add_section()
    for average in AVERAGES:
        table.add_row(average, *_shares(report[average]))
    return table


def _shares(numbers: Mapping[str, Any]) -> list[str]:
    return [*(f"{numbers[key]:.3f}" for key in ("precision", "recall", "f1-score")), str(numbers["support"])]


def _numbers(joined: Joined, members: Sequence[int]) -> list[str]:
    sure = sum(joined.predictions[i].confidence for i in members) / len(members)
    right = [] if joined.right is None else [f"{100 * sum(joined.right[i] for i in members) / len(members):.1f}"]
    return [str(len(members)), f"{sure:.3f}", *right]


def lines(joined: Joined) -> list[str]:
    """Everything below the table."""
    told = [f"{note[0].upper()}{note[1:]}." for note in joined.notes]
    if joined.accuracy is not None:
        told.append(f"Accuracy: {100 * joined.accuracy:.1f} %.")
    told.append(
        f"Adapters this run was scored with: {', '.join(joined.scored)}; choose with --adapter, also any other of "
        "fedshift list adapters."
    )
    if len(joined.networks) > 1:
        told.append(f"Network: {joined.network}, of {', '.join(joined.networks)}; choose with --network.")
    folder = joined.files[0].parent
    return [*told, f"Files in {folder}: {', '.join(path.relative_to(folder).as_posix() for path in joined.files)}"]
