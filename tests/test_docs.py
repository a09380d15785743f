"""What the documentation shows must run, what is generated must be up to date, and the site must stand on its own."""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import shlex
import subprocess
import sys
from html import unescape
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedshift.core.registry import ADAPTERS, METHODS
from tests.browser import browser, errors, prefer, resize, until

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MADE = re.compile(
    r"(methods|adapters|api)/[\w-]+\.md|reference/(models|partitions|streams|presets|pairs)\.md|results/(index|glance)\.md"
)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def script_runs(script: Path, folder: Path) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    script_runs(script, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_toml_examples_parse(page: Path, tmp_path: Path) -> None:
    from fedshift import Experiment

    for text in blocks(page, "toml"):
        path = tmp_path / "example.toml"
        path.write_text(text, encoding="utf-8")
        assert Experiment.load(path).data.source.startswith("parquet:")


@pytest.mark.system
def test_what_is_listed_is_up_to_date() -> None:
    script = """
from docs import generate
from fedshift import catalogue
print(catalogue.as_text(catalogue.made()) == generate.LISTED.read_text(encoding="utf-8"))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"], "run: python docs/generate.py --text"


def test_links_lead_somewhere() -> None:
    """On disk, or to a page that the site makes; those are followed when it is built."""
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if target.startswith("http"):
                continue
            found = (page.parent / target).resolve()
            made = found.is_relative_to(DOCS) and MADE.fullmatch(found.relative_to(DOCS).as_posix())
            assert found.exists() or (made and page != ROOT / "README.md"), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_ask_for_methods_that_were_trained(page: Path) -> None:
    """What a page lets one train under a name (``-c name=mine``) has the methods that it asks for afterwards."""
    from fedshift import Experiment

    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    trained: dict[str, set[str]] = {}
    for line in re.findall(r"^fedshift run .*", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        changes = [after for word, after in pairwise(words) if word == "-c"]
        if words[2:3] == ["-c"] and (name := next((c[5:] for c in changes if c.startswith("name=")), "")):
            experiment = Experiment.load(None, changes)
            trained[name] = {*(m.title for m in experiment.method), "majority", "local", "finetune"}
    for name, titles in trained.items():
        asked = re.findall(rf"runs/{name}(?:/([\w-]+)/| --method ([\w-]+))", text)
        asked += re.findall(rf"runs/{name} --data \S+ (--method) ([\w-]+)", text)
        assert {method for pair in asked for method in pair if method not in ("", "--method")} <= titles, page


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


# ---- examples -------------------------------------------------------------------------------------------------------
def test_there_are_five_short_examples() -> None:
    named = {"own_data", "own_network", "own_method", "own_adapter", "unseen_hospital"}
    assert {path.stem for path in EXAMPLES} == named
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 60 for path in EXAMPLES)


@pytest.mark.system
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    assert script_runs(path, tmp_path)


# ---- what the site is made of ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("module", ["docs.builder.equations", "docs.builder.docstrings", "docs.builder.measured"])
def test_the_builders_examples_hold(module: str) -> None:
    assert doctest.testmod(import_module(module)).failed == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("w <- sum_k p_k w_k", "w←∑kpkwk"),
        ("(mu / 2) |w - w_t|^2", "(μ/2)|w−wt|2"),
        ("psi~ = psi - inner_lr grad_psi l", "ψ~=ψ−inner-lr∇ψl"),
        ("<Delta_k, psi_k> >= 0", "⟨Δk,ψk⟩≥0"),
    ],
)
def test_equations_are_drawn(text: str, shown: str) -> None:
    from docs.builder.equations import mathml

    drawn = mathml(text, {"inner_lr"})
    assert unescape(re.sub(r"<[^>]+>", "", drawn)) == shown
    ElementTree.fromstring(drawn)  # every tag that is opened is closed


def test_code_is_not_taken_for_an_equation() -> None:
    from docs.builder.equations import to_markdown

    text = "``lam = 0`` is Local, ``[train] weights`` and ``num_batches_tracked`` stay code, ``w_k`` does not."
    drawn = to_markdown(text, {"lam"})
    assert re.findall(r"`([^`]+)`", drawn) == ["lam = 0", "[train] weights", "num_batches_tracked"]
    assert drawn.count("<math>") == 1


def test_every_public_name_is_documented() -> None:
    from docs.builder import api

    assert api.undocumented() == []
    assert list(api._silent(ast.parse("class A:\n    '''Says.'''\n    def b(self): ...\ndef _c(): ..."))) == ["A.b"]


def test_costs_are_known_of_all() -> None:
    kept = json.loads((DOCS / "builder" / "costs.json").read_text(encoding="utf-8"))
    assert (set(kept["methods"]), set(kept["adapters"])) == (set(METHODS), set(ADAPTERS)), (
        "run: python docs/generate.py --costs"
    )


@pytest.mark.system
@pytest.mark.long
def test_costs_are_those_that_are_counted(tmp_path: Path) -> None:
    from docs.builder import counting

    kept = json.loads((DOCS / "builder" / "costs.json").read_text(encoding="utf-8"))
    run = counting.trained("fedrep", tmp_path)
    assert counting.of_method(run) == kept["methods"]["fedrep"]


def test_rows_of_results_find_their_method() -> None:
    from docs.builder import measured

    quoted = measured.quoted("methods", "fedthe")
    assert re.search(r"\| FedTHE\+ \| [\d.*±]+ (±[\d.]+ )?\(90\.55\) \|", quoted)
    assert re.search(r"\| FedAvg \| [\d.*±]+ (±[\d.]+ )?\(55\.04\) \|", quoted)  # beside it, wherever both were run
    assert "| Ditto |" not in quoted


def test_results_pages_are_those_of_their_summaries() -> None:
    """Nobody types a number: python docs/generate.py --results."""
    from docs.builder import results
    from docs.builder.summaries import as_json

    names = {table.name for page in results.PAGES for table in page.tables}
    for path, text in results.pages().items():
        assert path.read_text(encoding="utf-8") == text, path.name
        parts = re.findall(r"^## (.+)$", text, re.M)
        assert path.name == "README.md" or (parts[0], "Why we differ" in parts) == ("In short", True), path.name
    for path in results.KEPT.glob("*.json"):
        summary = json.loads(path.read_text(encoding="utf-8"))
        assert path.stat().st_size < 60_000
        assert as_json(summary) == path.read_text(encoding="utf-8")
        if path.stem.startswith("ours-"):
            continue  # not of a table's shape; see below
        assert path.stem in names
        assert summary["command"].startswith("fedshift run ")
        assert summary["seeds"]
        assert summary["rows"]
        page = next(page for page in results.PAGES if path.stem in {table.name for table in page.tables})
        shown = (results.KEPT / f"{page.name}.md").read_text(encoding="utf-8")
        for title, cells in summary["rows"].items():  # every number of the file is on the page
            row = next(line for line in shown.split("\n") if line.startswith(f"| {title} |"))
            assert all(f"{number['mean']:.1f}" in shown for number in cells.values()), row


@pytest.mark.parametrize(
    ("means", "differences", "held"),
    [
        ((70, 60, 50), {"B": False, "C": False}, "yes"),
        ((70, 60, 50), {"B": True, "C": False}, "yes, not surely"),
        ((70, 60, 50), {}, "yes, not surely"),
        ((70, 60, 80), {"A": False, "B": False}, "yes"),  # C is above, and is no row of the paper's
        ((60, 70, 50), {"A": False, "C": False}, "no"),
        ((60, 70, 50), {"A": True, "C": False}, "no, not surely"),
        ((60, 70, 50), {}, "no, not surely"),
    ],
)
def test_a_page_begins_with_what_was_reproduced_and_how_sure(
    means: tuple[float, ...], differences: dict[str, bool], held: str
) -> None:
    from docs.builder.verdicts import verdict

    papers = {"A": 60.0, "B": 50.0}
    headline = {
        title: {"mean": float(mean), "seeds": [float(mean)], **({"paper": papers[title]} if title in papers else {})}
        for title, mean in zip("ABC", means, strict=True)
    }
    told = {title: {"mean": 1.0, "low": 0.0, "high": 2.0, "noise": noise} for title, noise in differences.items()}
    summary = {"columns": [], "rows": {}, "headline": headline, "differences": told, "seeds": [0], "rounds": 5}
    found = verdict({**summary, "not-run": ["D"]}, "A", rounds=10)
    assert found.held == held
    assert found.found.startswith(f"{max(zip(means, 'ABC', strict=True))[1]} is first: ")
    assert found.sure.startswith("1 seed; 0 of 1 rows; 5 of 10 rounds; ")
    assert verdict(None, "A", rounds=10).held == "not run"


def test_what_ours_has_stands_below_the_tables_of_its_protocols() -> None:
    from benchmarks.ours import PARTS
    from docs.builder import results
    from docs.builder.ours import OURS

    ours_page = (results.KEPT / "ours.md").read_text(encoding="utf-8")
    tables = {
        f"ours-{table.ours[0]}": (page, table) for page in results.PAGES for table in page.tables if any(table.ours)
    }
    glance = (results.KEPT / "README.md").read_text(encoding="utf-8")
    for name, (_, table) in tables.items():
        assert PARTS[table.ours[0]]["preset"] == table.preset, name  # the same protocol
    kept = sorted(results.KEPT.glob("ours-*.json"))
    assert kept
    for path in kept:
        page, table = tables[path.stem]
        shown = (results.KEPT / f"{page.name}.md").read_text(encoding="utf-8")
        summary = json.loads(path.read_text(encoding="utf-8"))
        assert all(made["command"].startswith(f"python benchmarks/ours.py {table.ours[0]}") for made in summary["made"])
        assert all(f"`{made['command']}`" in shown for made in summary["made"])
        section = shown.split(f"\n## {table.title}\n")[1].split("\n## ")[0]
        for title, cells in summary["rows"].items():
            row = next(line for line in section.split("\n") if line.startswith(f"| {title} |"))
            for values in cells.values():
                assert len(values) == len(summary["seeds"])
                assert f"{sum(values) / len(values):.1f}" in row
            each = " ".join(f"{value:.1f}" for value in cells[table.ours[1]])
            assert f" {each} |" in ours_page, (path.stem, title)  # nobody mistypes one of its own page either
        ours = summary["rows"][OURS][table.ours[1]]
        assert f"| {sum(ours) / len(ours):.1f} |" in next(
            line for line in glance.split("\n") if f"| {table.title} |" in line
        )


def test_every_table_of_the_results_is_an_experiment() -> None:
    from docs.builder import results

    from fedshift import Experiment

    tables = [table for page in results.PAGES for table in page.tables]
    assert len({table.turn for table in tables}) == len(tables)
    for table in tables:
        experiment = Experiment.load(table.preset, table.changes)
        titles = {method.title for method in experiment.method}
        assert set(table.order) <= titles, (table.name, set(table.order) - titles)
    glance = (results.KEPT / "README.md").read_text(encoding="utf-8")
    assert all(glance.count(f"| {t.title} |") == sum(t.title == other.title for other in tables) for t in tables)


def test_all_questions_are_answered() -> None:
    text = (DOCS / "explanation" / "faq.md").read_text(encoding="utf-8")
    asked = re.findall(r"(?m)^## (\d+)\. .*\?.* \{ #(\d+) \}$|^## (\d+)\. .* \{ #(\d+) \}$", text)
    assert [next(filter(None, found)) for found in asked] == [str(number) for number in range(1, 23)]


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = json.loads((DOCS / "tutorials" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


def test_pictures_know_every_package() -> None:
    from docs.pictures import draw

    from tests.test_imports import MAY

    spots = draw.places(MAY)
    assert set(spots) == set(MAY)
    assert len(set(spots.values())) == len(spots)
    assert all(spots[user][1] < spots[used][1] for user, below in MAY.items() for used in below)
    assert all(draw.words(name) for name in MAY)


# ---- the site -------------------------------------------------------------------------------------------------------
def build(configuration: Path, into: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        str(configuration),
        "-d",
        str(into),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocstrings", reason='the site needs pip install "fedshift[docs]"')
    into = tmp_path_factory.mktemp("site")
    done = build(ROOT / "mkdocs.yml", into)
    assert done.returncode == 0, done.stdout + done.stderr
    return into


@pytest.mark.system
def test_the_site_has_a_page_for_everything(site: Path) -> None:
    for kind, registry in (("methods", METHODS), ("adapters", ADAPTERS)):
        for name, entry in registry.items():
            text = (site / kind / f"{name}.html").read_text(encoding="utf-8")
            heads = re.findall(r'<h2 id="([\w-]+)"', text)
            assert heads == ["what-it-does", "options", "whom-it-meets", "costs", "presets", "results", "the-code"], (
                name
            )
            assert not entry.year or entry.paper.replace("&", "&amp;").replace("'", "&#39;") in text.replace(
                "'", "&#39;"
            )
    assert "<math" in (site / "methods" / "fedavg.html").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        if page.is_relative_to(DOCS):
            name = "index" if page.stem == "README" else page.stem  # as mkdocs has it
            assert (site / page.relative_to(DOCS).with_name(f"{name}.html")).exists(), page
    front = (site / "api" / "index.html").read_text(encoding="utf-8")
    import fedshift

    assert all(f'id="fedshift.{name}"' in front for name in fedshift.__all__)


@pytest.mark.system
def test_the_notebook_was_run(site: Path) -> None:
    text = (site / "tutorials" / "notebook.html").read_text(encoding="utf-8")
    shown = re.findall(r'<div class="output">(.*?)</div>', text, re.DOTALL)
    assert "Accuracy in % at the round with the best pooled validation accuracy" in "".join(shown)  # run from TOML
    assert "unknown key 'ruonds'" in text
    assert text.count(" rounds, engine ") >= 2  # what the bar says in the end, of either run
    assert 'class="dataframe"' in text  # results to pandas
    assert list((site / "tutorials").glob("notebook-*.png"))  # a plot
    assert "hyper" in text  # images of one's own, from a data frame
    assert "lima/model.safetensors" in text  # exported


@pytest.mark.system
def test_the_site_asks_nobody_else(site: Path) -> None:
    """No font, script, style or picture from elsewhere; links for people to follow are another matter."""
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(https?:[^"'\s>]+)""", text)
        fetched += re.findall(
            r"""<link[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon)[^>]*href=["']?(https?:[^"'\s>]+)""", text
        )
        fetched += re.findall(r"""(?:@import|url\()\s*["']?(https?:[^"')]+)""", text) if page.suffix == ".css" else []
        assert not fetched, page


