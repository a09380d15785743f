"""Which adapters an exported model comes with."""

from __future__ import annotations

from dataclasses import replace

from fedshift.core.adapter import Adapter
from fedshift.core.registry import ADAPTERS
from fedshift.errors import UserError
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.artefact import Artefact
from fedshift.runs.open import OpenRun, choose_adapter


def is_plain(name: str) -> bool:
    """Whether an adapter answers with the deployed model and changes nothing.

    >>> is_plain("none"), is_plain("tent"), is_plain("t3a")
    (True, False, False)
    """
    kind = ADAPTERS[name].make
    return all(getattr(kind, hook) is getattr(Adapter, hook) for hook in ("init", "fit", "predict"))


def run_adapter(opened: OpenRun, name: str | None) -> AdapterSpec | None:
    """One of the run's own adapters by label or name, or the one that does nothing; None where nothing is asked for."""
    if name is None:
        return None
    chosen = choose_adapter(opened.scored, name)
    if chosen.title not in opened.scored and not is_plain(chosen.name):
        raise UserError(
            f"the run was not scored with adapter {name!r} but with {', '.join(opened.scored)}; any other starts from "
            "the artefact: fedshift.load(...).adapt(images, NAME)"
        )
    return chosen


def artefact_adapter(artefact: Artefact, name: str | None) -> AdapterSpec | None:
    """The same of an artefact."""
    if name is None:
        return None
    chosen = choose_adapter({label: part.spec for label, part in artefact.adapters.items()}, name)
    if chosen.title not in artefact.adapters and not is_plain(chosen.name):
        raise UserError(f"the artefact has no adapter {name!r} but {', '.join(['none', *artefact.adapters])}")
    return chosen


def with_adapter(artefact: Artefact, chosen: AdapterSpec | None) -> Artefact:
    """The artefact with one of its adapters alone, or without any if it is one that does nothing."""
    if chosen is None:
        return artefact
    own = {} if is_plain(chosen.name) else {chosen.title: artefact.adapters[chosen.title]}
    entries = [entry for entry in artefact.config["adapter"] if entry["label"] in own]
    config = {key: value for key, value in artefact.config.items() if key != "using" or value in own}
    return replace(artefact, adapters=own, config={**config, "adapter": entries})


def refuse_adapting(artefact: Artefact, chosen: AdapterSpec | None) -> None:
    """A network file adapts to nothing."""
    asked = chosen.name if chosen is not None else ""
    used = artefact.adapters[artefact.using].spec.name if artefact.using in artefact.adapters else ""
    for name in (name for name in (asked, used) if name and not is_plain(name)):
        raise UserError(
            f"adapter {name!r} answers with more than the network, which no network file can: use --format artefact, or "
            "--adapter none for the model without adaptation"
        )
