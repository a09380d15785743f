"""What the documentation shows must run, and what is generated must be up to date."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.system
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(page, "python")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_toml_examples_parse(page: Path, tmp_path: Path) -> None:
    from fedshift import Experiment

    for text in blocks(page, "toml"):
        path = tmp_path / "example.toml"
        path.write_text(text)
        assert Experiment.load(path).data.source.startswith("parquet:")


@pytest.mark.system
def test_the_catalogue_is_up_to_date() -> None:
    script = """
import sys
sys.path.insert(0, "docs")
import generate
lists = generate.made()
print(generate.as_text(lists) == generate.LISTED.read_text())
print(generate.catalogue(lists) == (generate.HERE / "reference" / "catalogue.md").read_text())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"], "run: python docs/generate.py --text"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
