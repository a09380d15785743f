"""What is in a task, as a page a browser shows without anything else."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image

from fedshift.data.audit import groups_line, notes
from fedshift.data.output import fresh
from fedshift.data.task import Client, Samples, Task
from fedshift.results.plain import Sheet

MOST_CLIENTS = 60  # shown on a page; a table of ten thousand helps nobody


def task_page(task: Task, path: Path, title: str, needs: str = "", examples: int = 8) -> None:
    """Write the page: clients with their class histograms, and examples of every stream."""
    everyone = [*task.clients, *task.unseen]
    shown = everyone[:MOST_CLIENTS]
    unseen = {client.name for client in task.unseen}
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = (resources.files("fedshift.results.pages") / "templates" / "task.html.j2").read_text(encoding="utf-8")
    channels, height, width = task.shape
    source = task.provenance.get("source", {})
    fresh(path).write_text(
        environment.from_string(template).render(
            title=title,
            task=task,
            needs=needs,
            groups=groups_line(task),
            notes=notes(task),
            shape=f"{width}x{height} pixels, {channels} channel{'s' if channels > 1 else ''}",
            streams=[
                {
                    "name": s.name,
                    "kind": s.kind,
                    "setting": s.setting,
                    "samples": sum(len(index) for index in s.index.values()),
                }
                for s in task.streams.values()
            ],
            rows=[_row(task, client, client.name in unseen, examples) for client in shown],
            more=len(everyone) if len(shown) < len(everyone) else 0,
            source=json.dumps(source, indent=1, default=str)[:4000],
        )
    )


def task_table(task: Task, most: int = 24) -> Sheet:
    """Clients, sizes and class histograms for a terminal."""
    table = Sheet(
        title=f"task {task.hash}: {len(task.clients)} clients, {len(task.unseen)} unseen", title_justify="left"
    )
    for column in ("client", "train", "val", "test", "groups", "classes", "histogram"):
        table.add_column(column, justify="left" if column in ("client", "histogram") else "right", no_wrap=True)
    everyone = [*task.clients, *task.unseen]
    for client in everyone[:most]:
        counts = class_counts(task, client)
        name = client.name + (" (unseen)" if client in task.unseen else "")
        sizes = [str(len(part)) for part in (client.train, client.val, client.test)]
        groups = str(len(task.groups[torch.cat([client.train, client.val, client.test])].unique()))
        table.add_row(name, *sizes, groups, str(int((counts > 0).sum())), spark(counts.tolist()))
    if len(everyone) > most:
        table.add_row(f"... {len(everyone) - most} more", "", "", "", "", "", "")
    return table


def task_lines(task: Task) -> list[str]:
    """What is said below the table: the classes in the order of the histogram, the groups, and what to beware of."""
    count = f"{len(task.classes)} {'class' if len(task.classes) == 1 else 'classes'}"
    lines = [f"{count}: {', '.join(task.classes)}"] if len(task.classes) <= 40 else []
    return [*lines, groups_line(task), *(f"note: {note}" for note in notes(task))]


def class_counts(task: Task, client: Client) -> torch.Tensor:
    """All of a client's labels, counted."""
    everything = torch.cat([client.train, client.val, client.test])
    return torch.bincount(task.labels[everything].cpu(), minlength=len(task.classes))


def spark(counts: Sequence[int]) -> str:
    """A histogram in one line; more than forty classes are not drawn.

    >>> spark([0, 1, 4])
    ' ▂█'
    """
    if len(counts) > 40:
        return ""
    top = max(counts) or 1
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // top)] for count in counts)


def _row(task: Task, client: Client, unseen: bool, examples: int) -> dict[str, Any]:
    counts = class_counts(task, client).tolist()
    top = max(counts) or 1
    names = zip(task.classes, counts, strict=True)
    return {
        "name": client.name,
        "unseen": unseen,
        "train": len(client.train),
        "val": len(client.val),
        "test": len(client.test),
        "bars": [{"name": n, "count": c, "height": round(100 * c / top)} for n, c in names]
        if len(counts) <= 64
        else [],
        "strips": [_strip(task.samples(client, stream), examples) for stream in task.streams],
    }


def _strip(samples: Samples, examples: int) -> str:
    """The first images of a stream side by side, as a PNG in base64."""
    chosen = samples.images[samples.index[:examples]].permute(0, 2, 3, 1).cpu().numpy()
    if not len(chosen):
        return ""
    strip = np.concatenate(list(chosen), axis=1)
    picture = Image.fromarray(strip[..., 0] if strip.shape[2] == 1 else strip)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()
