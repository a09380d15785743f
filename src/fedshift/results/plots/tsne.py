"""t-SNE of saved features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedshift.core import rng
from fedshift.errors import UserError
from fedshift.store.features import Features
from fedshift.store.folder import FEATURES

LEAST = 4  # rows t-SNE can place


def embedded(features: Tensor, seed: int) -> Tensor:
    """Places in the plane for the rows of a matrix, by t-SNE: float32 [n, 2]; the same for the same seed.

    >>> embedded(torch.eye(6), seed=0).shape
    torch.Size([6, 2])
    """
    from sklearn.manifold import TSNE

    count, width = features.shape
    if count < LEAST:
        raise UserError(f"t-SNE needs at least {LEAST} images, not {count}; run it with -c evaluate.features=200")
    if not bool(features.isfinite().all()):
        raise UserError("t-SNE needs finite features; the training of this run has diverged")
    if torch.equal(features, features[:1].expand_as(features)):
        return torch.zeros(count, 2)  # all in one place, where t-SNE would divide by zero
    wide = features if width > 1 else torch.cat([features, torch.zeros_like(features)], 1)  # it starts from two axes
    perplexity = min(30.0, (count - 1) / 3)
    tsne = TSNE(init="pca", perplexity=perplexity, random_state=rng.seed_of(seed, "t-sne") % 2**32)
    return torch.from_numpy(tsne.fit_transform(wide.numpy()))


def places(made: Features) -> dict[str, Any]:
    """t-SNE of saved features as plain numbers: a list entry for each image."""
    coordinates = embedded(made.features, made.wanted.seed)
    return {
        **{key.replace("_", "-"): value for key, value in asdict(made.wanted).items()},
        "round": made.round,
        "classes": list(made.classes),
        "clients": list(made.clients),
        "unseen": list(made.unseen),
        "x": coordinates[:, 0].tolist(),
        "y": coordinates[:, 1].tolist(),
        "label": made.labels.tolist(),
        "prediction": made.predictions.tolist(),
        "client": made.client.tolist(),
    }


def with_features(folders: Sequence[Path]) -> list[Path]:
    """The run folders that have features; a UserError says how to get some if none has."""
    found = [folder for folder in folders if (folder / FEATURES).is_file()]
    if not found:
        raise UserError("no features were saved with these runs; run it with -c evaluate.features=200")
    return found
