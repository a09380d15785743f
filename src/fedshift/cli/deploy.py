"""Beyond one machine: a federation of parties, on Flower."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import console
from fedshift.results.plain import Screen, Sheet

deploy = typer.Typer(
    name="deploy",
    help="Train across machines: every party keeps its data (needs the extra deploy).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(deploy)

ServerFolder = Annotated[Path, typer.Argument(metavar="SERVER", help="The folder server/ that init wrote.")]
PartyFolder = Annotated[Path, typer.Argument(metavar="PARTY", help="The folder parties/NAME/ that init wrote.")]
Data = Annotated[Path, typer.Option(help="The party's own images: a folder of class folders, or Parquet.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Neither TLS nor keys: for trials on one machine.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda")]
KeepCounts = Annotated[bool, typer.Option("--keep-counts", help="Not even counts of right and wrong answers leave.")]


@deploy.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.")],
    experiment: Annotated[str | None, typer.Option(help="A TOML file or a preset; left out with --demo.")] = None,
    party: Annotated[list[str] | None, typer.Option(help="A party's name; once for each.")] = None,
    server: Annotated[str, typer.Option(help="Where parties reach the server.")] = "127.0.0.1:9443",
    method: Annotated[str | None, typer.Option(help="Which method of the experiment; default: its first.")] = None,
    seed: Annotated[int, typer.Option(help="The run's seed.")] = 0,
    classes: Annotated[str | None, typer.Option(help="All classes, with commas; default: the experiment's.")] = None,
    least: Annotated[
        int | None, typer.Option(help="A round needs so many replies; default: all parties but one.")
    ] = None,
    deadline: Annotated[float, typer.Option(help="Seconds that a party has for a round.")] = 3600,
    change: Annotated[list[str] | None, typer.Option("--set", "-c", help="Override a key of the experiment.")] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Three kinds of digits, pictures included.")] = False,
    insecure: Insecure = False,
) -> None:
    """Write all that a federation needs: experiment, certificates, keys, units, a folder for every machine."""
    from fedshift.deploy.scaffold import demo_experiment, demo_parties
    from fedshift.deploy.scaffold import init as write
    from fedshift.errors import UserError
    from fedshift.experiment.schema import Experiment

    small = demo and experiment is None and not change
    chosen = demo_experiment() if small else Experiment.load(experiment, change or [])
    names = tuple(party or (demo_parties() if demo else ()))
    if not names:
        raise UserError("name the parties: --party NAME, once for each")
    terms = {"least": least if least is not None else max(1, len(names) - 1), "deadline": deadline}
    listed = tuple(name.strip() for name in classes.split(",")) if classes else ()
    options = {"method": method, "seed": seed, "classes": listed, "insecure": insecure, "demo": demo}
    federation = write(folder, chosen, names, server, **options, **terms)  # type: ignore[arg-type]
    screen = console()
    screen.print(f"{federation.spec.name}: {len(names)} parties, method {federation.spec.method}", style="bold")
    screen.print(f"Read {folder / 'README.md'}: what goes where, and the commands of each party.")


@deploy.command()
def check(folder: PartyFolder, data: Data, device: Device = "auto", keep_counts: KeepCounts = False) -> None:
    """Look whether a party's data fit the experiment, and list everything that would leave the machine."""
    from fedshift.deploy.kit import PartyKit
    from fedshift.deploy.leaving import check_tables

    kit = PartyKit(folder.resolve())
    screen = console()
    with Screen(stderr=True).status("reading the data"):
        found = check_tables(kit.party(data.resolve(), device, not keep_counts), kit.federation)
    for part in found:
        screen.print(part)


@deploy.command()
def server(
    folder: ServerFolder,
    host: Annotated[str, typer.Option(help="The address to listen on; 127.0.0.1: this machine only.")] = "0.0.0.0",
    insecure: Insecure = False,
) -> None:
    """Start the server, which only registered parties can reach, and stay."""
    from fedshift.deploy.kit import ServerKit
    from fedshift.deploy.processes import serve

    raise typer.Exit(serve(ServerKit(folder), host, insecure))


@deploy.command()
def client(
    folder: PartyFolder,
    data: Data,
    server: Annotated[str | None, typer.Option(help="HOST:PORT; default: as federation.toml says.")] = None,
    device: Device = "auto",
    keep_counts: KeepCounts = False,
    insecure: Insecure = False,
) -> None:
    """Take part with one's own data, and stay."""
    from fedshift.deploy.kit import PartyKit
    from fedshift.deploy.processes import join_in

    kit = PartyKit(folder)
    address = server or kit.federation.spec.address
    raise typer.Exit(join_in(kit, data, address, insecure, device, not keep_counts))


@deploy.command()
def run(
    folder: ServerFolder,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
) -> None:
    """Train with the parties that are there; at the end every party has its model on its own disk."""
    from fedshift.deploy.kit import ServerKit
    from fedshift.deploy.processes import run as train

    kit = ServerKit(folder)
    train(kit, resume)
    console().print(
        f"The table: fedshift show {kit.runs}. Who joins without labels needs {kit.offer}.", highlight=False
    )


@deploy.command()
def status(folder: ServerFolder) -> None:
    """Who is there, and what runs."""
    from fedshift.deploy.kit import ServerKit
    from fedshift.deploy.processes import status as look

    found, screen = look(ServerKit(folder)), console()
    table = Sheet("party", "is")
    for name, how in found.parties.items():
        table.add_row(name, how)
    screen.print(table)
    for one in found.runs:
        screen.print(f"run {one.get('run-id')}: {one.get('status')}")


@deploy.command()
def stop(folder: ServerFolder) -> None:
    """End what is being trained; deploy run --resume goes on with it."""
    from fedshift.deploy.kit import ServerKit
    from fedshift.deploy.processes import stop as end

    ended = end(ServerKit(folder))
    console().print(f"stopped: {', '.join(ended)}" if ended else "nothing was running")


@deploy.command()
def join(
    offer: Annotated[Path, typer.Argument(metavar="FOR-UNSEEN", help="The folder for-unseen/ of the server.")],
    data: Annotated[Path, typer.Option(help="Images without labels: a folder, one picture, Parquet.")],
    adapter: Annotated[str | None, typer.Option(help="An adapter of the run by its label, or any by its name.")] = None,
    out: Annotated[Path | None, typer.Option(help="A new folder; default FOR-UNSEEN/joined/DATA-ADAPTER.")] = None,
    device: Device = "auto",
) -> None:
    """Join a finished federation as an unseen party, without labels: a model of one's own, and predictions."""
    from fedshift.cli.join import print_joined
    from fedshift.join import join as join_run

    with Screen(stderr=True).status("joining"):
        joined = join_run(offer, data, adapter, out, device=device)
    print_joined(console(), joined)
