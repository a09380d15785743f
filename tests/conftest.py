"""Shared by all tests: one torch thread, a cache of their own, tiny networks and data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedshift.core.arch import Arch
from fedshift.core.method import Train
from fedshift.core.registry import Registry, with_options
from fedshift.data.task import Client, Task
from fedshift.errors import UserError
from fedshift.models.cnn import CNN
from fedshift.models.mlp import MLP
from tests.forks import Forks, forking

torch.set_num_threads(1)


# What runs when. A test without a mark is in-process and belongs to `make test`; `system` is real processes, `grid` every
# case of a grid of which `make test` has some, `long` what takes minutes for one case: whole federations, fuzzing.
TIERS = ("quick", "test", "system", "grid", "long", "all")
QUICK_METHODS = ("fedavg", "scaffold", "fedbn", "finetune", "fedthe", "fedicon", "fedcir", "fedtta", "fdse", "fedmd")
QUICK = (
    "core",
    "blocks",
    "store",
    "experiment/test_extends.py",
    "test_imports.py",
    "test_engines_agree.py",
    "test_pairs.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=TIERS, default="test", help="quick, test (in-process), system, grid, long or all"
    )
    parser.addoption("--shard", default="", help="K/N: every N-th test, beginning with the K-th (from 1)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    named = [arg for arg in config.args if "::" in arg]  # whoever names a test wants it
    kept, other = [], []
    for item in items:
        marks = {mark for mark in ("system", "grid", "long") if mark in item.keywords}
        tiers = {
            "quick": not marks and _quick(item),
            "test": not marks,
            "system": marks == {"system"},
            "grid": "grid" in marks and "long" not in marks,
            "long": "long" in marks,
            "all": True,
        }
        wanted = bool(named) or tiers[tier]
        (kept if wanted else other).append(item)
    if shard := config.getoption("--shard"):
        number, count = map(int, shard.split("/"))
        other += [item for k, item in enumerate(kept) if k % count != number - 1]
        kept = kept[number - 1 :: count]
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = kept


def some_of(methods: Iterable[str]) -> list[Any]:
    """Methods as parameters: one of each family in `make test`, the others in the grid."""
    return [name if name in QUICK_METHODS else pytest.param(name, marks=pytest.mark.grid) for name in methods]


def some_with(methods: Iterable[str], others: Iterable[object]) -> list[Any]:
    """Every method with each of some other things: one method of each family in `make test`, the others in the grid."""
    others = list(others)
    return [
        pytest.param(name, other, marks=[] if name in QUICK_METHODS else [pytest.mark.grid])
        for name in methods
        for other in others
    ]


def _quick(item: pytest.Item) -> bool:
    """The contract, one method of each family, the sequential engine: what one runs while one writes."""
    place = item.path.relative_to(Path(__file__).parent).as_posix()
    if not place.startswith(QUICK):
        return False
    parameters = getattr(item, "callspec", None)
    method = None if parameters is None else parameters.params.get("name", parameters.params.get("method_name"))
    return method is None or method in QUICK_METHODS


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Commands in processes of their own, at once."""
    with forking(tmp_path_factory.mktemp("forks")) as made:
        yield made


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    os.environ["FEDSHIFT_CACHE"] = str(tmp_path_factory.mktemp("cache"))


def ragged_task(sizes: tuple[int, ...] = (33, 7, 1, 20, 40), side: int = 8, classes: int = 4, unseen: int = 0) -> Task:
    """Clients of very different size, one smaller than a batch, one with a single sample."""
    generator = torch.Generator().manual_seed(0)
    total = sum(sizes) + 7 * len(sizes) + 5 * unseen
    images = torch.randint(0, 256, (total, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, classes, (total,), generator=generator)
    order = torch.randperm(total, generator=generator)
    clients, start = [], 0
    for number, size in enumerate(sizes):
        train, val, test = order[start : start + size + 7].split([size, 3, 4])
        clients.append(Client(f"client-{number}", train, val, test))
        start += size + 7
    none = torch.zeros(0, dtype=torch.int64)
    strangers = tuple(
        Client(f"stranger-{u}", none, none, order[start + 5 * u : start + 5 * u + 5]) for u in range(unseen)
    )
    names = tuple(f"class-{c}" for c in range(classes))
    return Task(
        images, labels, torch.arange(total), names, tuple(clients), strangers, public=torch.arange(6), hash="ragged"
    )


def tiny_arch(kind: str = "cnn", norm: bool = False, side: int = 8, classes: int = 4) -> Arch:
    """A network small enough for hundreds of tests."""
    shape = (3, side, side)
    if kind == "mlp":
        return Arch.of(lambda: MLP(hidden=(6,), norm=norm).make(shape, classes), shape, "mlp")
    return Arch.of(lambda: CNN(width=2, hidden=6, norm=norm).make(shape, classes), shape, "cnn")


def tiny_train(**changes: object) -> Train:
    settings: dict[str, object] = {
        "lr": 0.05,
        "batch_size": 8,
        "local_epochs": 2,
        "momentum": 0.9,
        "weight_decay": 1e-3,
    }
    return Train(**{**settings, **changes})  # type: ignore[arg-type]


def refusal(registry: Registry[Any], noun: str, name: str, options: Mapping[str, Any], **fixed: Any) -> str:
    """The sentence with which these options of a TOML file are refused."""
    kebab = {key.replace("_", "-"): value for key, value in options.items()}
    with pytest.raises(UserError) as said:
        with_options(registry[name].make, f"{noun} {name!r}", kebab, **fixed)
    return str(said.value)


def unseal(folder: Path) -> None:
    """A run folder as versions without seals left it, states aside."""
    config = (folder / "config.toml").read_text().partition("# seal: ")[0]
    (folder / "config.toml").write_text(config)
    done = json.loads((folder / "done").read_text())
    kept = {key: value for key, value in done.items() if key not in ("seal", "sealed", "lines", "adapted-rounds")}
    (folder / "done").write_text(json.dumps(kept))
    for path in (folder / "metrics.jsonl", *folder.glob("adapters/*.jsonl"), *folder.glob("twins/*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        plain = [{key: value for key, value in line.items() if key != "seal"} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in plain))


def edit(path: Path, old: str, new: str) -> None:
    """A settings file as somebody has changed it by hand, and said so in its last line."""
    text, mark, _ = path.read_text().partition("# seal: ")
    assert old in text
    assert mark
    path.write_text(f"{text.replace(old, new)}{mark}edited\n")
