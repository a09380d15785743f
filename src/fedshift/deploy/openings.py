"""How often a server has come to know a sum with noise: each time counts, also that of a round it did not live to keep.

Noise is secret, so a server that was killed and asks for a round again gets the sum of that round under other noise. Both
have been told. The number lies beside the run, and is on disk before the sum is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedshift.store import seal
from fedshift.store.files import Damaged
from fedshift.store.folder import RunFolder

OPENINGS = "openings.json"


@dataclass(frozen=True)
class Openings:
    """Of one run.

    >>> import tempfile
    >>> from pathlib import Path
    >>> openings = Openings(RunFolder(Path(tempfile.mkdtemp())))
    >>> openings.add(), openings.add()
    (None, None)
    >>> openings.count, openings.lost  # there is no checkpoint
    (2, 2)
    """

    folder: RunFolder

    @property
    def count(self) -> int:
        """All so far."""
        path = self.folder.path / OPENINGS
        if not path.exists():
            return 0
        number = seal.read_table(path, must=True).get("openings")
        if type(number) is not int:
            raise Damaged(path, "it has another shape")
        return number

    @property
    def lost(self) -> int:
        """Those of rounds that will be asked for again, or were, as a server finds it before it goes on."""
        rounds = [int(path.stem.removeprefix("ckpt-")) for path in self.folder.checkpoints()[:1]]
        return max(0, self.count - sum(rounds))

    def add(self) -> None:
        """One more."""
        self.folder.write(OPENINGS, seal.table_text({"openings": self.count + 1}))
