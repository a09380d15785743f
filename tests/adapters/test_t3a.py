"""T3A against a slow loop that sorts its supports anew for every sample."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedshift.adapters import t3a
from fedshift.adapters.t3a import PrototypeClassifier
from fedshift.core.arch import Arch
from fedshift.core.tree import Tree
from fedshift.errors import UserError
from fedshift.methods.fedavg import FedAvg
from tests.conftest import tiny_train

SIZE = 6
SHAPE = (1, 2, 3)


def arch_of(classes: int, bias: bool = False) -> Arch:
    """An image is its own feature."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(SIZE, classes, bias=bias))
    return Arch.of(lambda: copy.deepcopy(network), SHAPE, "linear", mean=(0.0,), std=(1.0,))


def made(weight: Tensor, bias: Tensor | None = None, keep: int = 50) -> tuple[PrototypeClassifier, Tree]:
    arch = arch_of(len(weight), bias is not None)
    method = FedAvg(arch=arch, train=tiny_train())
    head = {"1.weight": weight} if bias is None else {"1.weight": weight, "1.bias": bias}
    return PrototypeClassifier(arch=arch, predict_with=method.predict, keep=keep), {"model": head}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow(weight: Tensor, bias: Tensor | None, features: Tensor, keep: int) -> tuple[Tensor, list[list[int]]]:
    """Scores of every sample, and which supports are left: -1, -2, ... are the classifier's rows.

    One list of supports, never shortened: what counts for sample n is sorted out from all that came until n. That is
    another way to the same answer than throwing the worst away, for a support beyond the best ``keep`` never comes back.
    """
    classes = len(weight)
    supports: list[tuple[float, int, int, Tensor]] = []  # entropy, arrival, class, unit feature

    def add(z: Tensor, arrival: int) -> None:
        logits = (weight * z).sum(1) + (0 if bias is None else bias)
        p = logits.softmax(0).tolist()
        uncertainty = -sum(q * math.log(q) for q in p if q > 0)
        norm = math.sqrt(float((z * z).sum()))
        supports.append((round(uncertainty, 12), arrival, int(logits.argmax()), z / norm if norm else z))

    for row in range(classes):
        add(weight[row], row - classes)
    scores = []
    for n, z in enumerate(features):
        add(z, n)
        row = []
        for c in range(classes):
            best = sorted(entry[:2] for entry in supports if entry[2] == c)[:keep]
            chosen = {arrival for _, arrival in best}
            total = sum((unit for _, arrival, _, unit in supports if arrival in chosen), torch.zeros(SIZE).double())
            length = math.sqrt(float((total * total).sum()))
            row.append(float((z * total).sum()) / length if length > 1e-9 else 0.0)
        scores.append(row)
        if n % 50 == 49:  # only to be faster: the ones that can never count again
            worst = {entry[1] for c in range(classes) for entry in sorted(e[:3] for e in supports if e[2] == c)[keep:]}
            supports = [entry for entry in supports if entry[1] not in worst]
    left = [sorted(entry[:2] for entry in supports if entry[2] == c)[:keep] for c in range(classes)]
    return torch.tensor(scores, dtype=torch.float64), [sorted(arrival for _, arrival in own) for own in left]


def fast(adapter: PrototypeClassifier, tree: Tree, features: Tensor, size: int = 10_000) -> tuple[Tensor, Tree]:
    state, parts = adapter.init(tree), []
    for chunk in features.split(size):
        output, state = adapter.predict(state, chunk.reshape(-1, *SHAPE), {})
        parts.append(output.logits)
    return torch.cat(parts), state


def check(
    weight: Tensor, features: Tensor, keep: int, bias: Tensor | None = None, sizes: tuple[int, ...] = ()
) -> Tensor:
    adapter, tree = made(weight, bias, keep)
    expected, left = slow(weight, bias, features, keep)
    found, state = fast(adapter, tree, features)
    assert float((found - expected).abs().max()) < 1e-9 * max(1.0, float(features.norm(dim=1).max()))
    assert torch.equal(found.argmax(1), expected.argmax(1))
    counts = state["supports"]["label"].bincount(minlength=len(weight)).tolist()
    assert counts == [len(own) for own in left]
    for size in sizes:
        again, last = fast(adapter, tree, features, size)
        assert float((again - found).abs().max()) < 1e-10 * max(1.0, float(features.norm(dim=1).max()))
        assert torch.equal(again.argmax(1), found.argmax(1))
        for name, leaf in state["supports"].items():
            assert torch.allclose(last["supports"][name].double(), leaf.double(), rtol=0, atol=1e-12), name
    return found


@pytest.mark.parametrize("keep", [1, 2, 50])
def test_a_stream_at_once_and_in_chunks_is_the_loop(keep: int) -> None:
    check(normal(4, SIZE), normal(90, SIZE, seed=1), keep, sizes=(1, 7, 32))


@pytest.mark.parametrize("keep", [1, 2, 50])
def test_a_bias_labels_and_ranks_supports_and_does_not_score(keep: int) -> None:
    weight, features, bias = normal(4, SIZE), normal(90, SIZE, seed=1), 2 * normal(4, seed=2)
    with_bias = check(weight, features, keep, bias, sizes=(7,))
    assert float((with_bias - check(weight, features, keep)).abs().max()) > 1e-2


@pytest.mark.parametrize("keep", [2, 50])
def test_a_long_stream_throws_supports_away(keep: int) -> None:
    """2,000 samples of five classes: every class is full long before the end, and blocks of 512 end in between."""
    weight, features = normal(5, SIZE), normal(2000, SIZE, seed=1)
    check(weight, features, keep, sizes=(700,))
    adapter, tree = made(weight, keep=keep)
    _, state = fast(adapter, tree, features)
    assert state["supports"]["label"].bincount().tolist() == [keep] * 5


