"""What a machine with a GPU has to say before a change lands, because no CI has one.

    python benchmarks/gpu.py             tests, a killed run, kernels of our own, ratios; about five minutes on an H200
    python benchmarks/gpu.py kernels     one part of it

Exit code 0 only if all of it holds, 2 if there is no GPU. Nothing is installed or fetched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT / "src"), str(ROOT)]

from tests.test_resume import check_identical, command, contents  # noqa: E402

import networks  # noqa: E402 (beside this file)
from fedshift.engines.torch_flags import steady  # noqa: E402

POOLED_FLOOR = {20: 0.80, 100: 0.85}  # of the better pooled model's samples per second, by clients
SEQUENTIAL_FLOOR = {20: 28.0, 100: 38.0}  # times those of the sequential engine
COMPILING = 5.0  # seconds that Triton may need for a run's kernels where nothing is cached
WORKERS = 14  # of pytest, where it can have some
TAIL = 60  # lines shown of what failed

# Both convolutions of this network are for kernels of our own.
FAST = ["data.size=12", "model.name=cnn", "model.width=32", "precision=tf32"]
KILLED_AFTER = 8  # lines of metrics.jsonl

# ``fedshift run`` with somebody listening to Triton's compiler; what was heard goes to a file.
LISTENING = """
import json, sys
from triton import knobs
heard = []
def listener(*, times, cache_hit, **_):
    if not cache_hit:
        heard.append(times.total / 1e6)
knobs.compilation.listener = listener
from fedshift.cli import main
path, sys.argv = sys.argv[1], ["fedshift", *sys.argv[2:]]
try:
    main()
finally:
    with open(path, "w") as file:
        json.dump(heard, file)
