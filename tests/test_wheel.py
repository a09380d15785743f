"""The built wheel, outside of this repository and without extras, runs every command or names the extra it needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parent.parent
TINY = ["rounds=1", "baselines=false", "data.size=8", "model.name=mlp", "model.hidden=[8]", 'split.unseen=["flower"]']


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content, as an installer would lay it out.

    Built from a copy: setuptools writes into the tree it builds, and two workers of pytest building in one tree trip
    over each other. With this environment's setuptools, so that no network is needed.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "-w", str(folder)]
    built = subprocess.run([*pip, "wheel", *options, str(source)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("fedshift-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def fedshift(installed: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "FEDSHIFT_CACHE": str(where / "cache")}
    command = [sys.executable, "-P", "-m", "fedshift.cli", *arguments]
    return subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)


def test_every_command_of_the_wheel_runs(installed: Path, tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-c", "import fedshift; print(fedshift.__file__)"],
        env={**os.environ, "PYTHONPATH": str(installed)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert found.stdout.strip() == str(installed / "fedshift" / "__init__.py")  # not the repository's
    changes = [part for setting in TINY for part in ("-c", setting)]
    (tmp_path / "images").mkdir()
    script = "from PIL import Image; Image.new('L', (8, 8), 90).save('images/one.png')"
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    methods = 'method=[{name="fedavg", adapters=["none", "t3a"]}]'
    for arguments in (
        ["run", *changes, "-c", methods, "--engine", "sequential"],
        ["show", "runs/default"],
        ["show", "runs/default", "--format", "json"],
        ["inspect", "runs/default", "--samples", "20"],
        ["cost-to-target", "runs/default", "--target", "1"],
        ["join", "runs/default", "--data", "images", "--adapter", "t3a"],
        ["export", "runs/default", "--client", "paper"],
        ["export", "runs/default", "--unseen", "--format", "safetensors"],
        ["data", "default", *changes],
        *(["list", what] for what in ("methods", "adapters", "models", "partitions", "streams", "presets", "pairs")),
        ["doctor"],
    ):
        done = fedshift(installed, tmp_path, *arguments)
        assert done.returncode == 0, (arguments, done.stderr[-2000:])
        assert "Traceback" not in done.stderr


def test_an_extra_that_is_missing_is_named(installed: Path, tmp_path: Path) -> None:
    done = fedshift(installed, tmp_path, "run", "-c", "data.source=hub:somebody/something")
    assert done.returncode == 2
    assert "fedshift[hub]" in done.stderr
    assert "Traceback" not in done.stderr
