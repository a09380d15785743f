"""Which methods meet which adapters: computed from what one deploys and the other needs, never listed by hand."""

from __future__ import annotations

from collections.abc import Mapping

from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch
from fedshift.core.registry import METHODS

REASONS: Mapping[str, str] = {
    "norm": "normalisation layers (for instance [model] norm = true)",
    "batch-norm": "BatchNorm layers (for instance [model] norm = true)",
}

SLOTS: Mapping[str, str] = {
    "generic": "a global head beside the personal one",
    "global": "a global model beside the personal one",
    "descriptors": "feature descriptors",
    "rotation": "a rotation head",
    "learned-loss": "a loss learnt for adapting",
}


def properties(arch: Arch) -> frozenset[str]:
    """What a network has that somebody may need."""
    there = {"norm": bool(arch.norm), "batch-norm": arch.has_batch_norm}
    return arch.capabilities | {name for name, has in there.items() if has}


def _missing(who: str, needs: frozenset[str], arch: Arch, reasons: Mapping[str, str]) -> str | None:
    lacking = sorted(needs - properties(arch))
    words = [{**REASONS, **reasons}.get(word, word) for word in lacking]
    return f"{who} needs {words[0]}, which model {arch.name!r} does not have" if words else None


def missing_for_method(name: str, needs: frozenset[str], arch: Arch) -> str | None:
    """One sentence on why this method cannot run on this network, or None."""
    return _missing(f"method {name!r}", needs, arch, METHODS[name].make.reasons if name in METHODS else {})


def missing_for_pair(method: str, deploys: frozenset[str], adapter_name: str, adapter: Adapter) -> str | None:
    """One sentence on why this adapter cannot follow this method, or None if the pair is valid."""
    slots = sorted(adapter.slots() - deploys)
    if slots:
        wanted = ", ".join(SLOTS.get(slot, slot) for slot in slots)
        able = [name for name, entry in METHODS.items() if adapter.slots() <= entry.make.provides]
        hint = f", but {', '.join(able)} would" if able else ""
        return f"adapter {adapter_name!r} needs {wanted}, which method {method!r} does not deploy{hint}"
    return _missing(f"adapter {adapter_name!r}", adapter.requirements(), adapter.arch, adapter.reasons)