@pytest.mark.system
def test_the_site_in_a_browser(site: Path) -> None:
    """From disk: no complaint, no sideways scroll on a phone, dark where that is preferred, and search finds a method."""
    with browser() as driver:
        for width, colours in ((1280, "light"), (390, "dark")):
            resize(driver, width)
            for page in (
                "index",
                "methods/fedtta",
                "adapters/the",
                "reference/pairs",
                "results/brfl",
                "tutorials/notebook",
                "api/core",
            ):
                prefer(driver, colours)
                driver.get((site / f"{page}.html").as_uri())
                driver.execute_script("localStorage.clear()")
                wide = driver.execute_script("return document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, (page, width)
                assert not errors(driver), page
            driver.get((site / "methods" / "fedtta.html").as_uri())
            scheme = driver.execute_script("return document.body.dataset.mdColorScheme")
            assert scheme == {"light": "default", "dark": "slate"}[colours]
            drawn = driver.execute_script("return document.querySelector('math').getBoundingClientRect().width")
            assert drawn > 0
        resize(driver, 1280)
        driver.get(f"{(site / 'index.html').as_uri()}?q=scaffold")
        found = "return [...document.querySelectorAll('.md-search__output a')].map(a => a.href).join()"
        until(lambda: "methods/scaffold.html" in (driver.execute_script(found) or ""))


@pytest.mark.system
def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason='the site needs pip install "fedshift[docs]"')
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[there](nowhere.md)\n", encoding="utf-8")
    whole = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    kept = re.sub(r"(?ms)^(hooks|nav|plugins|extra_css|validation):.*?(?=^\w|\Z)", "", whole)
    rules = re.search(r"(?ms)^validation:.*?(?=^\w|\Z)", whole)
    assert rules is not None
    (tmp_path / "mkdocs.yml").write_text(kept + rules[0], encoding="utf-8")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr


@pytest.mark.system
def test_an_undocumented_name_fails_the_build(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = pytest.importorskip("docs.builder.hooks", reason='the site needs pip install "fedshift[docs]"')
    monkeypatch.setattr(hooks.api, "undocumented", lambda: ["fedshift.thing"])
    with pytest.raises(hooks.PluginError, match=r"without a docstring: fedshift\.thing"):
        hooks.on_files([], None)


@pytest.mark.system
def test_the_pictures_can_be_drawn(tmp_path: Path) -> None:
    command = [sys.executable, "docs/pictures/draw.py", "--png", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in tmp_path.glob("*.png")} == {"walk", "imports", "problem"}
