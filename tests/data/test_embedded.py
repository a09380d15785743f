"""The embedded digits: deterministic, disjoint, balanced, readable and different from each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from torch import nn

from fedshift.data import embedded
from fedshift.data.embedded import digits
from fedshift.data.pool import Pool
from fedshift.errors import UserError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def pool() -> Pool:
    return digits()


def test_shape_and_facts(pool: Pool) -> None:
    assert pool.images.shape == (2247, 3, 32, 32)
    assert pool.images.dtype == torch.uint8
    assert pool.classes == tuple("0123456789")
    assert pool.domain_names == ("pen", "paper", "china", "flower", "font")
    assert pool.splits is None
    assert pool.domains is not None
    assert torch.bincount(pool.domains).tolist() == [450, 449, 449, 449, 450]


def test_classes_are_balanced_in_every_domain(pool: Pool) -> None:
    for domain in range(5):
        counts = torch.bincount(pool.labels[pool.domains == domain], minlength=10)
        assert 43 <= int(counts.min()) <= int(counts.max()) <= 46


def test_every_handwritten_digit_is_in_exactly_one_domain() -> None:
    _, classes = embedded._handwriting()
    for seed in (0, 1):
        hands = embedded._deal(classes, 4, seed)
        assert sorted(np.concatenate(hands).tolist()) == list(range(1797))
    assert not np.array_equal(embedded._deal(classes, 4, 0)[0], hands[0])


def test_no_two_images_are_equal(pool: Pool) -> None:
    assert len({image.numpy().tobytes() for image in pool.images}) == len(pool)


@pytest.mark.system
def test_same_bytes_in_another_process(pool: Pool) -> None:
    code = "from fedshift.data.embedded import digits; print(digits().provenance['digest'])"
    # a hash seed of its own: nothing may depend on the order of a set
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == pool.provenance["digest"]


def test_seed_and_size_matter(pool: Pool) -> None:
    other = digits(seed=1)
    assert not torch.equal(other.images, pool.images)
    small = digits(size=20)
    assert small.images.shape[2:] == (20, 20)
    assert torch.equal(small.labels, pool.labels)  # the same digits in the same places, only smaller


def test_repeated_calls_agree_and_are_fast(pool: Pool) -> None:
    start = time.perf_counter()
    again = digits()
    assert time.perf_counter() - start < 3.0
    assert torch.equal(again.images, pool.images)


def test_domains_look_different(pool: Pool) -> None:
    pictures = pool.images.float()
    corner = pictures[:, :, :3, :3].mean(dim=(1, 2, 3))
    mean = [float(corner[pool.domains == domain].mean()) for domain in range(5)]
    assert mean[0] < 5 < 180 < mean[1]  # black behind the pen, light paper
    grey = (pictures[:, 0] - pictures[:, 1]).abs().mean(dim=(1, 2))
    assert float(grey[pool.domains == 0].max()) == 0.0
    assert float(grey[pool.domains == 4].mean()) > 20


def test_photographs_are_attributed(pool: Pool) -> None:
    said = json.dumps(pool.provenance)
    assert json.loads(said) == pool.provenance
    for words in ("danielbuechele", "vultilion", "creativecommons.org/licenses/by/2.0", "china.jpg", "flower.jpg"):
        assert words in said
        assert words in str(embedded.__doc__)


@pytest.mark.parametrize("size", [0, 7, -1, 2.5, True, "32"])
def test_bad_sizes_are_refused(size: int) -> None:
    with pytest.raises(UserError, match="at least 8 pixels"):
        digits(size=size)


@pytest.mark.grid
def test_a_small_network_learns_every_domain(pool: Pool) -> None:
    """Six epochs are enough to read all five domains: the default task is neither noise nor trivial."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 10)),
    )
    x, y = pool.images.float() / 255 - 0.5, pool.labels
    order = torch.randperm(len(y))
    test, train = order[:450], order[450:]
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    net.eval()
    with torch.no_grad():
        right = (net(x[test]).argmax(1) == y[test]).float()
    assert pool.domains is not None
    accuracy = [float(right[pool.domains[test] == domain].mean()) for domain in range(5)]
    assert min(accuracy) > 0.8, accuracy
    assert sum(a > 0.85 for a in accuracy) >= 4, accuracy
