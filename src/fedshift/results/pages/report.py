"""The report: one HTML file with everything in it, that needs no network and runs nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

import fedshift
from fedshift.errors import HostError, UserError
from fedshift.results.gather import LeftOut, gather
from fedshift.results.result import Result
from fedshift.results.sections.calibration import calibration
from fedshift.results.sections.classes import classes
from fedshift.results.sections.clients import clients
from fedshift.results.sections.curves import curves
from fedshift.results.sections.deploy import deploy, grouped, warnings
from fedshift.results.sections.features import features
from fedshift.results.sections.origin import origin
from fedshift.results.sections.robustness import robustness
from fedshift.results.sections.scores import scores
from fedshift.results.sections.telemetry import telemetry
from fedshift.results.sections.trade_offs import trade_offs
from fedshift.results.sections.views import Views
from fedshift.store.files import write

HOW_TO_GET = 'the report needs plotly: pip install "fedshift[report]"'
SCRIPTS = ("page.js", "table.js", "charts.js", "report.js")
SECTIONS = {
    "deploy": "What to deploy",
    "table": "Results",
    "curves": "Learning curves",
    "clients": "Clients",
    "classes": "Classes",
    "calibration": "Calibration",
    "robustness": "Robustness",
    "telemetry": "Adapters",
    "features": "Features",
    "costs": "What it costs",
    "made": "How it was made",
}


@dataclass(frozen=True)
class Page:
    """A page, and what did not get into it."""

    html: str
    left_out: tuple[LeftOut, ...]
    sections: tuple[str, ...]

    def write(self, out: Path) -> None:
        """Into a file, whole or not at all."""
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostError.of(error, str(out), "choose another file with --out") from None
        write(out, self.html)


def write_report(paths: Sequence[Path], out: Path, *, title: str = "", pictures: bool = True) -> Page:
    """The report of all runs in these folders, into a file that is written whole or not at all."""
    if out.is_dir():
        raise UserError(f"{out} is a folder; --out names the file to write")
    found = gather(paths)
    page = report_page(found.result, found.left_out, title=title or title_for(paths), pictures=pictures)
    page.write(out)
    return page


def title_for(paths: Sequence[Path]) -> str:
    """What a report of these folders is called.

    >>> title_for([Path("runs/mine"), Path("runs/other")])
    'mine, other'
    """
    return ", ".join(dict.fromkeys(path.resolve().name for path in paths))


def report_page(
    result: Result, left_out: Sequence[LeftOut] = (), *, title: str = "Report", pictures: bool = True
) -> Page:
    """The page of a result; ``pictures`` are those that show images of the data.

    Python writes every number and its text; the script of the page only chooses which ones are shown.
    """
    data = page_data(result, pictures)
    shown = [key for key in SECTIONS if data.get(key)]
    views = data["views"]
    static = {
        "title": title,
        "version": fedshift.__version__,
        "sections": {key: SECTIONS[key] for key in shown},
        "advice": data["deploy"],
        "warnings": grouped(data["warnings"]),
        "left_out": [str(one) for one in left_out],
        "notes": [note for note in result.notes if note not in result.trouble],
        "made": data["made"],
        "views": views,
        "papers": data["table"]["papers"] is not None,
        "seeds": sorted({seed for row in views["rows"] for seed in row["seeds"]}),
        "adapters": len({row["adapter"] for row in views["rows"] if not row["bound"]}),
        "ledger": data.get("costs"),
        "inspected": data.get("features"),
    }
    scripted = {key: value for key, value in data.items() if key not in ("deploy", "warnings", "made")}
    return Page(rendered("report.html.j2", SCRIPTS, static, scripted), tuple(left_out), tuple(shown))


def page_data(result: Result, pictures: bool = True) -> dict[str, Any]:
    """Every section's data by its name; what runs do not have is None."""
    views = Views(result)
    return {
        "views": views.as_dict(),
        "deploy": deploy(views),
        "warnings": warnings(views),
        "table": scores(views),
        "curves": curves(views) or None,
        "clients": clients(views),
        "classes": classes(views),
        "calibration": calibration(views),
        "robustness": robustness(views),
        "telemetry": telemetry(views),
        "features": features(result.folders),
        "costs": trade_offs(views),
        "made": origin(views, pictures),
    }


def rendered(
    template: str, scripts: Sequence[str], static: Mapping[str, Any], data: Any, connect: str = "'none'"
) -> str:
    """A page of ours: one style, one script and plotly's, their digests in its content security policy, data as JSON.

    ``connect`` says whom its script may ask for more.
    """
    own = "\n".join(part(name) for name in scripts)
    plot = plotly_script()
    policy = {
        "default-src": "'none'",
        "script-src": f"{_digest(plot)} {_digest(own)}",
        "style-src": "'unsafe-inline'",  # plotly styles what it draws
        "img-src": "data: blob:",
        "connect-src": connect,
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(part(template)).render(
        **static,
        policy="; ".join(f"{key} {value}" for key, value in policy.items()),
        style=part("page.css"),
        plotly=plot,
        script=own,
        data=as_json(data),
    )


def part(name: str) -> str:
    """A file of the page's parts."""
    return (resources.files("fedshift.results.pages") / "templates" / name).read_text(encoding="utf-8")


def plotly_script() -> str:
    """Plotly's own script; a UserError says how to get it."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(HOW_TO_GET) from None
    # a closing tag inside it would end the element it is put into
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def as_json(data: Any) -> str:
    """JSON that can stand inside an element of a page, whatever names are in it.

    >>> as_json({"name": "</script><b>"})
    '{"name":"\\\\u003c/script\\\\u003e\\\\u003cb\\\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