def test_small_blocks_inside_a_chunk_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory for prototypes is bounded, whatever the chunk."""
    adapter, tree = made(normal(5, SIZE), keep=3)
    features = normal(200, SIZE, seed=1)
    whole, state = fast(adapter, tree, features)
    for numbers in (1, 5 * SIZE * 7, 5 * SIZE * 33):
        monkeypatch.setattr(t3a, "PROTOTYPE_NUMBERS", numbers)
        parts, last = fast(adapter, tree, features)
        assert float((parts - whole).abs().max()) < 1e-10
        assert torch.equal(last["supports"]["label"], state["supports"]["label"])


@pytest.mark.parametrize("keep", [1, 2, 50])
def test_classes_that_start_empty_and_classes_that_start_with_two(keep: int) -> None:
    """A row is filed under what it predicts for itself: row 1 is twice row 0, so class 1 has both and class 0 none."""
    weight = torch.zeros(3, SIZE, dtype=torch.float64)
    weight[0, 0], weight[1, 0], weight[2, 1] = 1.0, 2.0, 1.0
    adapter, tree = made(weight, keep=keep)
    assert adapter.init(tree)["supports"]["label"].tolist() == [1, 1, 2]
    features = normal(60, SIZE, seed=3)
    found = check(weight, features, keep, sizes=(1, 7))
    first = found[0]  # nobody has come to class 0 unless the first sample did
    joined = int((weight @ features[0]).argmax())
    assert joined == 0 or float(first[0]) == 0.0
    always = torch.cat([features[features[:, 0] > 0], torch.zeros(0, SIZE, dtype=torch.float64)])
    empty = check(weight, always, keep)  # logits of class 0 are below those of class 1 here, so it stays empty
    assert float(empty[:, 0].abs().max()) == 0.0


def test_an_empty_class_beats_classes_that_are_worse_than_nothing() -> None:
    """Score 0 wins over negative ones: a consequence of the definition, and not a division by zero."""
    weight, features = torch.zeros(3, SIZE, dtype=torch.float64), torch.zeros(3, SIZE, dtype=torch.float64)
    weight[0, 0], weight[1, 0], weight[2, 1] = 1.0, 2.0, 1.0
    features[0, :2] = torch.tensor([9.0, -9.0])  # class 1's prototype from here on
    features[1, :2] = torch.tensor([-18.0, 9.0])  # class 2's
    features[2, :2] = torch.tensor([0.5, 0.9])  # class 1 by a hair, too unsure to be kept, and opposite to both
    scores = check(weight, features, keep=1, sizes=(1,))
    assert float(scores[2, 0]) == 0.0
    assert float(scores[2, 1:].max()) < 0
    assert scores.argmax(1).tolist() == [1, 2, 0]


@pytest.mark.parametrize("keep", [1, 2, 3, 5])
def test_ties_keep_the_earlier_arrival(keep: int) -> None:
    """Whole numbers, so entropies tie to the last bit; features differ where the classifier does not look."""
    weight = torch.zeros(3, SIZE, dtype=torch.float64)
    weight[0, 0] = weight[1, 1] = weight[2, 2] = 2.0
    generator = torch.Generator().manual_seed(0)
    features = torch.zeros(60, SIZE, dtype=torch.float64)
    classes = torch.randint(0, 3, (60,), generator=generator)
    features[torch.arange(60), classes] = 2.0  # as sure as the classifier's own rows
    features[:, 3:] = torch.randint(-3, 4, (60, 3), generator=generator).double()
    check(weight, features, keep, sizes=(1, 7, 32))
    adapter, tree = made(weight, keep=keep)
    _, state = fast(adapter, tree, features)
    for c in range(3):  # the row itself came first, then the first of the samples
        own = state["supports"]["unit"][state["supports"]["label"] == c]
        came = torch.cat([weight[c][None], features[classes == c]])[:keep]
        assert torch.allclose(own, came / came.norm(dim=1, keepdim=True), rtol=0, atol=1e-12)


def test_a_sample_counts_for_its_own_prediction_and_may_be_too_unsure_to_be_kept() -> None:
    weight = 3 * torch.eye(SIZE, dtype=torch.float64)[:2]
    adapter, tree = made(weight, keep=1)
    near = torch.zeros(SIZE, dtype=torch.float64)
    near[0], near[5] = 1.0, 4.0  # less sure than row 0: never a support
    scores, state = fast(adapter, tree, near[None])
    assert scores[0].tolist() == pytest.approx([1.0, 0.0])  # z . e_0
    assert state["supports"]["unit"].tolist() == torch.eye(SIZE)[:2].tolist()
    surer = 4 * near
    surer[0] = 16.0
    scores, state = fast(adapter, tree, surer[None])
    assert float(scores[0, 0]) == pytest.approx(float(surer.norm()))  # it is its class's prototype now
    assert torch.allclose(state["supports"]["unit"][-1], surer / surer.norm())


def test_features_of_nothing_are_supports_of_nothing() -> None:
    weight = normal(3, SIZE)
    features = torch.cat([torch.zeros(3, SIZE, dtype=torch.float64), normal(10, SIZE)])
    assert bool(check(weight, features, 2).isfinite().all())


def test_the_supports_are_the_streams_and_start_anew() -> None:
    adapter, tree = made(normal(4, SIZE), keep=2)
    _, state = fast(adapter, tree, normal(50, SIZE, seed=1))
    assert state["model"] is tree["model"]
    assert not torch.equal(adapter.init(tree)["supports"]["unit"], state["supports"]["unit"])
    assert len(adapter.init(tree)["supports"]["label"]) == 4


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": -1}])
def test_settings_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="keep must be positive"):
        made(normal(3, SIZE), **options)
