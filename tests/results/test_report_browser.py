"""The report in a real browser: every section, every switch, small screens, keyboards, and names that try to be HTML."""

from __future__ import annotations

import base64
import json
import re
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fedshift.results.pages.report import Page, write_report
from fedshift.store import seal
from fedshift.store.found import find_runs
from tests.browser import browser, errors, faults, prefer, ready, resize, until
from tests.results.test_report import METHODS, STREAMS, stored
from tests.runs.test_run import go, tiny

pytestmark = pytest.mark.system
T = TypeVar("T")
NASTY = "<img src=x onerror=document.title='hacked'>"
EVERY = [
    "deploy",
    "table",
    "curves",
    "clients",
    "classes",
    "calibration",
    "robustness",
    "telemetry",
    "features",
    "costs",
    "made",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with all there is to show; a client, a class and the folder itself have names that are HTML."""
    out = tmp_path_factory.mktemp("runs")
    streams = [*STREAMS, {"name": "worse", "kind": "corrupted", "severity": 5}]
    wild = {"lr": 2.0, "batch-size": 16, "momentum": 0.9}  # the last round is not the best one
    go(tiny(stream=streams, method=METHODS, seeds=[0, 1], rounds=4, split={"unseen": ["south"]}, train=wild), out)
    named = out / "<b>mine<b>"
    shutil.move(out / "tiny", named)
    for path in [*named.rglob("adapters/*.jsonl"), *named.rglob("twins/*.jsonl")]:
        rows = seal.read_lines(path, counted=True)
        for row in rows:
            for part in ("by-client", "measured"):
                row[part] = {NASTY if name == "north" else name: value for name, value in row.get(part, {}).items()}
            row["classes"] = [f"</script>{name}" for name in row["classes"]]
        path.write_text(seal.lines_text(rows))
    places = {"stream": "original", "classes": [NASTY, "b"], "clients": [NASTY], "unseen": [], "x": [0.0, 1.0, 2.0],
              "y": [1.0, 0.5, 2.0], "label": [0, 1, 1], "prediction": [1, 1, 0], "client": [0, 0, 0]}  # fmt: skip
    (named / "inspect").mkdir()
    (named / "inspect" / "inspect.json").write_text(
        json.dumps({"runs": [{"name": NASTY, "tsne": places}], "methods": []})
    )
    return named


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    (folder / "unfinished").mkdir()
    (folder / "unfinished" / "metrics.jsonl").write_text("")
    return write_report([folder], folder.parent / "page.html")


@pytest.fixture(scope="module")
def driver(folder: Path, page: Page) -> Iterator[Any]:
    with browser() as found:
        found.get((folder.parent / "page.html").as_uri())
        ready(found)
        yield found


def pick(driver: Any, control: str, value: str) -> None:
    driver.execute_script(
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input')); "
        "e.dispatchEvent(new Event('change'))",
        control,
        value,
    )
    ready(driver)


def shown(driver: Any) -> dict[tuple[str, str], list[str]]:
    """The main table as people see it: cells by method and adapter."""
    rows = driver.execute_script(
        "return [...document.querySelectorAll('#scores tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.innerText.trim()))"
    )
    return {(method, adapter): cells for method, adapter, *cells in rows}


def test_every_section_is_there_and_nothing_complains(driver: Any, page: Page) -> None:
    assert list(page.sections) == EVERY
    assert driver.execute_script("return [...document.querySelectorAll('main > section')].map((s) => s.id)") == EVERY
    drawn = driver.execute_script(
        "return [...document.querySelectorAll('.plot')].map((p) => [p.id, p.querySelectorAll('svg').length])"
    )
    assert len(drawn) == 9
    assert all(count for _, count in drawn)
    assert errors(driver) == []


def test_switching_rule_measure_and_part_shows_the_numbers_of_the_files(driver: Any, folder: Path) -> None:
    names = ["original/clients", "bad/clients", "worse/clients", "original/unseen", "bad/unseen", "worse/unseen"]
    keys = {"client_mean": "client-mean", "pooled": "pooled", "worst10": "worst-10"}
    found = stored(folder)
    seen = set()
    for rule in ("last", "best-val"):
        for measure, part in (
            ("accuracy", "client_mean"),
            ("ece", "pooled"),
            ("loss", "worst10"),
            ("macro-f1", "client_mean"),
        ):
            for control, value in (("rule", rule), ("measure", measure), ("part", part)):
                pick(driver, control, value)
            table = shown(driver)
            for (method, adapter), cells in table.items():
                for name, cell in zip(names, cells[: len(names)], strict=True):
                    scores = found[method, adapter, rule, name]
                    numbers = [(s if measure == "accuracy" else s["measures"][measure])[keys[part]] for s in scores]
                    digits = 3 if measure == "loss" else 1
                    mean, spread = statistics.fmean(numbers), statistics.stdev(numbers)
                    text = f"{mean:.{digits}f}" + (f" ±{spread:.{digits}f}" if spread else "")
                    assert cell.removesuffix(" ~") == text, (rule, measure, method, adapter, name)
            seen.add(json.dumps(sorted(table.items())))
    assert len(seen) >= 5  # the switches do something
    for control, value in (("rule", "best-val"), ("measure", "accuracy"), ("part", "client_mean")):
        pick(driver, control, value)


def test_sorting_and_filtering(driver: Any) -> None:
    def first_column() -> list[float]:
        return [float(cells[0].split()[0]) for cells in shown(driver).values()]

    order = list(shown(driver))
    head = "document.querySelectorAll('#scores thead button')[2]"
    driver.execute_script(f"{head}.click()")
    assert first_column() == sorted(first_column(), reverse=True)
    assert driver.execute_script(f"return {head}.parentElement.getAttribute('aria-sort')") == "descending"
    assert driver.execute_script(f"return document.activeElement === {head}")  # a keyboard stays where it was
    driver.execute_script(f"{head}.click()")
    assert first_column() == sorted(first_column())
    driver.execute_script(f"{head}.click()")
    assert list(shown(driver)) == order
    pick(driver, "filter", "fedavg tent")
    assert list(shown(driver)) == [("fedavg", "tent")]
    assert driver.execute_script("return document.getElementById('shown').textContent") == "1 of 3 rows"
    pick(driver, "filter", "")
    assert list(shown(driver)) == order


def test_copies_hold_what_is_shown(driver: Any) -> None:
    driver.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error('no'))")
    texts = {}
    for kind in ("markdown", "latex", "csv"):
        driver.execute_script(f"document.querySelector('[data-copy={kind}]').click()")
        texts[kind] = until(lambda: driver.execute_script("return document.getElementById('copy-text').value"))
    cell = shown(driver)["fedavg", "tent"][0].removesuffix(" ~")
    assert texts["markdown"].startswith("| method | adapter | original |")
    assert cell in texts["markdown"]
    assert cell.replace("±", "$\\pm$") in texts["latex"]
    assert texts["latex"].count("\\\\") == 4
    assert len(texts["csv"].splitlines()) == 4
    assert cell in texts["csv"]


def test_names_are_shown_and_not_executed(driver: Any, folder: Path) -> None:
    text = driver.execute_script("return document.body.innerText")
    assert NASTY in text
    assert "</script>0" in text
    assert str(folder / "unfinished") in text  # named, and left out
    assert driver.title == "<b>mine<b> – fedshift report"
    assert driver.execute_script("return document.querySelectorAll('main img:not([src^=data])').length") == 0
    # and were one of them executed after all, the policy of the page would not let it
    driver.execute_script(
        "const s = document.createElement('script'); s.textContent = \"document.title = 'hacked'\"; document.body.append(s)"
    )
    driver.execute_script("document.body.insertAdjacentHTML('beforeend', arguments[0])", NASTY)
    time.sleep(0.2)
    assert driver.title == "<b>mine<b> – fedshift report"
    assert any("Content Security Policy" in line for line in errors(driver))
    driver.refresh()
    ready(driver)
    assert errors(driver) == []


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_nothing_serious_for_people_who_use_no_mouse_or_see_no_colours(driver: Any, colours: str) -> None:
    prefer(driver, colours)
    until(lambda: driver.execute_script("return document.documentElement.dataset.theme") == colours)
    ready(driver)
    assert faults(driver) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_no_sideways_scroll(driver: Any, width: int) -> None:
    resize(driver, width)
    until(lambda: driver.execute_script("return document.documentElement.clientWidth") == width)
    time.sleep(0.3)  # pictures follow
    assert driver.execute_script("return document.documentElement.scrollWidth") == width
    wide = driver.execute_script(
        "return [...document.querySelectorAll('.plot svg')]"
        ".filter((picture) => picture.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    resize(driver, 1280)


def test_it_prints(driver: Any) -> None:
    paper = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert paper.startswith(b"%PDF")
    assert driver.execute_script("return document.documentElement.dataset.theme") in ("light", "dark")
    assert errors(driver) == []


def test_a_hundred_runs_render_in_ten_seconds_and_open_in_three(folder: Path, tmp_path: Path) -> None:
    source = find_runs(folder)
    for number in range(100):
        run = source[number // 5 % len(source)]
        copy = tmp_path / "many" / f"m{number // 5}" / str(number)
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*.safetensors", "artefacts*"))
        config = (copy / "config.toml").read_text()
        seed = next(line for line in config.splitlines() if line.startswith("seed ="))
        config = config.replace(seed, f"seed = {number % 5}").replace(
            "[method]\n", f'[method]\nlabel = "m{number // 5}"\n'
        )
        lines = config.splitlines()
        labels = [k for k, line in enumerate(lines) if line.startswith("label =")]
        edited = "\n".join(line for k, line in enumerate(lines) if k not in labels[1:])
        (copy / "config.toml").write_text(re.sub(r"# seal: \w+", "# seal: edited", edited))
    page, rendered = quickest(lambda: write_report([tmp_path / "many"], tmp_path / "many.html"), 10)
    assert page.left_out == ()
    assert (tmp_path / "many.html").stat().st_size < 10_000_000
    with browser() as found:

        def opened() -> int:
            found.get("about:blank")
            found.get((tmp_path / "many.html").as_uri())
            return until(lambda: found.execute_script("return document.querySelectorAll('#scores tbody tr').length"))

        rows, opening = quickest(opened, 3)
        ready(found)
        assert rows == 30  # twenty methods, ten of them with a second adapter
        assert found.execute_script("return document.querySelector('.facts b').textContent") == "100"
        assert errors(found) == []
    print(f"100 runs: rendered in {rendered:.1f} s, opened in {opening:.1f} s")
    assert rendered < 10
    assert opening < 3


def quickest(work: Callable[[], T], limit: float) -> tuple[T, float]:
    """What it gives and how long it takes, of at most three tries: others may be busy on the machine."""
    times: list[float] = []
    while not times or (min(times) >= limit and len(times) < 3):
        started = time.perf_counter()
        made = work()
        times.append(time.perf_counter() - started)
    return made, min(times)
