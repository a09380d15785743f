"""TensorBoard: event files, a folder for each run; ``tensorboard --logdir FOLDER`` shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedshift.track.base import allowed, needs


class TensorBoard:
    """Into a folder; extra ``track``."""

    def __init__(self, folder: str | Path = "runs/tensorboard") -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise needs("tensorboard", "track") from None
        self._folder, self._make = Path(folder), SummaryWriter
        self._writers: dict[str, Any] = {}

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """A folder, with the settings as text."""
        writer = self._writers[run] = self._make(str(self._folder / run))
        text = "\n".join(f"    {key} = {json.dumps(value, default=str)}" for key, value in settings.items())
        writer.add_text("settings", text)

    def log(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """A scalar for each number."""
        for name, value in numbers.items():
            self._writers[run].add_scalar(allowed(name), value, step)
        self._writers[run].flush()

    def end(self, run: str, numbers: Mapping[str, float]) -> None:
        """Scores are scalars of step 0."""
        self.log(run, 0, numbers)
        self._writers.pop(run).close()

    def close(self) -> None:
        """Whatever was begun is written."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()