"""


class Failed(Exception):
    """A part does not hold; the sentence says what."""


def environment(**more: str) -> dict[str, str]:
    """For other processes, which start in the repository: paths of this one stay what they are."""
    given = [str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*given, str(ROOT / "src"), str(ROOT)]), **more}


def carried_out(arguments: list[str], **more: str) -> str:
    """What a process printed; if it fails, the end of that is shown."""
    done = subprocess.run(
        arguments,
        cwd=ROOT,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print("\n".join(done.stdout.splitlines()[-TAIL:]), flush=True)
        raise Failed(f"exit code {done.returncode}: {last_line(done.stdout)}")
    return done.stdout


def last_line(text: str) -> str:
    lines = [line.strip("= ") for line in text.splitlines() if line.strip("= ")]
    return lines[-1] if lines else "nothing was printed"


def tests() -> str:
    """Methods, adapters and kernels against a CPU."""
    several = ["-n", str(WORKERS)] if importlib.util.find_spec("xdist") else []
    engines = [
        f"tests/engines/test_{name}.py"
        for name in ("convolutions", "kernels", "kernel_orders", "maps", "normalisation")
    ]
    said = carried_out(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tier",
            "all",
            "-m",
            "not interpreter",  # what a GPU needs none for
            *several,
            "tests/cuda",
            *engines,
        ]
    )
    if "skipped" in last_line(said):
        raise Failed(f"some tests were skipped: {last_line(said)}")
    return last_line(said)


def resume() -> str:
    """A run that is killed and resumed ends bit-identical to one that was not."""
    changes = [part for setting in FAST for part in ("-c", setting)]
    more = ["--device", "cuda", *changes]
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        started = [sys.executable, "-m", "fedshift.cli"]
        carried_out([*started, *command(whole, "vmapped", *more)])
        log = Path(folder, "log")
        with open(log, "w") as file:
            process = subprocess.Popen(
                [*started, *command(killed, "vmapped", *more)],
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            while process.poll() is None and not _under_way(killed):
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.wait()
        if process.returncode != -signal.SIGKILL:
            print("\n".join(log.read_text().splitlines()[-TAIL:]), flush=True)
            raise Failed("the run was over before it could be killed")
        reached = sum(len(path.read_text().splitlines()) for path in killed.rglob("metrics.jsonl"))
        carried_out([*started, *command(killed, "vmapped", *more, "--resume")])
        try:
            check_identical(contents(whole), contents(killed))
        except AssertionError as error:
            raise Failed(f"the resumed run differs: {str(error)[:200]}") from error
        ways = used(whole)
    if "implicit" not in ways:
        raise Failed(f"kernels of our own were not in use, but {', '.join(ways) or 'none'}")
    return f"killed after {reached} lines, resumed bit for bit ({', '.join(ways)})"


def _under_way(folder: Path) -> bool:
    metrics = [path for path in folder.rglob("metrics.jsonl") if not (path.parent / "done").exists()]
    return any(len(path.read_text().splitlines()) >= KILLED_AFTER for path in metrics)


def used(folder: Path) -> list[str]:
    """The ways of convolving that all runs in a folder noted."""
    facts = [json.loads(path.read_text()) for path in folder.rglob("done")]
    return sorted({way for one in facts for way in one.get("convolutions", [])})


def kernels() -> str:
    """A short run uses kernels of our own, and Triton compiles them quickly where none is cached."""
    with tempfile.TemporaryDirectory() as folder:
        out, heard = Path(folder, "out"), Path(folder, "heard.json")
        settings = [*FAST, "rounds=2", "baselines=false", 'method=[{name="fedavg"}]']
        changes = [part for setting in settings for part in ("-c", setting)]
        run = ["run", *changes, "--out", str(out), "--engine", "vmapped", "--device", "cuda"]
        carried_out([sys.executable, "-c", LISTENING, str(heard), *run], TRITON_CACHE_DIR=str(Path(folder, "triton")))
        times, ways = json.loads(heard.read_text()), used(out)
    if "implicit" not in ways:
        raise Failed(f"kernels of our own were not in use, but {', '.join(ways) or 'none'}")
    stated = f"{len(times)} kernels compiled in {sum(times):.1f} s"
    if not times:
        raise Failed("Triton was not heard compiling anything")
    if sum(times) > COMPILING:
        raise Failed(f"{stated}, more than {COMPILING:g}")
    return stated


def ratios() -> str:
    """Stacked clients with the settings of a run against one pooled model and against the loop."""
    stated, missed = [], False
    cnn = networks.NETWORKS["cnn"]
    with steady(tf32=True):
        for clients in POOLED_FLOOR:
            ours, ways = networks.vmapped_rate(cnn, clients, rows=0)
            if "implicit" not in ways:
                raise Failed("kernels of our own were not in use")
            loop = networks.loop_rate(cnn, clients)
            pooled = max(networks.rate(networks.pooled(cnn, clients, compiled)) for compiled in (False, True))
            shares = (ours / pooled, ours / loop)
            stated.append(f"{clients} clients: {shares[0]:.2f} of pooled, {shares[1]:.1f} x sequential")
            missed |= shares[0] < POOLED_FLOOR[clients] or shares[1] < SEQUENTIAL_FLOOR[clients]
            networks.freed()
    if missed:
        raise Failed(f"{'; '.join(stated)}; floors are {POOLED_FLOOR} and {SEQUENTIAL_FLOOR}")
    return "; ".join(stated)


PARTS: dict[str, Callable[[], str]] = {"tests": tests, "resume": resume, "kernels": kernels, "ratios": ratios}


def main() -> int:
    """All parts, whatever becomes of each, and a line about each."""
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use here, and this is a check of one", file=sys.stderr)
        return 2
    lines, fine = [], True
    chosen = sys.argv[1:] or list(PARTS)
    for name in chosen:
        if name not in PARTS:
            print(f"there is no part {name!r}; there are: {', '.join(PARTS)}", file=sys.stderr)
            return 2
    for name, part in [(name, PARTS[name]) for name in chosen]:
        print(f"{name}: {part.__doc__}", flush=True)
        started = time.perf_counter()
        try:
            detail, held = part(), True
        except Exception as error:  # the other parts have something to say too
            detail, held = str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}", False
        lines.append(
            f"{name:<8} {'ok' if held else 'FAILED':<7} {time.perf_counter() - started:>6.1f} s  "
            f"{' '.join(detail.split())[:300]}"
        )
        fine &= held
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}", *lines, sep="\n")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
