"""The whole of a federation's run at the server: rounds, scores, snapshot, and at last an artefact at every party."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedshift.deploy.engine import Exchange, Remote, without_handle
from fedshift.deploy.federation import Federation
from fedshift.deploy.openings import Openings
from fedshift.deploy.packet import Packet
from fedshift.deploy.session import ServerJob, entry_of, pinned
from fedshift.deploy.tellers import Tellers
from fedshift.engines.base import Compute
from fedshift.engines.torch_flags import steady
from fedshift.runs.deployment import Snapshot, calibration_in
from fedshift.runs.finish import finish
from fedshift.runs.identity import config_of, experiment_of
from fedshift.runs.new_folder import new_folder
from fedshift.runs.plan import Twin, check_unfinished, check_writable
from fedshift.runs.private import check_counted, privacy_of
from fedshift.runs.progress import Reporter
from fedshift.store.folder import CONFIG, DONE, METRICS, SNAPSHOT, RunFolder
from fedshift.store.found import read_config
from fedshift.store.lines import RoundLine, line_of


def job_of(federation: Federation, sizes: Mapping[str, int], out: Path) -> ServerJob:
    """The run of a federation; its folder does not depend on who happens to be there."""
    experiment, spec, seed = federation.experiment, federation.method, federation.spec.seed
    task = federation.roster(sizes)
    setup = federation.setup(task)
    check_counted(setup.privacy, setup.method, experiment, spec.title)
    config = config_of(experiment, spec, {}, seed, task, setup)
    folder = RunFolder.of(out, federation.spec.name, spec.title, seed, config)
    twin = Twin(experiment, seed, task)
    return ServerJob(experiment, {}, setup, task, seed, folder, config, twin, Openings(folder).lost)


def carry_out(federation: Federation, exchange: Exchange, out: Path, resume: bool, say: Reporter) -> RunFolder:
    """Train, score and hand over; what is done already is not done again. The run folder is one like every other."""
    compute = Compute()
    job = job_of(federation, exchange.sizes(), out)
    check_unfinished([job], resume, restart=False)
    check_writable([job])
    engine = Remote(
        exchange,
        federation.terms,
        job.setup,
        federation.experiment.rounds,
        len(federation.names),
        note=lambda text: say.note(f"{job.title}: {text}"),
        keep=lambda name: pinned(job.folder.path).get(name, ()),
        tellers=Tellers(job.folder).check,
        opening=Openings(job.folder).add if job.setup.privacy and job.setup.privacy.noise else lambda: None,
    )
    with steady():
        finish([job], engine, compute, resume, say)
        _serve(job, engine, compute, say)
    return job.folder


def _serve(job: ServerJob, engine: Remote, compute: Compute, say: Reporter) -> None:
    """Let every party write its artefact, of the round that validation chose."""
    session = job.session(engine, compute, say)
    real = [spec for spec in job.setup.spec.adapters if spec.name != "none"]
    choosers = [spec.title for spec in job.setup.spec.validated(job.experiment.evaluate)]
    validated = job.folder.history().validated
    for chooser in ["", *choosers]:
        say.doing(f"{job.title}: artefacts")
        adapters = [spec for spec in real if (spec.title if spec.title in choosers else "") == chooser]
        state = job.folder.best(compute.device, chooser)
        about = {"chooser": chooser, "run": job.title, "selection": "best-val" if validated else "last"}
        packets: dict[str, Packet] = {}
        deployment = session.deploy(state)
        measured = calibration_in(Snapshot.load(job.folder.path, chooser).server)  # everybody's is the same
        deployment = replace(deployment, server={**deployment.server, **measured})
        for name, tree in deployment.trained().items():
            facts = engine.of_models(name, session.arch_of(job.task.client(name)), tree)
            listed = {"adapters": [entry_of(spec) for spec in adapters]}
            packets[name] = Packet("serve", {**facts, **about, **listed}, without_handle(tree))
        served = engine.asked(packets)
        if missing := [name for name in packets if name not in served]:
            say.note(
                f"no artefact was written at {', '.join(missing)}: repeat with --resume once they are there, nothing is "
                "trained again"
            )


def offer(folder: RunFolder, target: Path) -> None:
    """Put what an unseen party needs of a finished run into a folder of its own; no state of any party is in it.

    Where ``[privacy]`` hides single parties, nothing in it says who took part in a round, or how many.
    """
    if target.is_dir():
        return
    names = (CONFIG, METRICS, DONE, SNAPSHOT)
    files = [folder.path / name for name in names]
    files += [*folder.path.glob("snapshots/*"), *folder.path.glob("adapters/*.jsonl")]
    with new_folder(target) as place:
        for path in files:
            copy = place / path.relative_to(folder.path)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        if _hides(folder):
            offered = RunFolder(place)
            offered.write(METRICS, "")
            for number, line in enumerate(map(line_of, folder.lines()), 1):
                blank = RoundLine(line.round, server=line.server) if isinstance(line, RoundLine) else line
                offered.log(blank, number)


def _hides(folder: RunFolder) -> bool:
    experiment = experiment_of(read_config(folder.path), folder.path)
    privacy = privacy_of(experiment, experiment.method[0])
    return privacy is not None and privacy.sums
