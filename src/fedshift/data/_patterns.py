"""Patterns of a file's author, which may take for ever: ``^(a+)+$`` on thirty letters takes years."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from fedshift.errors import UserError

MOST_SECONDS = 8
_SEARCH = """
import json, re, sys
pattern, texts = json.load(sys.stdin)
wanted = re.compile(pattern)
json.dump([hit.group() if (hit := wanted.search(text)) else "" for text in texts], sys.stdout)
"""


def matches(pattern: str, texts: Sequence[str]) -> list[str]:
    """What a regular expression matches first in each text, empty where it does not.

    It is looked for in a process of its own: nothing else can stop it.

    >>> matches("[0-9]+", ["a-12-3", "b"])
    ['12', '']
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps([pattern, list(texts)]),
            capture_output=True,
            text=True,
            timeout=MOST_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"the group pattern {pattern!r} takes too long on these paths: write a simpler one") from None
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or ["it ended"])[-1]
        raise UserError(f"the group pattern {pattern!r} cannot be used: {why}") from None
    found: list[str] = json.loads(done.stdout)
    return found
