"""The command line: golden output, files, exit codes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from simulator import cli

GOLDEN = Path(__file__).parent / "golden"


def run(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["simulate", *map(str, arguments)])
    status = 0
    try:
        cli.main()
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


POISSON = ("--arrivals", "poisson", "--rate", "9")
COMPARE = ("--target", "llama-3.1-8b", "--batch-size", "4")


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"set UPDATE_GOLDEN=1 where the change of {name} is meant"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("compare", ["--policy", "echo:levels=5,top_k=4,chain:levels=3", *COMPARE, "--by-task"]),
        (
            "poisson",
            ["--policy", "chain:levels=3", *COMPARE, "--arrivals", "poisson", "--rate", "9"],
        ),
        ("capped", ["--policy", "static:tree=0/1/00", *COMPARE, "--k-max", "3", "--cap-all"]),
    ],
)
def test_tables_are_as_they_were(capsys, monkeypatch, trace_file, name, arguments):
    status, out, _ = run(capsys, monkeypatch, *arguments, "--trace", trace_file)
    assert status == 0
    check_golden(f"{name}.txt", out)


def test_trace_commands(capsys, monkeypatch, trace, trace_file, tmp_path):
    status, out, _ = run(capsys, monkeypatch, "traces", "info", trace_file)
    assert status == 0
    assert trace.digest in out
    assert "SYNTHETIC" in out
    copy = tmp_path / "copy.pkl"
    status, out, _ = run(capsys, monkeypatch, "traces", "convert", trace_file, copy)
    assert status == 0
    status, out, _ = run(capsys, monkeypatch, "traces", "validate", copy)
    assert (status, "every invariant holds" in out) == (0, True)
    status, _, err = run(capsys, monkeypatch, "traces", "convert", trace_file, tmp_path / "x.txt")
    assert status == 2
    assert ".safetensors or .pkl" in err


def test_traces_list_names_the_bundled_ones(capsys, monkeypatch):
    status, out, _ = run(capsys, monkeypatch, "traces", "list")
    assert status == 0
    assert "qwen2.5-coder-1.5b" in out
    assert "SYNTHETIC" in out


def test_output_files_hold_the_table(capsys, monkeypatch, trace_file, tmp_path):
    files = tmp_path / "out.json", tmp_path / "out.csv"
    status, *_ = run(
        capsys, monkeypatch, "--policy", "chain:levels=2", *COMPARE,
        "--trace", trace_file, "--json", files[0], "--csv", files[1],
    )  # fmt: skip
    assert status == 0
    rows = json.loads(files[0].read_text())["batches"][0]["rows"]
    lines = list(csv.DictReader(files[1].read_text().splitlines()))
    assert [row["policy"] for row in rows] == [line["policy"] for line in lines]
    assert float(lines[1]["tokens_per_s"]) == rows[1]["summary"]["tokens_per_s"]


def test_calibration_files_make_the_same_run(capsys, monkeypatch, trace_file, tmp_path):
    file = tmp_path / "calibration.json"
    spec = "echo:levels=5,top_k=4"
    common = ("--policy", spec, *COMPARE, "--trace", trace_file)
    status, out, _ = run(capsys, monkeypatch, "calibrate", *common, "--out", file)
    assert status == 0
    assert "AUC" in out
    _, fresh, _ = run(capsys, monkeypatch, *common)
    _, loaded, _ = run(capsys, monkeypatch, *common, "--calibration", file)
    assert fresh == loaded


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "ecoh"], "Did you mean 'echo'"),
        (["--batch-size", "many"], "--batch-size must be whole numbers"),
        (["--batch-size", "0"], "batch_sizes"),
        (["--k-max", "-3"], "k_max"),
        (["--json", "/nowhere/out.json"], "create the folder"),
        (["--trace", "nothere"], "No trace named 'nothere'"),
        (["--policy", "missing.py:P"], "does not exist"),
        (["--calibration", "missing.json"], "calibration file or bundled trace"),
        (["traces", "info", "nothere"], "No trace named"),
        (["calibrate", "--policy", "chain"], "anything to calibrate"),
    ],
)
def test_user_errors_are_one_sentence_and_status_2(
    capsys, monkeypatch, trace_file, arguments, words
):
    base = [] if arguments[0] in {"traces", "calibrate"} else ["--target", "llama-3.1-8b"]
    extra = [] if "--trace" in arguments or arguments[0] == "traces" else ["--trace", trace_file]
    status, _, err = run(capsys, monkeypatch, *arguments, *base, *extra)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_interrupted_runs_leave_no_file(capsys, monkeypatch, trace_file, tmp_path):
    """Kind: a partial result that looks complete."""
    import simulator.run

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulator.run, "summarise", interrupt)
    out = tmp_path / "out.json"
    status, _, err = run(
        capsys, monkeypatch, "--policy", "chain:levels=2", *COMPARE, "--trace", trace_file,
        "--json", out,
    )  # fmt: skip
    assert status == 130
    assert "nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_help_does_not_wait_for_torch():
    """Kind: a heavy import at start-up. Checked by what is imported, not by the clock."""
    code = (
        "import sys; sys.argv = ['simulate', '--help']\n"
        "from simulator.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'scipy', 'numpy', 'simpy'} & set(sys.modules), 'heavy import'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
