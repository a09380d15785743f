"""What this machine has, and what to do about what it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

import fedshift
from fedshift.engines.parallel import usable_cores
from fedshift.runs.setup import cache_folder

CORE = (
    "torch",
    "numpy",
    "safetensors",
    "pydantic",
    "typer",
    "rich",
    "pillow",
    "pyarrow",
    "matplotlib",
    "scikit-learn",
    "scipy",
    "jinja2",
    "loky",
    "cloudpickle",
)
EXTRAS = {
    "hub": ("datasets", "Hugging Face hub data sets"),
    "export": ("onnxscript", "networks as ONNX, fedshift export --format onnx"),
}


def report() -> list[str]:
    """Lines for a person: versions, device, threads, memory, cache, extras."""
    lines = [
        f"fedshift {fedshift.__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages: " + ", ".join(f"{name} {_version(name)}" for name in CORE),
        _device(),
        f"cores: {usable_cores()} usable; runs use one torch thread per process, the parallel engine one process per core",
        _shared_memory(),
        f"cache: {cache_folder()}; set FEDSHIFT_CACHE to move it",
        f"data: FEDSHIFT_DATA is {os.environ.get('FEDSHIFT_DATA') or 'not set (presets on your own files need it)'}",
        "extras:",
    ]
    for extra, (module, purpose) in EXTRAS.items():
        if importlib.util.find_spec(module):
            lines.append(f"  [green]yes[/] {extra}: {purpose} ({module} {_version(module)})")
        else:
            lines.append(rf'  [yellow]no [/] {extra}: {purpose}; install with: pip install "fedshift\[{extra}]"')
    return lines


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def _device() -> str:
    if torch.cuda.is_available():
        return f"device: cuda ({torch.cuda.get_device_name()}); auto picks engine vmapped"
    return (
        "device: cpu (this torch sees no GPU); auto picks engine parallel, or vmapped for networks without convolutions"
    )


def _shared_memory() -> str:
    try:
        free = shutil.disk_usage("/dev/shm").free / 2**30
    except OSError:
        return "shared memory: none; the parallel engine uses the temporary folder"
    small = "" if free > 2 else "; too small, the parallel engine uses the temporary folder"
    return f"shared memory: {free:.1f} GiB free in /dev/shm{small}"
