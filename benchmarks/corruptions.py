"""Seconds per corruption at severity 5: ``python benchmarks/corruptions.py --device cuda --images 10000``."""

from __future__ import annotations

import argparse
import time

import torch

from fedshift.core import rng
from fedshift.data.corruptions import NAMES, corrupt, corrupt_mixed


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _images(count: int, side: int, device: torch.device) -> torch.Tensor:
    """Smooth random pictures with all grey levels, the same on every machine."""
    coarse = rng.uniform(0, torch.arange(count), (3, 6, 6))
    fine = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True)
    return (fine * 255).to(torch.uint8).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the fifteen corruptions.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--side", type=int, default=32)
    parser.add_argument("--severity", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    images, ids = _images(args.images, args.side, device), torch.arange(args.images, device=device)
    for name in NAMES:  # loads the kernels
        corrupt(images[:2], name, args.severity, 0, ids[:2])
    total = 0.0
    print(f"{args.images} images of {args.side} x {args.side} x 3, severity {args.severity}, {args.device}")
    for name in NAMES:
        _wait(device)
        start = time.perf_counter()
        corrupt(images, name, args.severity, 0, ids)
        _wait(device)
        seconds = time.perf_counter() - start
        total += seconds
        print(f"{name:16s}{seconds:9.3f} s")
    print(f"{'total':16s}{total:9.3f} s")
    start = time.perf_counter()
    corrupt_mixed(images, args.severity, 0, ids)
    _wait(device)
    print(f"{'mixed':16s}{time.perf_counter() - start:9.3f} s")


if __name__ == "__main__":
    main()
