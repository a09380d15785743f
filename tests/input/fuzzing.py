"""Inputs nobody would write, and the rule that holds for all of them.

The rule: exit code 0; or one sentence and 2 (1 for the operating system); never a traceback, never ten seconds, never a
changed input. What was found once lies in ``corpus/`` and is tried again by ``make test``; Hypothesis keeps what it finds
in ``corpus/found``, to be added to the repository.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from tests.input.program import Said, fedshift

CORPUS = Path(__file__).parent / "corpus"
LONGEST = 10.0
BUDGET = "FEDSHIFT_FUZZ"
ENDED: Counter[int] = Counter()  # exit codes so far, for who wants to know how many there were


def budget(examples: int) -> settings:
    """So many inputs, whatever they take; ``benchmarks/torture.py`` asks for more."""
    return settings(
        max_examples=int(os.environ.get(BUDGET, examples)),
        deadline=None,
        database=DirectoryBasedExampleDatabase(CORPUS / "found"),
        suppress_health_check=list(HealthCheck),
    )


def digest(paths: Iterable[Path]) -> str:
    """Of everything an input is made of."""
    found = hashlib.blake2b()
    for path in sorted(paths):
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            found.update(f"{file} {file.is_symlink()}".encode())
            found.update(file.read_bytes() if file.is_file() else b"")
    return found.hexdigest()


def violations(*arguments: str | Path, inputs: Iterable[Path] = ()) -> list[str]:
    """Call a command on some inputs; what of the rule did not hold, which should be nothing."""
    inputs = list(inputs)
    before, started = digest(inputs), (time.process_time(), time.perf_counter())
    said = fedshift(*map(str, arguments))
    worked, took = time.process_time() - started[0], time.perf_counter() - started[1]
    ENDED[said.code] += 1
    broken = {
        f"exit code {said.code}": said.code not in (0, 1, 2),
        "a traceback": "Traceback" in said.err,
        "not one sentence": said.code in (1, 2) and not _one_sentence(said),
        "a terminal escape": "\x1b" in said.out + said.err,
        # others may use the machine: what counts is what it worked, and that it did not wait for ever
        f"{worked:.1f} s of work": worked >= LONGEST,
        f"{took:.1f} s without an answer": took >= 6 * LONGEST,
        "a changed input": digest(inputs) != before,
    }
    words = " ".join(map(str, arguments))
    return [f"{what} of fedshift {words}: {said.err[-3000:]}" for what, is_so in broken.items() if is_so]


def _one_sentence(said: Said) -> bool:
    lines = [line for line in said.err.strip().splitlines() if not line.startswith("note:")]
    typers = said.err.startswith("Usage: ")  # its own way to say it
    return typers or (len(lines) == 1 and lines[0].startswith("error: "))


# ---- values of TOML ------------------------------------------------------------------------------------------------------
numbers = st.one_of(
    st.integers(-3, 12),
    st.sampled_from([2**31, 2**63, 10**12, -(10**9), 10**30]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.booleans(),
)
texts = st.one_of(
    st.sampled_from(
        ["", "[/]", "$^$", "..", "a/b", "done", "none", "original", "fedavg", "mlp", "by-domain", "iid", "pen"]
    ),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
values = st.recursive(
    st.one_of(numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
KEYS = (
    *(
        "rounds",
        "seeds",
        "participation",
        "precision",
        "checkpoint-every",
        "baselines",
        "scale",
        "notes",
        "name",
        "title",
    ),
    *("data", "data.source", "data.columns", "data.size", "data.channels", "data.mean", "data.std", "data.domains"),
    *("data.classes", "data.limit", "data.seed", "data.attributes", "partition", "partition.kind", "partition.clients"),
    *(
        "partition.alpha",
        "partition.inside",
        "partition.min-size",
        "partition.clients-per-domain",
        "split",
        "split.train",
    ),
    *(
        "split.val",
        "split.test",
        "split.unseen",
        "split.public",
        "split.train-fraction",
        "split.train-limit",
        "split.tune",
    ),
    *("rotation", "rotation.angles", "stream", "model", "model.name", "model.hidden", "model.norm", "model.weights"),
    *(
        "train",
        "train.lr",
        "train.batch-size",
        "train.local-epochs",
        "train.local-steps",
        "train.optimiser",
        "train.clip",
    ),
    *("train.augment", "train.balance", "method", "evaluate", "evaluate.metric", "evaluate.every", "evaluate.mean-of"),
    *("evaluate.features", "sweep", "small", "extends"),
)
options = st.dictionaries(
    st.sampled_from(["name", "label", "kind", "severity", "mu", "lr", "adapters", "train", "model", "paper", "family"]),
    values,
    max_size=4,
)
tables = st.dictionaries(
    st.sampled_from(KEYS), st.one_of(values, st.lists(options, max_size=2), options), min_size=1, max_size=3
)


def toml(value: object) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        shown = (f"\\U{ord(c):08x}" if not c.isprintable() or c in '"\\' else c for c in value)
        return f'"{"".join(shown)}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(toml, value)) + "]" if isinstance(value, list) else str(value)


# ---- bytes ---------------------------------------------------------------------------------------------------------------
changes = st.lists(
    st.tuples(st.sampled_from(["cut", "flip", "zero", "insert", "double"]), st.floats(0, 1), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def damaged(content: bytes, changed: Iterable[tuple[str, float, bytes]]) -> bytes:
    """Bytes after some accidents."""
    for kind, share, some in changed:
        at = int(share * len(content))
        if kind == "cut":
            content = content[:at]
        elif kind == "double":
            content = content[:at] + content
        else:
            put = bytes(len(some)) if kind == "zero" else some
            content = content[:at] + put + content[at + (0 if kind == "insert" else len(put)) :]
    return content
