"""An unseen hospital: it took part in no round, has a folder of pictures and no labels, and gets a model and predictions."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

import fedshift
from fedshift.data.sources import load
from fedshift.join import join


def pictures(folder: Path, count: int = 60) -> Path:
    """What the hospital has: here, digits of a kind that nobody trains on."""
    folder.mkdir(exist_ok=True)
    images = load("embedded:digits", size=16).only(domains=["font"]).images[:count]
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{number:03}.png")
    return folder


def main() -> None:
    """Train without it, let it join, serve it, write its model."""
    experiment = fedshift.Experiment(
        name="unseen-hospital",
        rounds=10,
        baselines=False,
        data={"size": 16},
        split={"unseen": ["font"], "train-limit": 120},
        train={"lr": 0.05, "momentum": 0.9, "batch-size": 20},
        model={"name": "cnn", "norm": True},
        method=[{"name": "fedbn", "adapters": ["none", "fedbn-align"]}],
    )
    result = fedshift.run(experiment)
    (run,) = result.folders
    for adapter in ("none", "fedbn-align"):
        row = next(row for row in result.rows if row.adapter == adapter)
        print(f"{adapter:12} at the unseen client, had it labels: {row.by_client('original/unseen')}")

    scans = pictures(Path("scans"))
    joined = join(run, scans, adapter="fedbn-align")
    print(f"mean confidence {joined.confidence:.2f}; see {joined.files[0].parent}")

    served = fedshift.load(joined.files[0].parent)
    answers = served.predict([scans / "000.png", scans / "001.png"])
    print(answers.labels, answers.confidence)


if __name__ == "__main__":
    main()
