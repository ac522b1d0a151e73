"""`simulate costs`: the table, validation, fits, and what they refuse."""

import json
import subprocess
import sys
import tomllib

import pytest

from simulator import cli
from simulator.cost.parameters import NEUTRAL
from tests.simulator.test_cost_fit import HEADER, rows_of, write


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["simulate", "costs", *arguments])
    try:
        cli.main()
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.fixture
def steps_file(tmp_path):
    lines = [
        f"{s.model},{s.tp},{s.batch},{s.context},1,{s.measured_ms:.6f},H100 SXM,bf16,trtllm 1.0,"
        f"serving_tpot,{s.isl},{s.osl}"
        for s in rows_of(NEUTRAL)
    ]
    return write(tmp_path, *lines)


def test_table_by_operator(monkeypatch, capsys, tmp_path):
    out_file = tmp_path / "table.json"
    status, out, _ = run(
        monkeypatch, capsys, "--target", "qwen3-235b", "--tp", "8", "--hardware", "h100",
        "--batch-size", "64", "--context", "2048", "--tokens", "1..512", "--json", str(out_file),
    )  # fmt: skip
    assert status == 0
    for word in ("gemm ms", "experts ms", "attention ms", "all_reduce ms", "k_max", "us/token"):
        assert word in out
    table = json.loads(out_file.read_text())
    assert [row["tokens"] for row in table["rows"]] == [0, *(2**n for n in range(10))]
    assert table["k_max"] == table["knees"]["1.25"]
    row = table["rows"][0]
    parts = set(row) - {"tokens", "rows", "total", "marginal_per_token"}
    assert sum(row[part] for part in parts) == pytest.approx(row["total"])
    assert "cycle by stage: tree of 5 levels, 8 nodes expanded per level, 3 accepted" in out
    stages = ("draft", "select", "pack", "verify", "compact", "host")
    for cycle in table["cycle"]["rows"]:
        assert sum(cycle[stage] for stage in stages) == pytest.approx(cycle["total"])
    assert table["cycle"]["rows"][0]["total"] == pytest.approx(row["total"])
    assert all(table["cycle"]["rows"][-1][stage] > 0.0 for stage in stages)
    assert table["costs"]["kind"] == "roofline"


def test_a_chain_moves_nothing(monkeypatch, capsys):
    status, out, _ = run(
        monkeypatch, capsys, "--target", "qwen3-8b", "--tokens", "24", "--width", "1",
        "--levels", "3", "--accepted", "2",
    )  # fmt: skip
    assert status == 0
    assert "chain of 3 levels, 2 accepted" in out
    assert out.splitlines()[-1].split()[5] == "0.0"


def test_steps_of_a_table_where_the_knee_lies_beyond(monkeypatch, capsys, tmp_path):
    lines = [f"qwen3-8b,1,{b},{c},1,{6 + b + c / 1e3}" for b in (1, 8) for c in (512, 2048)]
    path = write(tmp_path, *lines, header="model,tp,batch,context,tokens,ms")
    out_file = tmp_path / "table.json"
    options = ("--target", "qwen3-8b", "--costs", f"table:{path}", "--json", str(out_file))
    status, out, _ = run(monkeypatch, capsys, *options, "--tokens", "0")
    assert status == 0
    assert "table of 4 measured steps; drafts, prefill" in out
    assert "1.25x beyond what was measured" in out
    assert json.loads(out_file.read_text())["k_max"] is None
    status, _, err = run(monkeypatch, capsys, *options, "--tokens", "64")
    assert status == 2
    assert "covers tokens per request 1 to 1" in err


def test_knees_of_every_batch(monkeypatch, capsys, tmp_path):
    out_file = tmp_path / "knees.json"
    options = ("knees", "--target", "llama-3.1-8b", "--batch-size", "8,64")
    status, out, _ = run(monkeypatch, capsys, *options, "--markdown", "--json", str(out_file))
    assert status == 0
    assert "| llama-3.1-8b, 8 | 67/157/319 |" in out
    knees = json.loads(out_file.read_text())["knees"]
    assert [(knee["tp"], knee["batch_size"]) for knee in knees] == [
        (tp, batch) for tp in (1, 2, 4, 8) for batch in (8, 64)
    ]
    for knee in knees:
        assert knee["k_max"] == knee["padded"][0] - knee["batch_size"]
        assert knee["published"] == sorted(knee["published"])
    status, out, _ = run(monkeypatch, capsys, *options)
    assert (status, "published, no padding" in out) == (0, True)


