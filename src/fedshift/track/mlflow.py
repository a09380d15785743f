"""MLflow: a server, or a folder of its own kind (``file:mlruns``); a run of an MLflow experiment for each run of ours."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from fedshift.track.base import allowed, needs

MOST = 100  # numbers and settings in one request
LONGEST = 500  # characters of a setting


class MLflow:
    """To a tracking URI, by default the one MLflow itself is set to; extra ``mlflow``."""

    def __init__(self, uri: str | None = None, experiment: str = "fedshift") -> None:
        if uri and uri.startswith("file:"):  # newer versions ask for this word before they write plain files
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            from mlflow.entities import Metric, Param
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise needs("mlflow", "mlflow") from None
        self._client, self._metric, self._param = MlflowClient(tracking_uri=uri), Metric, Param
        found = self._client.get_experiment_by_name(experiment)
        self._experiment = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self._runs: dict[str, str] = {}

    def begin(self, run: str, settings: Mapping[str, Any]) -> None:
        """A run with its settings as parameters."""
        made = self._client.create_run(self._experiment, run_name=run)
        self._runs[run] = made.info.run_id
        params = [self._param(allowed(key), str(value)[:LONGEST]) for key, value in settings.items()]
        for start in range(0, len(params), MOST):
            self._client.log_batch(self._runs[run], params=params[start : start + MOST])

    def log(self, run: str, step: int, numbers: Mapping[str, float]) -> None:
        """A metric for each number."""
        now = int(1000 * time.time())
        metrics = [self._metric(allowed(name), value, now, step) for name, value in numbers.items()]
        for start in range(0, len(metrics), MOST):
            self._client.log_batch(self._runs[run], metrics=metrics[start : start + MOST])

    def end(self, run: str, numbers: Mapping[str, float]) -> None:
        """Scores are metrics of step 0; then the run has finished."""
        self.log(run, 0, numbers)
        self._client.set_terminated(self._runs.pop(run))

    def close(self) -> None:
        """A run that did not end was killed."""
        for made in self._runs.values():
            self._client.set_terminated(made, status="KILLED")
        self._runs.clear()
