"""What an auditor asks of a task: which image is where and why, what is counted, and what cannot be tested."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.data.output import fresh
from fedshift.data.task import Client, Task

COLUMNS = ("image", "client", "part", "reason", "streams", "class", "group")
LEFT_OUT, SHOWN = "left out", "shown"
ABSENT = "no image"


def parts_of(task: Task, client: Client) -> dict[str, Tensor]:
    """A client's parts by name. Where settings are chosen (``tune``), what is shown are its validation images.

    >>> from fedshift.data.task import Client
    >>> none, x = torch.zeros(0, dtype=torch.int64), torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    >>> task = Task(x, none, none, (), (), (Client("new", none, none, torch.arange(3)),))
    >>> {part: len(rows) for part, rows in parts_of(task, task.unseen[0]).items()}
    {'unseen': 3}
    """
    if client.name in {other.name for other in task.unseen}:
        return {"unseen": client.test}
    tuned = len(client.val) > 0 and torch.equal(client.val, client.test)
    return {"train": client.train, "val": client.val, **({} if tuned else {"test": client.test})}


def _all_parts(task: Task) -> dict[str, Tensor]:
    """Rows by part, whoever owns them; unseen clients' images are test images."""
    found: dict[str, list[Tensor]] = {"public": [] if task.public is None else [task.public]}
    for client in (*task.clients, *task.unseen):
        for part, rows in parts_of(task, client).items():
            found.setdefault("test" if part == "unseen" else part, []).append(rows)
    return {part: torch.cat([torch.zeros(0, dtype=torch.int64), *rows]) for part, rows in found.items()}


def straddling(task: Task) -> int:
    """How many groups have images in two parts. The split promises none; this counts them."""
    pairs = [(part, task.groups[rows].unique()) for part, rows in _all_parts(task).items()]
    everything = torch.cat([groups for _, groups in pairs])
    return int((everything.unique(return_counts=True)[1] > 1).sum())


def groups_line(task: Task) -> str:
    """One sentence on groups."""
    wrong = straddling(task)
    across = "none in two parts" if not wrong else f"{wrong:,} IN TWO PARTS"
    if task.group_ids is None:
        counts = task.groups.bincount()
        copies = int(counts[counts > 1].sum())
        more = f"; {copies:,} images have exact copies, {across}" if copies else ""
        return f"no groups: every image stands for itself{more}"
    known = task.group_ids.codes[task.group_ids.codes > 0]
    alone = len(task.group_ids) - len(known)
    column = task.provenance.get("source", {}).get("group", "")
    line = f"{len(known.unique()):,} groups{f' (column {column})' if column else ''}, {across}"
    if alone:
        line += f"; {alone:,} images without one stand for themselves"
    joined = len(known.unique()) - len(task.groups[task.group_ids.codes > 0].unique())
    if joined > 0:
        line += f"; {joined:,} joined to another, because the two share an image"
    return line


def left_out(task: Task) -> dict[str, int]:
    """How many images are in no part, by reason."""
    found: dict[str, int] = {}
    for left in task.left_out:
        found[left.reason] = found.get(left.reason, 0) + len(left.rows)
    return found


def untestable(task: Task) -> dict[str, dict[str, str]]:
    """Client -> class it cannot be tested on -> why. Clients that are not meant to be tested are not among them."""
    found: dict[str, dict[str, str]] = {}
    for client in task.clients:
        if not len(client.test):
            continue
        owned = torch.cat([client.train, client.val, client.test]).unique()
        tested = set(task.labels[client.test].tolist())
        for label, name in enumerate(task.classes):
            if label in tested:
                continue
            rows = owned[task.labels[owned] == label]
            groups = len(task.groups[rows].unique())
            why = f"{_many(len(rows), 'image')} of {_many(groups, 'group')}" if groups < len(rows) else ""
            found.setdefault(client.name, {})[name] = why or (_many(len(rows), "image") if len(rows) else ABSENT)
    return found


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def notes(task: Task, most: int = 8) -> list[str]:
    """Sentences of warning: columns that look like groups, images that are left out, classes nobody can test."""
    told = [*task.provenance.get("source", {}).get("hints", []), *_one_class(task)]
    told += [f"{_many(count, 'image')} left out: {reason}" for reason, count in left_out(task).items()]
    lacking = untestable(task)
    for name, classes in list(lacking.items())[:most]:
        told.append(f"{name} {_lacking(classes)}")
    if len(lacking) > most:
        told.append(f"{len(lacking) - most} more clients cannot be tested on some class: --format json names them all")
    return told


def _one_class(task: Task) -> list[str]:
    """The commonest sign of a column that is not the label."""
    if len(task.classes) > 1:
        return []
    return [f"all images are of one class, {', '.join(map(repr, task.classes))}: whatever is trained is right then"]


