"""What a search gave, for people."""

from __future__ import annotations

from fedshift.measures.measurement import MEASURES
from fedshift.results.plain import Sheet
from fedshift.tune.searching import BEST, TRIALS, Trial, Tuned, ranked


def trials_table(tuned: Tuned, most: int) -> Sheet:
    """The best trials of every method, a column for each key and each stream."""
    measure = MEASURES[tuned.measure]
    keys = list(dict.fromkeys(key for trial in tuned.trials for key in trial.values))
    streams = list(dict.fromkeys(name for trial in tuned.trials for name in trial.by_stream))
    unit = "" if tuned.measure == "loss" else " in %"
    named = f"{measure.title[0].upper()}{measure.title[1:]}{unit}"
    sheet = Sheet(title=f"{named} on validation images, the best trials of each method", title_justify="left")
    for head in ("method", "trial", *keys, "adapter"):
        sheet.add_column(head)
    for name in [*streams, *(["mean"] if len(streams) > 1 else [])]:
        sheet.add_column(name, justify="right")
    for method in tuned.best:
        for trial in ranked(tuned.trials, method, tuned.measure)[:most]:
            numbers = [trial.by_stream.get(name) for name in streams]
            numbers += [trial.score] if len(streams) > 1 else []
            shown = ["-" if number is None else f"{number:.2f}" for number in numbers]
            values = [str(trial.values.get(key, "")) for key in keys]
            sheet.add_row(method, str(trial.number), *values, trial.adapter or "-", *shown)
    return sheet


def lines(tuned: Tuned) -> list[str]:
    """The settings to run with, and where everything is."""
    lost = [trial for trial in tuned.trials if trial.score is None]
    said = [f"best of {method}: {_settings(trial)}" for method, trial in tuned.best.items()]
    said += [f"{len(lost)} of {len(tuned.trials)} trials gave no number: their training diverged"] if lost else []
    said.append(
        "Chosen by validation images; no test label was read. The best of many trials is lucky too: the test is next."
    )
    said.append(f"Test it: fedshift run {tuned.folder / BEST}. All trials: {tuned.folder / TRIALS}")
    return said


def _settings(trial: Trial) -> str:
    own = ", ".join(f"{key} = {value}" for key, value in trial.values.items())
    return f"{own} (adapter {trial.adapter}, {trial.score:.2f})"
