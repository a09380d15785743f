"""Contact sheets: all corruptions at all severities."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from sklearn.datasets import load_sample_image

from fedshift.data import corruptions


def contact_sheet(side: int, path: Path) -> None:
    """All corruptions at all severities on crops of scikit-learn's photographs."""
    china, flower = (Image.fromarray(load_sample_image(name)) for name in ("china.jpg", "flower.jpg"))
    crops = [china.crop((200, 60, 500, 360)), flower.crop((150, 60, 450, 360))]
    pixels = [np.asarray(crop.resize((side, side), Image.Resampling.BICUBIC)) for crop in crops]
    figure = Figure(figsize=(7.4, 16), layout="constrained")
    axes = figure.subplots(len(corruptions.NAMES), 6)
    for row, name in enumerate(corruptions.NAMES):
        image = torch.from_numpy(pixels[row % 2].copy()).permute(2, 0, 1)[None]
        shown = [image, *(corruptions.corrupt(image, name, severity, 0, torch.tensor([7])) for severity in range(1, 6))]
        for column, picture in enumerate(shown):
            axis = axes[row, column]
            axis.imshow(picture[0].permute(1, 2, 0).numpy(), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title("original" if column == 0 else f"severity {column}", fontsize=9)
        axes[row, 0].set_ylabel(name, fontsize=9)
    figure.savefig(path, dpi=70)
