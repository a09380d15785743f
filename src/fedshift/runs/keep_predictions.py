"""The probabilities of every test image, kept beside the scores: for measures by subgroup, and any measure of tomorrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedshift.engines.base import Score
from fedshift.experiment.schema import AdapterSpec
from fedshift.runs.measuring import predictions_of
from fedshift.runs.plan import Job
from fedshift.runs.served import Served
from fedshift.store.files import Damaged, attempt
from fedshift.store.metric import Metric
from fedshift.store.predictions import ClientPredictions, packed, predictions_file, read_predictions

MOST_BYTES = 32 << 20  # of one adapter's probabilities, before they are compressed, that are kept without asking


def lacks_predictions(job: Job, spec: AdapterSpec, damaged: list[Damaged]) -> bool:
    """Whether they were asked for and are not there, or are there and damaged."""
    if not predictions_file(job.folder.path, spec.title).exists():
        return job.experiment.evaluate.predictions is True
    return attempt(lambda: read_predictions(job.folder.path, spec.title), damaged) is None


def keep_predictions(
    job: Job,
    spec: AdapterSpec,
    number: int,
    found: Sequence[tuple[Served, Mapping[tuple[str, str], Score]]],
    classes: Sequence[str],
) -> None:
    """Write those of the models of round ``number``, if they are wanted or few; ``classes`` names every logit."""
    asked = job.experiment.evaluate.predictions
    path = predictions_file(job.folder.path, spec.title)
    size = sum(4 * score.log_probabilities.numel() for _, scores in found for score in scores.values())
    if asked is False or (asked is None and size > MOST_BYTES) or not size:
        path.unlink(missing_ok=True)  # of other scores
        return
    parts = [
        _client_predictions(job, Metric(served.model, stream, served.population), client, score)
        for served, scores in found
        for (client, stream), score in scores.items()
        if score.samples
    ]
    job.folder.write(path.relative_to(job.folder.path).as_posix(), packed(number, parts, classes))


def _client_predictions(job: Job, metric: Metric, client: str, score: Score) -> ClientPredictions:
    task = job.task
    samples = task.samples(task.client(client), metric.stream)
    return ClientPredictions(
        metric,
        client,
        ids=samples.ids[samples.index].numpy(),
        groups=task.groups_of(samples).numpy(),
        predictions=predictions_of(score),
        attributes={name: task.attribute(name, samples) for name in task.attributes},
    )
