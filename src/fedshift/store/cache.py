"""Where what can be made again is kept, so that it need not be."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where decoded sources and made tasks are kept: ``$FEDSHIFT_CACHE``, or the user's cache folder."""
    given = os.environ.get("FEDSHIFT_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedshift"
