"""A process of ``--jobs``: it ties its life to its parent's, then it does what it was ordered.

This file is run by its path: importing the package takes seconds, and a parent may die in them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def follow_parent() -> None:
    """End when the parent ends, whatever ended it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the parent says what becomes of it
    pipe, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # who asks for input finds none, as ever
    os.close(nothing)
    threading.Thread(target=_until_closed, args=(pipe,), daemon=True).start()
    if sys.platform == "linux":  # also in the middle of a long call into a library, which holds threads up
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _until_closed(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    follow_parent()
    from fedshift.runs.workers import main

    main(Path(sys.argv[1]))
