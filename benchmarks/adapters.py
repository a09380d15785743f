"""How fast test-time adapters go along a stream, in microseconds per sample and as ratios taken in one run.

    python benchmarks/adapters.py gpu     streams of 12,000 on a GPU
    python benchmarks/adapters.py cpu     streams of 4,000 (the-plus: 16) on one core
    python benchmarks/adapters.py gpu --profile the-plus memo     where the time goes, kernel by kernel, for 4,096 samples

The network is the CNN of the FedTHE paper with two heads. Beside our adapters stands the plain way to do what ``the`` does:
autograd and torch.optim.Adam, one by one and in batches of 32, on features that are already there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import networks
from fedshift.blocks.mean_views import with_views
from fedshift.core.adapter import Adapter
from fedshift.core.arch import Arch, Output
from fedshift.core.method import Train
from fedshift.core.registry import ADAPTERS
from fedshift.core.tree import Tree, pick
from fedshift.data.task import Client, Samples, Task
from fedshift.engines.auto import compute_for, engine_for
from fedshift.engines.base import Compute
from fedshift.engines.torch_flags import steady
from fedshift.models.cnn import CNN
from fedshift.systems.fedthe.method import FedTHE

AUTHORS = {"gpu": {"one by one": 36_000, "batches of 32": 1_040, "the-plus": 62_000}}
AUTHORS["cpu"] = {"one by one": 17_700, "batches of 32": 2_550, "the-plus": 128_000}


def stream(count: int, device: torch.device) -> Samples:
    """Random images, where engines have them: on the device."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels, ids = torch.randint(0, 10, (count,), generator=generator), torch.arange(count)
    return Samples(images.to(device), labels.to(device), ids.to(device), torch.arange(count))


def two_heads(method: FedTHE, device: torch.device) -> Tree:
    """A deployed model whose heads differ."""
    model, other = method.arch.init(0), method.arch.init(1)
    features = method.arch.feature_size
    tree = {
        "model": model,
        "generic": pick(other, method.arch.head),
        "descriptors": {"global": torch.rand(features), "local": torch.rand(features)},
        "rotation": {"rotation.weight": torch.zeros(4, features), "rotation.bias": torch.zeros(4)},
        "global": other,
    }
    return {slot: {name: leaf.to(device) for name, leaf in leaves.items()} for slot, leaves in tree.items()}


def per_sample(go: Callable[[], object], count: int, device: torch.device, repeats: int = 3) -> float:
    """Median microseconds for a sample, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        go()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times[1:]) / count


def along(adapter: Adapter, tree: Tree, samples: Samples, compute: Compute, clients: int = 1) -> Callable[[], object]:
    """The whole stream through an adapter as a run does it, cut into those of so many clients."""
    none = torch.zeros(0, dtype=torch.int64)
    owned = enumerate(samples.index.cpu().chunk(clients))
    owners = tuple(Client(f"client-{k}", none, none, own) for k, own in owned)
    images, labels, ids = (getattr(samples, name).cpu() for name in ("images", "labels", "ids"))
    task = Task(images, labels, ids, tuple("0123456789"), owners)
    _, engine = engine_for("auto", compute, True, clients)
    models = {client.name: tree for client in owners}

    def go() -> None:
        engine.evaluate(adapter, models, task, ["test"], 0)

    return go


def search_alone(method: FedTHE, tree: Tree, samples: Samples, device: torch.device) -> Callable[[], object]:
    """``the`` on a stream whose forward pass is already done."""
    x = samples.images.to(device).float() / 255
    with torch.no_grad():
        parts = [method.predict(tree, part) for part in x.split(512)]
    done = Output(torch.cat([part.logits for part in parts]), torch.cat([part.features for part in parts]), {}, {})
    adapter = ADAPTERS["the"].make(arch=method.arch, predict_with=lambda *_: done)

    def go() -> None:
        with torch.no_grad():
            adapter.predict(adapter.init(tree), x, {})

    return go


def plain_search(
    method: FedTHE, tree: Tree, samples: Samples, batch: int, device: torch.device
) -> Callable[[], object]:
    """FedTHE's weights by autograd and torch.optim.Adam, a batch at a time; features are computed beforehand."""
    with torch.no_grad():
        x = samples.images.to(device).float() / 255
        features = torch.cat([method.arch(tree["model"], part).features for part in x.split(512)])
    local, common = (tree["descriptors"][name] for name in ("local", "global"))

    def weights(h: Tensor) -> Tensor:
        with torch.no_grad():
            y_l, y_g = method.arch.classify(tree["model"], h), method.arch.classify(tree["generic"], h)
            trust = F.cosine_similarity(y_g.softmax(1), y_l.softmax(1))
        a = torch.ones(len(h), 2, device=device, requires_grad=True)
        adam = torch.optim.Adam([a], lr=0.1)
        for _ in range(20):
            e = a.softmax(1)[:, :1]
            log_p = (e * y_g + (1 - e) * y_l).log_softmax(1)
            far = e[:, 0] * (h - common).norm(dim=1) + (1 - e[:, 0]) * (h - local).norm(dim=1)
            loss = (trust * -(log_p.exp() * log_p).sum(1) + (1 - trust) * far).sum()
            adam.zero_grad()
            loss.backward()
            adam.step()
        return a.softmax(1)[:, 0].detach()

    def go() -> None:
        mean = features[0]
        for part in features.split(batch):
            smoothed = []
            for h in part:
                smoothed.append(0.3 * h + 0.7 * mean)
                mean = 0.1 * h + 0.9 * mean
            weights(torch.stack(smoothed))

    return go


