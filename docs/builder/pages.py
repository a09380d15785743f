"""Pages from the registries: of every method and adapter, networks, partitions, streams, presets, pairs, and the map."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.builder import measured, provenance
from docs.builder.cells import as_table
from docs.builder.equations import to_markdown
from docs.builder.summaries import KEPT
from fedshift import catalogue
from fedshift.core.compatibility import REASONS, SLOTS
from fedshift.core.options import options_of
from fedshift.core.registry import ADAPTERS, METHODS, Entry, Registry

HERE = Path(__file__).parent

SOURCE = HERE.parents[1] / "src" / "fedshift"
KINDS: Mapping[str, Registry[Any]] = {"methods": METHODS, "adapters": ADAPTERS}


def pages() -> dict[str, str]:
    """All of them, by path."""
    made = {f"{kind}/index.md": overview(kind) for kind in KINDS}
    for kind, registry in KINDS.items():
        made |= {f"{kind}/{name}.md": page(kind, entry) for name, entry in registry.items()}
    made |= {f"reference/{name}.md": choices(name) for name in ("models", "partitions", "streams")}
    glance = (KEPT / "README.md").read_text(encoding="utf-8")  # which a repository shows in the folder's place
    results = {"results/index.md": paper_map(), "results/glance.md": glance}
    return made | results | {"reference/presets.md": presets(), "reference/pairs.md": pairs()}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return as_table([head, *rows])


def overview(kind: str) -> str:
    """All methods, or all adapters, a line each: the five papers first, then baselines."""
    papers = {name for system in provenance.SYSTEMS.values() for name in getattr(system, kind)}
    intro = {
        "methods": "How clients and server train. `fedshift list methods` prints the same; [which adapter can follow which]"
        "(../reference/pairs.md) is computed from what a method deploys and an adapter needs.",
        "adapters": "What a deployed client does with unlabelled test data. `fedshift list adapters` prints the same; "
        "[which method each can follow](../reference/pairs.md) is computed from what a method deploys and an adapter needs.",
    }
    parts = [f"# {kind.capitalize()}", intro[kind]]
    for title, own in (("Of the five papers", True), ("Baselines and rivals", False)):
        rows = [_line(entry) for name, entry in KINDS[kind].items() if (name in papers) is own]
        parts += [f"## {title}", table(("name", "does", "from"), rows)]
    return "\n\n".join(parts) + "\n"


def _line(entry: Entry[Any]) -> tuple[str, str, str]:
    origin = f"{entry.paper}, {entry.venue} {entry.year}" if entry.year else entry.paper.strip("()")
    return f"[{entry.name}]({entry.name}.md)", prose(entry, entry.summary), origin.replace(", arXiv", ", arXiv")


def prose(entry: Entry[Any], text: str) -> str:
    """Text of an entry's docstring as Markdown, its equations drawn."""
    own = set(entry.options)
    return to_markdown(text, own | {name.replace("-", "_") for name in own} | set(METHODS) | set(ADAPTERS))


