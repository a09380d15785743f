"""What to deploy, and what nobody should trust: the first thing a reader sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedshift.errors import UserError
from fedshift.results.sections.views import Views, unit_of, written
from fedshift.results.tables import capitalised


def deploy(views: Views) -> list[dict[str, Any]]:
    """Advice for each task, by validation images alone; why there is none, where there is none."""
    made = []
    for name, part in views.result.by_task().items():
        title = f"{name}: " if name else ""
        try:
            advice = part.advice()
        except UserError as error:
            made.append(
                {"head": f"{title}no advice", "chosen": False, "reasons": [capitalised(f"{error}.")], "compared": []}
            )
            continue
        head, *reasons = advice.lines()
        made.append(
            {
                "head": title + head,
                "chosen": advice.chosen is not None,
                "reasons": reasons,
                "unit": unit_of(advice.measure),
                "compared": [
                    {
                        "name": candidate.title,
                        "chosen": candidate is advice.chosen,
                        "level": written(candidate.level, advice.measure),
                        "gain": "" if candidate.gain is None else _difference(candidate.gain),
                        "behind": "" if candidate.behind is None else _difference(candidate.behind),
                        "worst": f"{candidate.worst[0]}: {written(candidate.worst[1], advice.measure)}",
                        "against": "; ".join(candidate.against),
                    }
                    for candidate in advice.candidates
                ],
            }
        )
    return made


def warnings(views: Views) -> list[str]:
    """What is wrong with numbers, as sentences."""
    several = len(views.tasks)
    mixed = [f"these runs are of {several} tasks: only rows of one task are compared with each other"]
    found = [*(mixed if several > 1 else []), *views.result.trouble]
    named = tuple({row.method for row in views.rows})  # a name stays as it is
    return [_sentence(text, text.startswith(named)) for text in dict.fromkeys(found)]


def grouped(found: Sequence[str]) -> list[dict[str, Any]]:
    """Warnings that say the same of several streams are told once, with the others behind it.

    >>> same = [f"A has collapsed on {s}: x." for s in ("one", "two")]
    >>> [(group["text"], len(group["more"])) for group in grouped([*same, "Other."])]
    [('A has collapsed on one: x.', 1), ('Other.', 0)]
    """
    groups: dict[str, list[str]] = {}
    for text in found:
        who, collapsed, _ = text.partition(" has collapsed on ")
        groups.setdefault(who if collapsed else text, []).append(text)
    return [{"text": first, "more": more} for first, *more in groups.values()]


def _difference(found: Any) -> str:
    return f"{found.mean:+.2f} ({found.low:+.2f} to {found.high:+.2f})" + (", noise" if found.noise else "")


def _sentence(text: str, as_it_is: bool) -> str:
    return (text if as_it_is else capitalised(text)) + ("" if text.endswith((".", "!", "?")) else ".")
