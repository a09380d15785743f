"""What a person is told after a model was exported."""

from __future__ import annotations

from fedshift.export.exporting import COMPARED, Exported, facts_of
from fedshift.export.network_files import NETWORK_FILES
from fedshift.export.whose import UNSEEN
from fedshift.runs.answers import names_of
from fedshift.runs.open import listed


def headline(exported: Exported) -> str:
    """Whose model it is."""
    config = exported.artefact.config
    origin, title = config["origin"], exported.artefact.setup.spec.title
    who = "any unseen client" if config["client"] == UNSEEN else config["client"]
    why = "the best on validation" if origin["selection"] == "best-val" else "the last one"
    return (
        f"The model of {who} with {title}, seed {origin['seed']} (round {origin['round']}, {why}), as {exported.format}"
    )


def lines(exported: Exported) -> list[str]:
    """How it is used."""
    artefact, folder = exported.artefact, exported.folder
    names = ", ".join(path.relative_to(folder).as_posix() for path in exported.files)
    classes = names_of(artefact.classes, artefact.method.arch.classes)
    told = [*_network(exported), f"Classes: {listed(classes)}."] if exported.apart is not None else _artefact(exported)
    return [*told, f"Files in {folder}: {names}"]


def _network(exported: Exported) -> list[str]:
    file = NETWORK_FILES[exported.format]
    facts = facts_of(exported.artefact, file)
    return [
        f"In: {facts['input']}; the normalisation is inside.",
        f"Out: {facts['outputs']}.",
        f"Read again and compared with fedshift on {COMPARED} images: no probability is more than "
        f"{exported.apart:.1g} apart.",
        *["It does not adapt; --format artefact can."] * bool(exported.artefact.adapters),
        f"Use it: {file.use.replace('FILE', str(exported.files[0]))}",
    ]


def _artefact(exported: Exported) -> list[str]:
    loaded, adapters = f"fedshift.load({str(exported.folder)!r})", ", ".join(exported.artefact.adapters)
    told = [f"Use it: {loaded}.predict(images), with images of any size"]
    return told + [f"Or let it adapt: {loaded}.adapt(images, NAME), NAME: {adapters}"] * bool(adapters)
