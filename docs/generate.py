"""Writes what is generated and kept; the site makes its own pages while it is built (``make docs``).

python docs/generate.py --text        # the rows that `fedshift list` reads
python docs/generate.py --costs       # what methods and adapters cost, counted in a few minutes
python docs/generate.py --pictures    # the contact sheets of corruptions
python docs/generate.py --results     # the pages of docs/results from its JSON files; a folder's summaries are taken first
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from docs.builder import counting, results, sheets, summaries  # noqa: E402
from fedshift import catalogue  # noqa: E402

LISTED = HERE.parent / "src" / "fedshift" / "catalogue.json"
COSTS = HERE / "builder" / "costs.json"

if __name__ == "__main__":
    asked = {word for word in sys.argv[1:] if word.startswith("--")} or {"--text", "--pictures", "--results"}
    if "--text" in asked:
        LISTED.write_text(catalogue.as_text(catalogue.made()), encoding="utf-8")
    if "--costs" in asked:
        COSTS.write_text(json.dumps(counting.everything(), indent=1) + "\n", encoding="utf-8")
    if "--pictures" in asked:
        for side in (32, 224):
            sheets.contact_sheet(side, HERE / "pictures" / f"corruptions-{side}.png")
    if "--results" in asked:
        for source in (word for word in sys.argv[1:] if not word.startswith("--")):
            print(f"taken from {source}: {', '.join(summaries.take(Path(source), results.known()))}")
        for path, text in results.pages().items():
            path.write_text(text, encoding="utf-8")
