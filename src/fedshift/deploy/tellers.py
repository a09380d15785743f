"""Whose validation images a server knows sums of: once it knows one, it asks the same parties or nobody.

Two exact sums of nearly the same, one with somebody and one without him, tell what he said. A server may be killed between
them, and a run may be begun anew, so the names lie beside the run, and are on disk before the first sum is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedshift.errors import UserError
from fedshift.store import seal
from fedshift.store.files import Damaged
from fedshift.store.folder import RunFolder

TELLERS = "tellers.json"


@dataclass(frozen=True)
class Tellers:
    """Of one run.

    >>> import tempfile
    >>> from pathlib import Path
    >>> tellers = Tellers(RunFolder(Path(tempfile.mkdtemp())))
    >>> tellers.check(["a", "b", "c"])
    >>> tellers.check(["a", "b", "c"])
    >>> tellers.check(["a", "b", "c", "d"])
    Traceback (most recent call last):
        ...
    fedshift.errors.UserError: the sums of 'a', 'b', 'c' are known: others, with or without 'd', would tell what one said
    """

    folder: RunFolder

    @property
    def names(self) -> list[str]:
        """Those whose sums are known; empty if none are."""
        path = self.folder.path / TELLERS
        if not path.exists():
            return []
        names = seal.read_table(path, must=True).get("tellers")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Damaged(path, "it has another shape")
        return names

    def check(self, names: Sequence[str]) -> None:
        """Refuse other parties than those whose sums are known, or write down who they are."""
        known = self.names
        if not known:
            self.folder.write(TELLERS, seal.table_text({"tellers": list(names)}))
        elif set(known) != set(names):
            whose, others = (", ".join(map(repr, some)) for some in (known, sorted(set(known) ^ set(names))))
            raise UserError(
                f"the sums of {whose} are known: others, with or without {others}, would tell what one said"
            )
