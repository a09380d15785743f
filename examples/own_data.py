"""Your own images: arrays, labels, which hospital each comes from, and which patient."""

from __future__ import annotations

import numpy as np

import fedshift

HOSPITALS = ("berlin", "lima", "osaka")


def scans() -> tuple[np.ndarray, list[str], list[str], list[str]]:
    """What you would read from your files: 240 pictures of a bright or a dark spot; every hospital's scanner has a tint."""
    generator = np.random.default_rng(0)
    images, labels, hospitals, patients = [], [], [], []
    y, x = np.mgrid[:24, :24]
    for number in range(240):
        hospital, bright = number % 3, bool((number // 6) % 2)
        row, column = generator.uniform(6, 18, 2)
        spot = np.exp(-((y - row) ** 2 + (x - column) ** 2) / 12)
        grey = 0.5 + (0.4 if bright else -0.4) * spot + generator.normal(0, 0.08, spot.shape)
        tint = np.array([[1.0, 0.8, 0.7], [0.7, 1.0, 0.8], [0.8, 0.7, 1.0]])[hospital]
        images.append((255 * np.clip(grey[..., None] * tint, 0, 1)).astype(np.uint8))
        labels.append("hyper" if bright else "hypo")
        hospitals.append(HOSPITALS[hospital])
        patients.append(f"P{number // 2}")  # two pictures each: they stay on one side of every split
    return np.stack(images), labels, hospitals, patients


def main() -> None:
    """Train on all hospitals, test each on its own images and on corrupted ones."""
    images, labels, hospitals, patients = scans()
    pool = fedshift.from_arrays(images, labels, domains=hospitals, groups=patients)
    experiment = fedshift.Experiment(
        name="own-data",
        rounds=8,
        data={"size": 24},
        stream=[
            {"name": "original", "kind": "original"},
            {"name": "corrupted", "kind": "corrupted", "severity": 3},
        ],
        model={"name": "cnn", "norm": True},
        train={"lr": 0.05, "momentum": 0.9, "batch-size": 16},
        method=[{"name": "fedavg", "adapters": ["none", "tent"]}, {"name": "fedbn"}],
    )
    result = fedshift.run(experiment, data=pool)
    for row in result.rows:
        print(f"{row.method:10} {row.adapter:6}", row.by_client("original/clients"))
    chosen = result.advice().chosen
    print("deploy", chosen.title if chosen else "nothing yet")


if __name__ == "__main__":
    main()
