"""A user's mistake gets one sentence and exit code 2; nothing is half-written."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedshift import cli


def png(shade: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (shade % 256, shade // 256, 7)).save(buffer, "PNG")
    return buffer.getvalue()


def parquet(path: Path, rows: int = 40, domains: int = 2, **columns: list) -> Path:
    table = {
        "image": [{"bytes": png(i), "path": f"{i}.png"} for i in range(rows)],
        "label": [i % 2 for i in range(rows)],
        "domain": [f"d{i % domains}" for i in range(rows)],
        **columns,
    }
    pq.write_table(pa.table(table), path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    good = parquet(tmp_path / "good.parquet")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(good.read_bytes()[:300])
    undecodable = [{"bytes": png(i) if i != 5 else b"no picture", "path": f"{i}.png"} for i in range(40)]
    empty = tmp_path / "folder"
    (empty / "a" / "cat").mkdir(parents=True)
    (empty / "a" / "dog").mkdir()
    Image.new("RGB", (8, 8)).save(empty / "a" / "cat" / "1.png")
    no_toml = tmp_path / "bad.toml"
    no_toml.write_text("rounds = = 3")
    lost = tmp_path / "lost.toml"
    lost.write_text('extends = "nowhere"')
    return {
        "good": good,
        "broken": broken,
        "undecodable": parquet(tmp_path / "undecodable.parquet", image=undecodable),
        "folder": empty,
        "toml": no_toml,
        "lost": lost,
    }


MISTAKES = {
    "missing file": (["-c", "data.source=parquet:/nowhere/x.parquet"], "x.parquet"),
    "corrupt parquet": (["-c", "data.source=parquet:{broken}"], "broken.parquet"),
    "undecodable image": (["-c", "data.source=parquet:{undecodable}"], "undecodable.parquet"),
    "class without samples": (["-c", "data.source=folder:{folder}"], "dog"),
    "more clients than samples": (
        ["-c", "data.source=parquet:{good}", "-c", 'partition={{kind="iid", clients=41}}'], "41",
    ),
    "unknown key": (["-c", "ronds=3"], "unknown key 'ronds'; did you mean 'rounds'"),
    "unknown key inside": (["-c", "data.sorce=x"], "data.sorce"),
    "unknown option": (["-c", "train.learning-rate=3"], "train"),
    "negative epochs": (["-c", "train.local-epochs=-1"], "local-epochs must not be negative, not -1"),
    "negative rounds": (["-c", "rounds=-1"], "rounds"),
    "ill-typed": (["-c", "train.lr=fast"], "lr"),
    "unknown method": (["-c", 'method=[{{name="fedavgg"}}]'], "did you mean 'fedavg'"),
    "unknown adapter": (["-c", 'method=[{{name="fedavg", adapters=["tint"]}}]'], "did you mean 'tent'"),
    "unknown partition": (["-c", 'partition={{kind="by-moon"}}'], "by-moon"),
    "unknown stream": (["-c", 'stream=[{{name="a", kind="b"}}]'], "there is no stream kind 'b'"),
    "unknown model": (["-c", "model.name=cnnn"], "did you mean 'cnn'"),
    "invalid pair": (["-c", "model.norm=false", "-c", 'method=[{{name="fedavg", adapters=["bn"]}}]'], "BatchNorm"),
    "method without norm": (["-c", "model.norm=false", "-c", 'method=[{{name="fedbn"}}]'], "'fedbn' needs normalisation"),
    "unknown source": (["-c", "data.source=ftp:x"], "ftp"),
    "unset variable": (["-c", "data.source=parquet:$NO_SUCH_VARIABLE/x"], "NO_SUCH_VARIABLE"),
    "same label twice": (["-c", 'method=[{{name="fedavg"}}, {{name="fedavg"}}]'], "'fedavg'"),
    "same adapter label twice": (
        ["-c", 'method=[{{name="fedavg", adapters=["none", {{name="tent", label="none"}}]}}]'], "called 'none'",
    ),
    "a label that leaves the folder": (["-c", 'method=[{{name="fedavg", label="../x"}}]'], "cannot name a folder"),
    "mixed networks": (
        ["-c", 'model=[{{name="cnn"}}, {{name="mlp"}}]', "-c", 'method=[{{name="fedavg"}}]'], "one architecture",
    ),
    "negative method epochs": (["-c", 'method=[{{name="finetune", epochs=-1}}]'], "epochs must not be negative"),
    "negative mu": (["-c", 'method=[{{name="fedprox", mu=-1}}]'], "mu must not be negative"),
    "negative adapter rate": (
        ["-c", 'method=[{{name="fedavg", adapters=[{{name="tent", lr=-1.0}}]}}]'], "lr must not be negative",
    ),
    "no such method": (["-c", "method.fedavgg.mu=1"], "no method is called 'fedavgg'; there are: "),
    "bad override": (["-c", "rounds"], "key=value"),
    "no such device": (["--device", "tpu"], "tpu"),
    "no such engine": (["--engine", "warp"], "warp"),
    "no such preset": (["defualt"], "did you mean 'default'"),
    "not toml": (["{toml}"], "is not valid TOML"),
    "extends nothing": (["{lost}"], "extends 'nowhere', which is neither a preset nor a file beside it"),
    "mean of nothing": (["-c", 'evaluate.mean-of=["nowhere"]'], "mean-of: there is no stream 'nowhere'"),
    "a stream called mean": (["-c", 'stream=[{{name="mean", kind="original"}}]'], "cannot be called 'mean'"),
    "a paper's number that is none": (
        ["-c", 'method=[{{name="fedavg", adapters=[{{name="none", paper={{original="high"}}}}]}}]'], "must be a number",
    ),
    "too small for the network": (
        ["-c", "data.source=parquet:{good}", "-c", "data.size=2", "-c", 'stream=[{{name="o", kind="original"}}]',
         "-c", "split.unseen=0.0"], "4x4",
    ),
    "split": (["-c", "split.train=0.9"], "train + val + test must be 1"),
    "severity": (["-c", "stream.corrupted.severity=6"], "severity must be 1 to 5"),
    "unseen": (["-c", 'split.unseen=["nobody"]'], "nobody"),
    "two networks of one label": (
        ["-c", 'model=[{{name="mlp", label="a"}}, {{name="cnn", label="a"}}]'], "two networks are called 'a'",
    ),
    "a label that is no name": (["-c", 'model=[{{name="mlp", label="a/b"}}]'], "'a/b' cannot name a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_one_sentence_and_exit_code_2(
    case: str,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments, expected = MISTAKES[case]
    out = tmp_path / "out"
    filled = [argument.format(**files) for argument in arguments]
    monkeypatch.setattr("sys.argv", ["fedshift", "run", *filled, "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert expected in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1
    assert not out.exists()


def test_a_folder_that_cannot_hold_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr("sys.argv", ["fedshift", "run", "-c", "rounds=1", "--out", str(tmp_path / "file")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1  # the operating system says no
    assert "cannot hold the runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["show", "nowhere"], "there is no folder"),
        (["list", "things"], "there is no list"),
        (["list", "methods", "--format", "xml"], "table or json"),
    ],
)
def test_other_commands(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["fedshift", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_typer_mistakes_also_exit_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fedshift", "run", "--rounds", "3"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "--rounds" in capsys.readouterr().err