def test_policies_are_timed_and_counted(monkeypatch, capsys, trace_file, tmp_path):
    out_file = tmp_path / "times.toml"
    status, out, _ = run(
        monkeypatch, capsys, "policies", "--policy", "chain:levels=3", "--batch-size", "1,2",
        "--steps", "2", "--repeats", "1", "--device", "cpu", "--trace", str(trace_file),
        "--target", "llama-3.1-8b", "--out", str(out_file),
    )  # fmt: skip
    assert status == 0
    assert "operations" in out
    content = tomllib.loads(out_file.read_text())
    assert [row["ops"] for row in content["policy"]] == [3, 3]


def test_validation_as_json(monkeypatch, capsys, tmp_path, steps_file):
    out_file = tmp_path / "errors.json"
    status, out, _ = run(monkeypatch, capsys, "validate", str(steps_file), "--json", str(out_file))
    assert status == 0
    assert "pure roofline" in out
    assert "affine" not in out  # three rows per machine are too few for a line
    errors = json.loads(out_file.read_text())
    assert 0.0 <= errors["median"] <= errors["p90"] <= errors["max"] < 1.0
    assert set(errors["by_model"]) == {"llama-3.1-8b", "qwen3-32b"}
    assert set(errors["by_engine"]) == {"trtllm"}
    assert set(errors["by_kind"]) == {"serving_tpot"}
    assert errors["worst"][0]["row"].startswith(("llama", "qwen"))
    assert errors["baselines"]["pure roofline"]["median"] > errors["median"]


def test_fit_writes_constants_that_the_other_commands_take(
    monkeypatch, capsys, tmp_path, steps_file
):
    out_file = tmp_path / "costs.toml"
    status, out, _ = run(
        monkeypatch, capsys, "fit", str(steps_file), "--out", str(out_file), "--start", "neutral"
    )
    assert status == 0
    assert "95 % interval" in out
    content = tomllib.loads(out_file.read_text())
    assert content["fit"]["rows"] == 18
    entry = content["constants"]["trtllm_step_ms"]
    assert entry["low"] < entry["value"] < entry["high"]
    assert {"unit", "meaning", "source"} <= set(entry)
    status, out, _ = run(monkeypatch, capsys, "validate", str(steps_file), "--costs", str(out_file))
    assert status == 0
    assert "this model" in out
    status, out, _ = run(
        monkeypatch, capsys, "--target", "qwen3-8b", "--costs", str(out_file), "--tokens", "8"
    )
    assert status == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "qwen3-32"), "Did you mean 'qwen3-32b'"),
        (("--target", "qwen2.5-coder-1.5b", "--tp", "8"), "divide the 12 attention heads"),
        (("--target", "qwen3-8b", "--tokens", "a..b"), "--tokens must be one number or"),
        (("--target", "qwen3-8b", "--tokens", "9..3"), "0 <= FIRST <= LAST"),
        (("--target", "qwen3-8b", "--batch-size", "0"), "batch-size >= 1"),
        (("--target", "qwen3-8b", "--engine", "sglan"), "Did you mean 'sglang'"),
        (("--target", "qwen3-8b", "--draft", "x"), "draft goes with a config.json"),
        (("--hardware", "h100"), "costs needs --target"),
        (("validate", "none.csv"), "must be a CSV file of measured steps"),
        (("validate", "none.csv", "--costs", "table:x.csv"), "about the computed model"),
        (("--target", "qwen3-8b", "--costs", "tabel:x.csv"), "table:STEPS.csv, affine:STEPS.csv"),
        (("--target", "qwen3-8b", "--accepted", "9"), "0 <= accepted <= levels; got 5, 8 and 9"),
        (("knees", "--batch-size", "0"), "batch sizes >= 1"),
        (("policies", "--batch-size", "x"), "whole numbers separated by commas"),
        (("--target", "qwen3-8b", "--json", "/nowhere/out.json"), "create the folder"),
    ],
)
def test_user_errors_are_one_sentence_and_status_2(monkeypatch, capsys, arguments, message):
    status, _, err = run(monkeypatch, capsys, *arguments)
    assert status == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_too_few_rows_for_a_fit(monkeypatch, capsys, tmp_path):
    path = write(tmp_path, "qwen3-8b,1,8,340,1,7.6,H100,bf16,vllm,decode_step,,", header=HEADER)
    status, _, err = run(monkeypatch, capsys, "fit", str(path), "--out", str(tmp_path / "c.toml"))
    assert status == 2
    assert "needs at least 5 measured steps; got 1" in err


def test_any_model_through_its_config(monkeypatch, capsys, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, err = run(monkeypatch, capsys, "--target", str(tmp_path), "--tokens", "8")
    assert (status, err) == (0, "")
    assert "assumed EAGLE-3 head" in out


def test_help_imports_nothing_heavy():
    code = (
        "import sys, simulator.cli, simulator.costs_cli\n"
        "print([m for m in ('torch', 'numpy', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
