"""Weights & Biases: offline by default, into a folder that ``wandb sync`` sends; ``mode="online"`` sends at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from fedshift.track.base import allowed, needs


class WandB:
    """To a project; extra ``wandb``."""

    def __init__(
        self,
        project: str = "fedshift",
        folder: str | Path = "runs",
        mode: Literal["offline", "online"] = "offline",
    ) -> None:
        try:
            import wandb
        except ImportError:
            raise needs("wandb", "wandb") from None
        self._init, self._settings = wandb.init, wandb.Settings
        self._project, self._folder, self._mode = project, Path(folder), mode
        self._runs: dict[str, Any] = {}

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """A run with its settings; several may be open at once."""
        self._folder.mkdir(parents=True, exist_ok=True)
        quiet = self._settings(silent=True, console="off", disable_git=True, save_code=False)
        self._runs[run] = self._init(
            project=self._project,
            name=run,
            dir=str(self._folder),
            mode=self._mode,
            config=dict(settings),
            reinit="create_new",
            settings=quiet,
        )

    def log(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """Beside the round, because steps of theirs may not come twice."""
        self._runs[run].log({"round": step, **{allowed(name): value for name, value in numbers.items()}})

    def end(self, run: str, numbers: Mapping[str, float]) -> None:
        """Scores are the run's summary."""
        self._runs[run].summary.update({allowed(name): value for name, value in numbers.items()})
        self._runs.pop(run).finish()

    def close(self) -> None:
        """A run that did not end has failed."""
        for made in self._runs.values():
            made.finish(exit_code=1)
        self._runs.clear()
