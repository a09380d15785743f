"""What this machine has, and what to do about what it lacks. Torch is not imported for it: that would take longest."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import runpy
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fedshift
from fedshift.engines.cores import usable_cores
from fedshift.store.cache import cache_folder

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
    "hub": ("datasets", "data sets and weights from the Hugging Face hub"),
    "serve": ("fastapi", "models behind HTTP, fedshift serve"),
    "dicom": ("pydicom", "DICOM images"),
    "tune": ("optuna", "a search that learns from its trials, fedshift tune --sampler tpe"),
    "privacy": ("opacus", "noise that is counted and sums that are secret, [privacy]"),
    "ray": ("ray", "several machines, fedshift run --engine ray"),
    "export": ("onnxscript", "networks as ONNX, fedshift export --format onnx"),
    "deploy": ("flwr", "federations across machines, fedshift deploy"),
    "report": ("plotly", "pages, fedshift report and fedshift watch"),
    "track": ("tensorboard", "TensorBoard, fedshift run --track tensorboard"),
    "mlflow": ("mlflow", "MLflow, fedshift run --track mlflow"),
    "notebook": ("pandas", "results as data frames, progress in notebooks"),
    "wandb": ("wandb", "Weights & Biases, fedshift run --track wandb"),
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
            lines.append(f"  yes {extra}: {purpose} ({module} {_version(module)})")
        else:
            lines.append(f'  no  {extra}: {purpose}; install with: pip install "fedshift[{extra}]"')
    return lines


def _version(package: str) -> str:
    for name in (package, f"{package}-skinny"):  # MLflow has two packages with one name inside
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "missing"


def _device() -> str:
    """What ``auto`` will find: a torch that was built for GPUs, and a driver that has one."""
    gpu = _gpu() if _built_for_gpus() else None
    if gpu is not None:
        return f"device: cuda ({gpu}); auto picks engine vmapped"
    return (
        "device: cpu (this torch sees no GPU); auto picks engine parallel, or vmapped for networks without convolutions"
    )


def _built_for_gpus() -> bool:
    """Whether torch is, as a small file of its own says."""
    found = importlib.util.find_spec("torch")
    folders = found.submodule_search_locations if found is not None else None
    written = Path(folders[0]) / "version.py" if folders else None
    return written is not None and written.is_file() and bool(runpy.run_path(str(written)).get("cuda"))


def _gpu() -> str | None:
    """The name of the first GPU that the driver shows to programs, or None."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        asked = (driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0))
        return None if any(asked) or driver.cuDeviceGetName(name, len(name), device) else name.value.decode()
    except (OSError, AttributeError):
        return None


def _shared_memory() -> str:
    try:
        free = shutil.disk_usage("/dev/shm").free / 2**30
    except OSError:
        return "shared memory: none; the parallel engine uses the temporary folder"
    small = "" if free > 2 else "; too small, the parallel engine uses the temporary folder"
    return f"shared memory: {free:.1f} GiB free in /dev/shm{small}"
