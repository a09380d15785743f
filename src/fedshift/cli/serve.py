"""A model that goes on adapting behind HTTP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from fedshift.cli.app import app
from fedshift.cli.printing import console
from fedshift.errors import UserError

RANGES = {
    "--fit-after": (1, 100_000),  # they are held in memory until then
    "--deadline": (0, 60_000),
    "--save-every": (1, 1e9),
    "--save-seconds": (0.05, 86_400),  # less would keep a core busy with looking
    "--keep": (1, 10_000),
    "--false-alarms": (1e-12, 1),
    "--unknown-rate": (0, 1),
    "--max-body": (0.001, 2048),
    "--max-pixels": (0.001, 1000),
    "--rate": (0.001, 1e9),
    "--threads": (1, 1024),
}


@app.command()
def serve(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="ARTEFACT...", help="Artefacts, or folders of them (artefacts/ in a run folder)."),
    ],
    adapter: Annotated[
        str, typer.Option(help="An adapter of the artefact by label, or any by name; none does not adapt.")
    ] = "",
    change: Annotated[
        list[str] | None, typer.Option("--set", "-c", help="An adapter's option, for instance -c batch-size=16.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Another address needs --token-file, --certificate and --key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8080,
    token_file: Annotated[
        Path | None, typer.Option(help="A secret that requests must carry, 16 characters or more.")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="For TLS: a PEM file.")] = None,
    key: Annotated[Path | None, typer.Option(help="For TLS: a PEM file.")] = None,
    state: Annotated[Path, typer.Option(help="Where what is learnt is kept.")] = Path("serving"),
    fit_on: Annotated[
        Path | None, typer.Option(help="Unlabelled pictures for adapters that look at a whole set first.")
    ] = None,
    fit_after: Annotated[int, typer.Option(help="Without --fit-on they adapt after so many images.")] = 64,
    deadline: Annotated[
        float, typer.Option(help="Milliseconds a request waits for others, where an adapter wants a batch.")
    ] = 50.0,
    save_every: Annotated[int, typer.Option(help="Images between two versions on disk.")] = 1000,
    save_seconds: Annotated[float, typer.Option(help="Seconds between two versions on disk.")] = 5.0,
    keep: Annotated[int, typer.Option(help="Newest versions that are all kept; of older ones some are.")] = 20,
    fall_back: Annotated[
        str,
        typer.Option(
            help="To the frozen model: drift (images are not those it knows), harm (only at signs that adapting does "
            "harm) or never."
        ),
    ] = "drift",
    false_alarms: Annotated[float, typer.Option(help="Alarms about drift for each ordinary image.")] = 1e-6,
    unknown_rate: Annotated[float, typer.Option(help="Share of ordinary images that are called unknown.")] = 0.01,
    max_body: Annotated[float, typer.Option(help="MiB of one request.")] = 16.0,
    max_pixels: Annotated[float, typer.Option(help="Megapixels of one image.")] = 32.0,
    rate: Annotated[float, typer.Option(help="Requests a second from one address.")] = 1000.0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    threads: Annotated[int, typer.Option(help="Of torch, for one model.")] = 1,
    docker: Annotated[
        bool, typer.Option("--docker", help="Do not serve: write a folder to build a Docker image from.")
    ] = False,
    out: Annotated[Path, typer.Option(help="With --docker: a new folder.")] = Path("docker"),
) -> None:
    """Serve clients over HTTP: predictions that go on adapting, with a history and guards. A page is at /."""
    from fedshift.experiment.files import assignment
    from fedshift.serve.opening import artefacts_in, open_service
    from fedshift.serve.service import FallBack, Settings

    if fall_back not in get_args(FallBack):
        raise UserError(f"--fall-back must be one of {', '.join(get_args(FallBack))}, not {fall_back!r}")
    given = (fit_after, deadline, save_every, save_seconds, keep, false_alarms, unknown_rate, max_body, max_pixels, rate,
             threads)  # fmt: skip
    for value, (name, (least, most)) in zip(given, RANGES.items(), strict=True):
        if not least <= value <= most:  # nor is what is no number
            raise UserError(f"{name} must be from {least:g} to {most:g}, not {value:g}")
    settings = Settings(fit_after, unknown_rate, false_alarms, cast(FallBack, fall_back))
    options = {".".join(name): value for name, value in map(assignment, change or [])}
    folders = artefacts_in(paths)
    services = [open_service(folder, adapter, options, settings, device=device) for folder in folders]
    screen = console()
    if docker:
        from fedshift.serve.docker import write_image

        for line in write_image(out, folders, services, adapter, change or []):
            screen.print(line, soft_wrap=True)
        return
    missing = [name for name in ("fastapi", "uvicorn", "httptools", "multipart") if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(f'serving needs {", ".join(missing)}: pip install "fedshift[serve]"')
    from fedshift.serve.bodies import Limits
    from fedshift.serve.host import Keeping
    from fedshift.serve.server import Address, Options, serve

    whole = Options(
        address=Address(host, port, token_file, certificate, key),
        state=state,
        keeping=Keeping(save_every, save_seconds, keep, deadline / 1000),
        limits=Limits(body=int(max_body * 2**20), pixels=int(max_pixels * 1e6)),
        rate=rate,
        fit_on=fit_on,
        threads=threads,
    )

    def ready(url: str) -> None:
        for service in services:
            place = url if len(services) == 1 else f"{url}/{service.name}"
            text = f"{service.name}, adapter {service.label}: POST {place}/predict"
            screen.print(text, soft_wrap=True)
        screen.print(f"Page: {url}/  State: {state}/", soft_wrap=True)

    serve(services, whole, ready)