def _lacking(classes: Mapping[str, str]) -> str:
    """The classes a client cannot be tested on; those it has no image of are no surprise and come without a number."""
    some = [f"{name} ({why})" for name, why in classes.items() if why != ABSENT]
    none = [name for name, why in classes.items() if why == ABSENT]
    told = [f"cannot be tested on {_first(some)}"] if some else []
    return "; ".join([*told, *([f"has no image of {_first(none)}"] if none else [])])


def _first(texts: list[str], most: int = 12) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more classes" if len(texts) > most else "")


def short_notes(task: Task) -> list[str]:
    """What somebody who trains should know: hints, and one sentence if classes that clients have cannot be tested."""
    told = [*task.provenance.get("source", {}).get("hints", []), *_one_class(task)]
    owning = [name for name, classes in untestable(task).items() if set(classes.values()) - {ABSENT}]
    if owning:
        told.append(
            f"{_many(len(owning), 'client')} ({', '.join(owning[:3])}{', ...' if len(owning) > 3 else ''}) cannot be tested "
            "on a class of their own; fedshift data says which"
        )
    return told


def counted(task: Task) -> dict[str, Any]:
    """All counts: by client, part and class, with groups; for JSON."""
    lacking = untestable(task)
    clients = {
        client.name: {
            "unseen": client in task.unseen,
            "parts": {part: _counts(task, rows) for part, rows in parts_of(task, client).items()},
            "untestable": lacking.get(client.name, {}),
        }
        for client in (*task.clients, *task.unseen)
    }
    column = task.provenance.get("source", {}).get("group") if task.group_ids is not None else None
    return {
        "task": task.hash,
        "images": len(task.labels),
        "classes": list(task.classes),
        "groups": {"column": column, "count": len(task.groups.unique()), "in-two-parts": straddling(task)},
        "clients": clients,
        "public": None if task.public is None else _counts(task, task.public),
        "left-out": left_out(task),
        "streams": {
            name: {"kind": stream.kind, "images": {client: len(index) for client, index in stream.index.items()}}
            for name, stream in task.streams.items()
        },
        "attributes": {name: list(column.values) for name, column in task.attributes.items()},
        "notes": notes(task, most=len(lacking)),
    }


def _counts(task: Task, rows: Tensor) -> dict[str, Any]:
    histogram = torch.bincount(task.labels[rows], minlength=len(task.classes)).tolist()
    return {
        "images": len(rows),
        "groups": len(task.groups[rows].unique()),
        "classes": {name: count for name, count in zip(task.classes, histogram, strict=True) if count},
    }


def listed(task: Task) -> Iterator[dict[str, str]]:
    """A line for every image and whoever has it, and for every image that somebody is shown without having it."""
    owners = _owners(task)
    shown: dict[tuple[int, str], list[str]] = {}
    strange: list[tuple[str, str, int]] = []  # images of another source
    for name, stream in task.streams.items():
        for client, index in stream.index.items():
            rows = index if stream.rows is None else stream.rows[index]
            for row, position in zip(rows.tolist(), index.tolist(), strict=True):
                if row < 0:
                    strange.append((name, client, position))
                elif name not in shown.setdefault((row, client), []):
                    shown[row, client].append(name)
    copies = task.groups.bincount() > 1
    for row, (client, part, reason) in sorted(owners.items()):
        yield _line(task, row, client, part, reason, shown.pop((row, client), []), copies)
    for (row, client), streams in sorted(shown.items()):
        yield _line(task, row, client, SHOWN, "", streams, copies)
    for name, client, position in strange:
        label = task.classes[int(task.streams[name].labels[position])]
        yield dict(zip(COLUMNS, (f"image {position} of {name}", client, SHOWN, "", name, label, ""), strict=True))


def _owners(task: Task) -> dict[int, tuple[str, str, str]]:
    """Row -> client, part, reason."""
    owners = {row: (left.client, LEFT_OUT, left.reason) for left in task.left_out for row in left.rows.tolist()}
    owners |= dict.fromkeys([] if task.public is None else task.public.tolist(), ("", "public", ""))
    for client in (*task.clients, *task.unseen):
        for part, rows in parts_of(task, client).items():
            owners |= dict.fromkeys(rows.tolist(), (client.name, part, ""))
    return owners


def _line(
    task: Task, row: int, client: str, part: str, reason: str, streams: list[str], copies: Tensor
) -> dict[str, str]:
    name = task.names[row] if task.names else f"image {row}"
    number = int(task.groups[row])
    group = task.group_ids[row] if task.group_ids is not None else ""
    if not group and bool(copies[number]):
        group = f"copies-{number}"
    values = (name, client, part, reason, "; ".join(streams), task.classes[int(task.labels[row])], group)
    return dict(zip(COLUMNS, values, strict=True))


def write_list(task: Task, path: Path) -> None:
    """Write :func:`listed` as a CSV file."""
    with fresh(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(listed(task))
