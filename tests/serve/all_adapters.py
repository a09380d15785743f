"""A process that serves one client with every registered adapter at once: ARTEFACTS.json STATE FIT-ON-FOLDER."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from fedshift.serve.bodies import Limits
from fedshift.serve.host import Keeping
from fedshift.serve.opening import open_service
from fedshift.serve.server import Address, Options, serve
from fedshift.serve.service import Settings

if __name__ == "__main__":
    folders, state, fit_on = sys.argv[1:]
    services = [
        replace(open_service(folder, name, settings=Settings(fall_back="never")), name=name)
        for name, folder in json.loads(folders).items()
    ]
    options = Options(
        address=Address(port=0), state=Path(state), fit_on=Path(fit_on), rate=1e6, limits=Limits(seconds=1.0),
        keeping=Keeping(images=1000, seconds=60, deadline=1.0),
    )  # fmt: skip
    serve(services, options, lambda url: print(f"Page: {url}", flush=True))
