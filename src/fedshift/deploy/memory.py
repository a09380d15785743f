"""What a party keeps on its own disk between messages: its local states, by round.

A message names the round whose local state it continues from. So a party keeps that one and the one it has just made: if
its reply is lost, or the server goes back to its last checkpoint, the right one is still there. Those of rounds that were
best on validation stay as long as the server may come back to them. Files are written whole or not at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedshift.core.tree import Tensors, Tree
from fedshift.errors import UserError
from fedshift.store.lock import Occupied, RunLock
from fedshift.store.trees import load, save


@dataclass(frozen=True)
class Memory:
    """A folder of one party in one federation: another federation has another folder.

    >>> import tempfile, torch
    >>> memory = Memory(Path(tempfile.mkdtemp()) / "clinics-1f")
    >>> for number in (1, 2, 3):
    ...     memory.keep(number, {"model": {"w": torch.ones(1)}}, others=[number - 1])
    >>> memory.rounds(), memory.recall(1)
    ([2, 3], None)
    """

    folder: Path

    def recall(self, round_: int) -> Tree | None:
        """The local state after this many rounds; None if it is not there, or damaged."""
        return _read(self._file(round_))

    def keep(self, round_: int, local: Tree, others: Iterable[int] = ()) -> None:
        """Write a local state, then forget all but it and ``others``."""
        self._make()
        save(self._file(round_), {"local": local}, {"round": round_})
        for old in set(self.rounds()) - {round_, *others}:
            self._file(old).unlink(missing_ok=True)

    def rounds(self) -> list[int]:
        """Of which local states are there."""
        return sorted(int(path.stem.removeprefix("round-")) for path in self.folder.glob("round-*.safetensors"))

    def settled(self, round_: int) -> Tree | None:
        """What the party kept after the last phases of this round's models."""
        return _read(self._settled(round_))

    def keep_settled(self, round_: int, local: Tree) -> None:
        """Write it, and forget those of other rounds."""
        self._make()
        save(self._settled(round_), {"local": local}, {"round": round_})
        for old in self.folder.glob("settled-*.safetensors"):
            if old != self._settled(round_):
                old.unlink(missing_ok=True)

    def answers(self, round_: int) -> dict[str, Tensors] | None:
        """How this round's models predicted its validation images, by topic; None if it is not there, or damaged."""
        return _read(self._answers(round_))

    def keep_answers(self, round_: int, by_topic: Mapping[str, Tensors], asked: Collection[str]) -> None:
        """Write them in place of what was there of the topics ``asked``, and forget those of other rounds."""
        self._make()
        others = {topic: own for topic, own in (self.answers(round_) or {}).items() if topic not in asked}
        save(self._answers(round_), {"local": {**others, **by_topic}}, {"round": round_})
        for old in self.folder.glob("answers-*.safetensors"):
            if old != self._answers(round_):
                old.unlink(missing_ok=True)

    def put_aside(self, trees: Mapping[str, Tree]) -> None:
        """Write what is needed until a secure summation is over; what was there is forgotten."""
        self._make()
        save(self._aside, trees)

    def aside(self) -> dict[str, Tree]:
        """What was put aside; nothing if it is not there, or damaged."""
        try:
            return load(self._aside)[0] if self._aside.is_file() else {}
        except UserError:
            return {}

    def forget_aside(self) -> None:
        """Nobody can open it any more."""
        self._aside.unlink()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Held while something is read, answered and changed: of two processes that are asked at once one refuses."""
        self._make()
        with ExitStack() as held:
            try:
                held.enter_context(RunLock(self.folder))
            except Occupied:
                raise UserError(
                    "this party is answering another message; it is asked again in the next round"
                ) from None
            yield

    def _make(self) -> None:
        self.folder.mkdir(0o700, parents=True, exist_ok=True)  # local states and secrets of sums are its user's alone

    @property
    def _aside(self) -> Path:
        return self.folder / "summing.safetensors"

    def _file(self, round_: int) -> Path:
        return self.folder / f"round-{round_:06d}.safetensors"

    def _settled(self, round_: int) -> Path:
        return self.folder / f"settled-{round_:06d}.safetensors"

    def _answers(self, round_: int) -> Path:
        return self.folder / f"answers-{round_:06d}.safetensors"


def _read(path: Path) -> Tree | None:
    if not path.is_file():
        return None
    try:
        return load(path)[0]["local"]
    except (UserError, LookupError):
        return None