def page(kind: str, entry: Entry[Any]) -> str:
    """A method or an adapter: paper, what it does, options, whom it meets, what it costs, where it is used, results."""
    summary, _, rest = (inspect.getdoc(entry.make) or "").partition("\n")
    module = (inspect.getdoc(inspect.getmodule(entry.make)) or "").split("\n")[0]
    parts = [
        f"# {entry.name}",
        module,
        origin(entry),
        "## What it does",
        prose(entry, summary),
        prose(entry, rest),
        "## Options",
        options(entry),
        *(_method_parts(entry) if kind == "methods" else _adapter_parts(entry)),
        "## Presets",
        in_presets(kind, entry.name),
        "## Results",
        measured.quoted(kind, entry.name) or "No results page has a row of it yet.",
        "## The code",
        code(entry),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def origin(entry: Entry[Any]) -> str:
    """Where it comes from."""
    if not entry.year:
        return f"**From**: {entry.paper.strip('()')}."
    return f"**From**: *{entry.paper}*, {f'{entry.venue} {entry.year}'.strip()}."


def options(entry: Entry[Any]) -> str:
    """Every option: its default, and what it may be."""
    if not entry.options:
        return "None of its own; those of `[train]` apply."
    hints = options_of(entry.make)
    rows = [
        (f"`{key}`", f"`{_value(value)}`", _rule(hints[key.replace("-", "_")])) for key, value in entry.options.items()
    ]
    return table(("option", "default", "may be"), rows)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else json.dumps(value if not isinstance(value, tuple) else list(value))


def _rule(option: Any) -> str:
    """A type and its rules in words."""
    kind = str(option.hint)
    if "Literal[" in kind:
        inner = kind[kind.index("Literal[") + 8 :].split("]")[0].replace("'", '"')
        return ", ".join(f"`{item.strip()}`" for item in inner.split(",")) + (", or not set" if option.optional else "")
    plain = {"<class 'bool'>": "true or false", "<class 'str'>": "a word"}.get(kind, "")
    words = [rule.words.removeprefix("{name} must ").split(", not {")[0] for rule in option.rules]
    told = [word.replace("not be ", "not ").removeprefix("be ").replace("lie in", "in") for word in words]
    return (", ".join(word for word in told if word != "finite") or plain) + (", or not set" if option.optional else "")


def _method_parts(entry: Entry[Any]) -> list[str]:
    cls, row = entry.make, next(row for row in catalogue.methods() if row["name"] == entry.name)
    able = [name for name, answer in PAIRS[entry.name].items() if answer == "yes"]
    what = "models of their own" if cls.personal else "one common model"
    deploys = ", ".join(f"`{slot}` ({SLOTS.get(slot, 'what it predicts with')})" for slot in row["deploys"])
    needs = ", ".join(REASONS.get(word, cls.reasons.get(word, word)) for word in row["needs"])
    lines = [
        f"- Clients end with {what}. Deployed: {deploys}.",
        f"- It needs {needs}." if needs else "",
        f"- `[train] balance` does not reach {', '.join(row['own-balance'])}." if row["own-balance"] else "",
        f"- Adapters that can follow it: {_links('adapters', able)}.",
    ]
    return ["## Whom it meets", "\n".join(filter(None, lines)), "## Costs", costs(entry.name)]


def _adapter_parts(entry: Entry[Any]) -> list[str]:
    cls = entry.make
    able = [name for name, row in PAIRS.items() if row[entry.name] == "yes"]
    slots = ", ".join(SLOTS.get(slot, slot) for slot in sorted(cls.requires))
    layers = ", ".join(REASONS.get(word, cls.reasons.get(word, word)) for word in sorted(cls.requires_arch))
    lines = [
        f"- It needs {slots} from the method." if slots else "- It needs nothing but a model.",
        f"- It needs {layers}." if layers else "",
        f"- Methods it can follow, on a network with BatchNorm: {_links('methods', able)}.",
    ]
    return ["## Whom it meets", "\n".join(filter(None, lines)), "## Costs", adapter_costs(entry.name)]


def _links(kind: str, names: Sequence[str]) -> str:
    return "all" if len(names) == len(KINDS[kind]) else ", ".join(f"[{name}](../{kind}/{name}.md)" for name in names)


def costs(name: str) -> str:
    """What a round of a method takes, next to FedAvg's, from ``docs/costs.json``."""
    kept = json.loads((HERE / "costs.json").read_text(encoding="utf-8"))
    own, base = kept["methods"][name], kept["methods"]["fedavg"]
    words = {
        "bytes-up": "sent up by a client, a round", "bytes-down": "sent down to a client, a round",
        "bytes-published": "given away once, after the last round", "flops-round": "computed by a client, a round",
        "flops-end": "computed by a client after the last round", "flops-server": "trained by the server, a round",
        "memory-step": "tensors alive at once in a step",
    }  # fmt: skip
    rows = [
        (word, _amount(key, own[key]), f"{own[key] / base[key]:.2f} x" if base.get(key) else "")
        for key, word in words.items()
        if own.get(key)
    ]
    if not rows:
        return "Nothing travels and nothing is trained."
    return (
        table(("", name, "of FedAvg's"), rows) + f"\n\n{kept['setting']} `python docs/generate.py --costs` counts it."
    )


def _amount(key: str, number: float) -> str:
    if "flops" in key:
        return f"{number / 1e9:.3g} GFLOPs"
    return f"{number / 2**20:.3g} MiB" if number >= 2**14 else f"{number:.0f} bytes"


def adapter_costs(name: str) -> str:
    """What serving with an adapter takes, next to plain prediction."""
    kept = json.loads((HERE / "costs.json").read_text(encoding="utf-8"))
    own = kept["adapters"][name]
    return (
        f"{own['flops'] / own['plain']:.3g} times the FLOPs of plain prediction, counted on {own['images']} images of one "
        f"client after `{own['method']}`. {kept['setting']} `python docs/generate.py --costs` counts it."
    )


def in_presets(kind: str, name: str) -> str:
    """The presets that have it, with the table or figure they are for."""
    found = [preset for preset in provenance.PRESETS.values() if name in getattr(preset, kind)]
    rows = [(f"`{preset.name}`", preset.title, f"{preset.paper} {preset.place}".strip()) for preset in found]
    return (
        table(("preset", "is", "for"), rows) if rows else "None of the presets has it; name it in your own TOML file."
    )


def code(entry: Entry[Any]) -> str:
    """Its file, folded away."""
    path = Path(inspect.getfile(entry.make))
    text = path.read_text(encoding="utf-8").rstrip("\n")
    body = "\n".join(f"    {line}".rstrip() for line in f"```python\n{text}\n```".split("\n"))
    return f'??? example "src/fedshift/{path.relative_to(SOURCE).as_posix()}, {len(text.splitlines())} lines"\n\n{body}'


def choices(name: str) -> str:
    """Networks, partitions or kinds of streams: what each is, and its options."""
    intro = {
        "models": ("Networks", "`[model] name`. [Your own](../how-to/own-network.md) needs no registration."),
        "partitions": ("Partitions", "`[partition] kind`: who owns which images."),
        "streams": ("Streams", "`[[stream]] kind`: what clients are tested on. [Your own](../how-to/own-stream.md)."),
    }
    title, text = intro[name]
    parts = [f"# {title}", f"{text} `fedshift list {name}` prints the same."]
    for row in catalogue.CATALOGUE[name]():
        known = [
            (f"`{key}`", f"`{_value(value)}`" if value is not None else "") for key, value in row["options"].items()
        ]
        parts += [f"## {row['name']}", to_markdown(row["summary"], row["options"]) + "."]
        parts += [table(("option", "default"), known)] if known else []
        parts += [f"From: {row['paper']}, {row['venue']}."] if row.get("venue") else []
    return "\n\n".join(parts) + "\n"


def presets() -> str:
    """Every experiment that needs no file."""
    parts = [
        "# Presets",
        '`fedshift run NAME` runs one, `-c scale=small` a version that ends in minutes; `extends = "NAME"` starts a file of '
        "your own from it. Each needs data that you get yourself, but for `default`. [The map](../results/index.md) goes "
        "from papers to presets to what we measured.",
    ]
    for preset in provenance.PRESETS.values():
        parts += [f"## {preset.name}", f"{preset.title}. {preset.paper} {preset.place}".strip().rstrip(".") + "."]
        parts += [f"- **Methods**: {_links('methods', preset.methods)}.\n- **Data**: {preset.needs}."]
    return "\n\n".join(parts) + "\n"


def pairs() -> str:
    """Which adapter can follow which method."""
    names = list(ADAPTERS)
    head = ["", *(f"[{name}](../adapters/{name}.md)" for name in names)]
    rows = [
        [f"[{name}](../methods/{name}.md)", *("yes" if row[other] == "yes" else "" for other in names)]
        for name, row in PAIRS.items()
    ]
    intro = (
        "Computed on a network with BatchNorm, from what a method deploys and an adapter needs; never listed by hand."
    )
    return f"# Pairs\n\n{intro}\n\n{table(head, rows)}\n"


def paper_map() -> str:
    """Paper, folder, preset, result."""
    parts = [
        "# From paper to result",
        "Each of the five papers has a folder, presets for its tables and figures, and a page with what we measured, "
        "misses included. [All at one glance](glance.md) says who is first in which table.",
    ]
    for name, system in provenance.SYSTEMS.items():
        entry = METHODS[system.methods[0]]
        parts += [f"## {name}", origin(entry)]
        parts += [
            f"- **Folder**: `src/fedshift/systems/{system.folder}/`\n"
            f"- **Methods**: {_links('methods', system.methods)}\n"
            f"- **Adapters**: {_links('adapters', system.adapters) or 'none of its own'}\n"
            f"- **What we measured**: [{system.results.removesuffix('.md')}]({system.results})"
        ]
        rows = [
            (
                preset.place,
                f"[`{preset.name}`](../reference/presets.md#{preset.name})",
                preset.title,
                measured.link(preset.name),
            )
            for preset in provenance.PRESETS.values()
            if preset.paper == name
        ]
        parts.append(table(("of the paper", "preset", "is", "result"), rows))
    return "\n\n".join(parts) + "\n"


PAIRS: Mapping[str, Mapping[str, str]] = {
    row["name"]: {key: value for key, value in row.items() if key != "name"} for row in catalogue.pairs()
}