def main() -> None:
    """On a GPU or a CPU, with the settings of a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=["gpu", "cpu"])
    parser.add_argument("--profile", nargs="+", default=[], metavar="ADAPTER", help="kernels of these, and no table")
    options = parser.parse_args()
    where = options.where
    device = torch.device("cuda" if where == "gpu" else "cpu")
    compute = compute_for(device.type, "auto")
    with steady(compute.tf32):
        for name in options.profile:
            profiled(name, compute)
        if not options.profile:
            table(where, device, compute)


def profiled(name: str, compute: Compute, count: int = 4_096, rows: int = 14) -> None:
    """The longest kernels of one adapter, in microseconds a sample."""
    method = two_headed()
    tree, samples = two_heads(method, compute.device), stream(count, compute.device)
    go = along(_make(name, method), tree, samples, compute)
    print(f"{name}: {per_sample(go, count, compute.device, repeats=2):.1f} us a sample")
    networks.show(lambda: (go(), torch.cuda.synchronize(), count)[-1], count, rows)


def two_headed() -> FedTHE:
    """A method whose models have what every adapter here asks for."""
    arch = Arch.of(lambda: CNN(bias=False).make((3, 32, 32), 10), (3, 32, 32), "cnn")
    return FedTHE(arch=arch, train=Train(lr=0.01))


def table(where: str, device: torch.device, compute: Compute) -> None:
    """Everything, one after the other."""
    method = two_headed()
    tree = two_heads(method, device)
    sizes = {"gpu": (12_000, 12_000, 64, 1_024), "cpu": (4_000, 16, 64, 1_024)}[where]
    whole, tuned, alone, batched = (stream(size, device) for size in sizes)
    found = {
        name: per_sample(along(_make(name, method), tree, samples, compute), len(samples), device)
        for name, samples in [("none", whole), ("the", whole), ("t3a", whole), ("tsa", whole)]
    }
    at_home = {**tree, "home": {"labels": torch.arange(10, device=device).double()}}
    found["home-or-away"] = per_sample(
        along(_make("home-or-away", method), at_home, whole, compute), len(whole), device
    )
    viewed = with_views(ADAPTERS["ours"].make)(arch=method.arch, predict_with=method.predict)
    found["ours, 8 views"] = per_sample(along(viewed, at_home, batched, compute), len(batched), device, repeats=2)
    for name in ("the-plus", "memo", "lp-ft"):
        found[name] = per_sample(along(_make(name, method), tree, tuned, compute), len(tuned), device, repeats=2)
    one = tuned if where == "gpu" else alone
    found["ttt (one stream)"] = per_sample(along(_make("ttt", method), tree, one, compute), len(one), device, 2)
    ttt = along(_make("ttt", method), tree, batched, compute, clients=16)
    found["ttt (16 streams)"] = per_sample(ttt, len(batched), device, 2)
    found["plain search, one by one"] = per_sample(plain_search(method, tree, alone, 1, device), len(alone), device, 2)
    found["plain search, batches of 32"] = per_sample(
        plain_search(method, tree, batched, 32, device), len(batched), device, 2
    )
    print(f"{'':32s}{'us per sample':>14s}")
    for name, value in found.items():
        print(f"{name:32s}{value:14.2f}")
    authors = AUTHORS[where]
    search = per_sample(search_alone(method, tree, whole, device), len(whole), device)
    print(f"\nthe, net of the forward pass: {search:.2f} us")
    print(f"  {found['plain search, batches of 32'] / search:.0f} x faster than the plain search in batches of 32")
    print(f"  {found['plain search, one by one'] / search:.0f} x faster than the plain search one by one")
    print(f"  {authors['batches of 32'] / search:.0f} x faster than the authors' published code in batches of 32")
    print(f"the-plus takes {found['the-plus'] / found['home-or-away']:.0f} times as long as home-or-away,", end=" ")
    print(f"{found['the-plus'] / found['ours, 8 views']:.0f} times as long as ours with 8 views")
    print(f"the-plus: {authors['the-plus'] / found['the-plus']:.0f} x faster than the authors' published code")


def _make(name: str, method: FedTHE) -> Adapter:
    return ADAPTERS[name].make(arch=method.arch, predict_with=method.predict)


if __name__ == "__main__":
    main()
