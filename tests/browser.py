"""A real browser for tests of pages: Debian's chromium without a window. Where there is none, tests say so and skip."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest

QUIET = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars", "--disable-extensions",
)  # fmt: skip


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A driver with an empty profile; it ends with the block."""
    selenium = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not program or not driver:
        pytest.skip("no chromium and chromedriver on this machine")
    with tempfile.TemporaryDirectory() as profile:
        options = selenium.ChromeOptions()
        options.binary_location = program
        for argument in (*QUIET, f"--user-data-dir={profile}"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        found = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
        try:
            resize(found, width, height)
            yield found
        finally:
            found.quit()


def resize(driver: Any, width: int, height: int = 900) -> None:
    """The window as wide as a page sees it."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(driver: Any, colours: str) -> None:
    """What the system prefers: light or dark."""
    wish = [{"name": "prefers-color-scheme", "value": colours}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wish})


def until(question: Callable[[], Any], seconds: float = 30) -> Any:
    """The first answer that is true."""
    end = time.monotonic() + seconds
    while not (found := question()):
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.05)
    return found


def ready(driver: Any) -> None:
    """All pictures of a page are drawn."""
    until(lambda: driver.execute_script("return document.documentElement.dataset.ready") == "yes")


def errors(driver: Any) -> list[str]:
    """What the console complains of; a log is given once."""
    return [line["message"] for line in driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


def faults(driver: Any) -> list[str]:
    """What axe-core finds that is serious or worse."""
    if importlib.util.find_spec("axe_core_python") is None:
        pytest.skip("no axe-core: pip install axe-core-python")
    driver.execute_script((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = driver.execute_async_script("const done = arguments[0]; axe.run().then((r) => done(r.violations))")
    return [
        f"{one['id']} ({one['impact']}): {node['target']} {node.get('failureSummary', '')}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]
