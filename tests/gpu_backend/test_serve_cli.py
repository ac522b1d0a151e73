"""``run_gpu`` from prompts to the table and the file."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gpu_backend import capture, serve_defaults, serve_run, serve_start
from gpu_backend.cli import app
from gpu_backend.prefix_backends import choice, flashinfer
from gpu_backend.sources.locate import LocatedModel
from simulator.cost.step_group import select_rows
from simulator.cost.step_rows import read_step_rows
from tests.gpu_backend.fake_attention import FAKES, num_calls
from tests.gpu_backend.tiny import save_model, tiny_tokenizer, write_prompts


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = save_model(folder / "target", seed=1)
    draft = save_model(folder / "draft", seed=2)
    prompts = write_prompts(folder / "one.jsonl", 4)
    return ["--target", str(target), "--draft", str(draft), "--prompts", str(prompts)]


def run(arguments):
    small = ["--batch-size", "2", "--max-new-tokens", "6", "--k-max", "8"]
    return CliRunner().invoke(app, [*small, *arguments])


def test_table_and_file(pair, tmp_path):
    out = tmp_path / "run.json"
    policies = ["--policy", "chain:levels=2,eagle3:levels=2,top_k=2,nodes=3"]
    result = run([*pair, *policies, "--json", str(out), "--show-text", "--seed", "4"])
    assert result.exit_code == 0, result.output
    assert "outputs   token for token those of plain decoding" in result.output
    assert "device    cpu" in result.output
    assert "…" not in result.output  # nothing is cut where the output is no terminal
    assert "one 3: " in result.output
    lines = [line for line in result.output.splitlines() if line.startswith("chain")]
    assert 1 <= sum("requests, " in line for line in lines) <= 5  # progress, not one per step
    content = json.loads(out.read_text())
    (batch,) = content["batches"]
    rows = batch["rows"]
    assert rows[0]["policy"] == "autoregressive"
    assert [row["policy"].split(":")[0] for row in rows[1:]] == ["chain", "eagle3"]
    plain = {r["number"]: r["tokens"] for r in rows[0]["requests"]}
    assert sorted(plain) == [0, 1, 2, 3]
    for row in rows:
        assert {r["number"]: r["tokens"] for r in row["requests"]} == plain
        assert row["same_outputs"] == row["compared_outputs"] == 4
        summary = row["summary"]
        assert summary["tokens_per_s"] > 0
        assert abs(sum(summary["time_split"].values()) - 1) < 1e-9
        emitted = summary["mat"] * summary["request_steps"]
        assert round(emitted) == sum(len(tokens) - 1 for tokens in plain.values())
    assert rows[0]["summary"]["mat"] == 1
    assert rows[1]["summary"]["k_per_step"] > 0
    assert batch["k_max_rule"] == "given"
    assert content["attention"] == "torch"
    assert "attention torch\n" in result.output


@pytest.mark.parametrize("name", ["fa3", "flashinfer", "fa2"])
def test_attention_by_a_library(pair, tmp_path, monkeypatch, name):
    """A stand-in, as if this machine had a GPU and the library: named, and with torch's tokens."""
    module = FAKES[name]()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(choice, "_objection", lambda *_: None)
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 2**20)
    told = []
    for attention in ("torch", name):
        out = tmp_path / f"{attention}.json"
        asked = ["--policy", "chain:levels=2", "--attention", attention, "--json", str(out)]
        result = run([*pair, *asked])
        assert result.exit_code == 0, result.output
        assert f"attention {attention}\n" in result.output
        content = json.loads(out.read_text())
        assert content["attention"] == content["config"]["attention"] == attention
        rows = content["batches"][0]["rows"]
        told.append([[request["tokens"] for request in row["requests"]] for row in rows])
    assert told[0] == told[1]
    assert num_calls(module) > 0


def test_costs_are_timed_for_whoever_weighs_them_and_written(pair, tmp_path):
    """The file has forwards of both models at three contexts; the simulator reads it."""
    out, steps = tmp_path / "run.json", tmp_path / "steps.csv"
    wanted = ["--policy", "chain:levels=2+fallback", "--requests", "3", "--json", str(out)]
    result = run([*pair, *wanted, "--write-costs", str(steps)])
    assert result.exit_code == 0, result.output
    assert "costs     timed here: a verify forward" in result.output
    (content,) = json.loads(out.read_text())["batches"]
    assert content["knee"] is None
    assert content["costs"]["verify"]["rows"] == [1, 2, 4, 6]
    assert content["costs"]["draft"]["rows"] == [1, 2, 8, 32]
    rows = read_step_rows(steps)
    assert {row.kind for row in rows} == {"verify", "draft_layer"}
    assert len({row.context for row in rows}) == 3
    assert len(rows) == 3 * (4 + 4)
    group = select_rows(rows, "target", 1)
    assert (len(group.rows), len(group.draft)) == (12, 12)


def test_knee_is_timed_where_no_budget_is_given(pair, tmp_path):
    out = tmp_path / "run.json"
    arguments = [*pair, "--policy", "chain:levels=2", "--requests", "2", "--json", str(out)]
    result = CliRunner().invoke(app, ["--max-new-tokens", "3", "--batch-size", "2,3", *arguments])
    assert result.exit_code == 0, result.output
    batches = json.loads(out.read_text())["batches"]
    assert [batch["knee"]["rows"][:2] for batch in batches] == [[2, 4], [3, 6]]
    assert all(batch["k_max"] >= 0 for batch in batches)
    assert "timed here" in result.output


def test_gates_are_fitted_in_the_warm_up(pair, tmp_path):
    draft = save_model(tmp_path / "close", seed=1, noise=0.05)
    prompts = write_prompts(tmp_path / "many.jsonl", 8)
    out = tmp_path / "run.json"
    files = ["--target", pair[1], "--draft", str(draft), "--prompts", str(prompts)]
    wanted = ["--requests", "2", "--calibration-requests", "6", "--max-new-tokens", "16"]
    sampled = ["--temperature", "0.8", "--batch-size", "3"]
    result = run([*files, *wanted, *sampled, "--policy", "echo:levels=4", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "of 6 prompts that are not evaluated" in result.output
    content = json.loads(out.read_text())
    assert content["num_requests"] == 2
    row = content["batches"][0]["rows"][1]
    assert row["parameters"]["taus"]
    assert row["parameters"]["w_topk"] == 1
    assert row["same_outputs"] == 2


def test_plain_decoding_needs_no_draft(pair):
    result = run([*pair[:2], *pair[4:], "--policy", "autoregressive", "--rate", "1000"])
    assert result.exit_code == 0, result.output
    assert "draft none" in result.output


def test_interrupt_keeps_what_is_finished(pair, monkeypatch, tmp_path):
    """Ctrl-C between two steps: finished requests are reported and marked."""
    original = serve_run.serve_all
    calls = []

    def interrupting(engine, requests, **options):
        calls.append(1)
        if len(calls) == 4 and options:  # the second policy's measured run

            def finished(count):
                if count == 2:
                    signal.raise_signal(signal.SIGINT)

            options["on_finished"] = finished
        return original(engine, requests, **options)

    monkeypatch.setattr(serve_run, "serve_all", interrupting)
    out = tmp_path / "run.json"
    result = run([*pair, "--policy", "chain:levels=2,static:tree=0/1", "--json", str(out)])
    assert result.exit_code == 130, result.output
    assert "stopped by Ctrl-C with 2 of 4 requests finished" in result.output
    content = json.loads(out.read_text())
    assert not content["is_complete"]
    (batch,) = content["batches"]
    rows = batch["rows"]
    assert [row["is_complete"] for row in rows] == [True, False]


def error_of(arguments):
    result = run(arguments)
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1, result.output
    return result.output


def test_errors_are_one_sentence(pair, tmp_path):
    said = error_of([*pair, "--policy", "echo"])
    assert "calibration takes 8 prompts that are not evaluated, but there are 4 in all" in said
    chain = ["--policy", "chain"]
    fixed = [*pair[:2], *pair[4:], "--policy", "static", "--draft", "prompt-lookup"]
    refused = error_of(fixed)
    assert "'static' verifies a fixed tree, but prompt lookup proposes only" in refused
    assert "A draft model alone can: give --draft." in refused
    assert "No model or path named 'smol-lm'" in error_of([*pair, *chain, "--draft", "smol-lm"])
    assert "repetition_penalty must be 1" in error_of([*pair, *chain, "--repetition-penalty", "2"])
    assert "top_p: " in error_of([*pair, *chain, "--top-p", "0"])
    assert "No policy named 'chian'" in error_of([*pair, "--policy", "chian"])
    other = save_model(tmp_path / "draft", seed=2, tokenizer=tiny_tokenizer(swap=True))
    assert "token 5 is 'w005'" in error_of([*pair, *chain, "--draft", str(other)])
    short = save_model(tmp_path / "short", seed=1, limit=8)
    said = error_of([*pair, *chain, "--target", str(short)])
    assert "target: prompt and output must fit in 8 positions; one question 0 needs 11" in said
    assert "--batch-size must be whole numbers" in error_of([*pair, *chain, "--batch-size", "a"])
    twice = error_of([*pair, *chain, "--batch-size", "2,2"])
    assert "batch_sizes must name each batch size once" in twice
    assert "--policy stands in front of 'parity'" in error_of([*chain, "parity", *pair])
    assert "create the folder" in error_of([*pair, *chain, "--json", str(tmp_path / "a" / "b")])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_cuda(pair):
    assert "needs a CUDA device" in error_of([*pair, "--policy", "chain", "--device", "cuda"])


def test_parity_says_what_it_compared(pair, monkeypatch):
    small = ["--batch-size", "2", "--max-new-tokens", "6", "--k-max", "8"]
    arguments = [
        "parity",
        *pair,
        *small,
        "--policy",
        "chain:levels=2,eagle3:levels=2,top_k=2,nodes=3",
    ]
    result = CliRunner().invoke(app, [*arguments, "--batch-size", "2,3"])
    assert result.exit_code == 0, result.output
    rows = table_rows(result.output, ("chain", "eagle3"))
    assert [row[:2] for row in rows] == [
        [name, size]
        for size in "23"
        for name in ("chain:levels=2", "eagle3:levels=2,top_k=2,nodes=3")
    ]
    assert all(int(row[3]) > 0 and row[-1] == "0" for row in rows)
    assert "Replay takes every decision the same way" in result.output
    plain = CliRunner().invoke(app, [*arguments[:-1], "autoregressive"])
    assert plain.exit_code == 2
    assert "one at least must draft" in plain.output
    monkeypatch.setattr(capture, "_write_path", lambda *_: None)
    near = ["--draft", pair[1]]  # a draft that is the target, so that something is accepted
    result = CliRunner().invoke(app, [*arguments, *near])
    assert result.exit_code == 1
    assert "DIFFERS at step 0, slot 0, accepted tokens" in result.output
    lookup = ["--draft", "prompt-lookup", "--policy", "eagle3:levels=2,top_k=2,nodes=3"]
    monkeypatch.undo()
    result = CliRunner().invoke(app, [*arguments[:-2], *lookup])
    assert result.exit_code == 0, result.output
    assert "Replay takes every decision the same way" in result.output


def table_rows(output, names):
    """Cells of the lines of a table that begin with one of the names; progress left out."""
    lines = [line.split() for line in output.splitlines() if line.startswith(names)]
    return [cells for cells in lines if not any(cell.startswith("request") for cell in cells)]


def test_compare_gives_a_table_per_batch_size(pair, tmp_path):
    """One command, one file; plain decoding is one row of every table, asked for or not."""
    out = tmp_path / "run.json"
    small = ["--max-new-tokens", "6", "--k-max", "8", "--batch-size", "1,3"]
    policies = ["--policy", "chain:levels=2,autoregressive"]
    arguments = ["compare", *pair, *small, *policies, "--json", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.count("outputs   token for token") == 2
    assert "batch 1, k_max 8 (given)" in result.output
    content = json.loads(out.read_text())
    assert [batch["batch_size"] for batch in content["batches"]] == [1, 3]
    for batch in content["batches"]:
        assert [row["policy"] for row in batch["rows"]] == ["autoregressive", "chain:levels=2"]
        assert batch["rows"][1]["same_outputs"] == 4
    assert content["is_complete"]
    assert "batch_sizes" not in content["config"]["defaults"]
    assert "seed" in content["config"]["defaults"]


def test_a_policy_is_enough(pair, tmp_path, monkeypatch):
    """`run_gpu --policy echo`: bundled prompts and head, lookup, gates fitted in the warm-up."""
    asked = []

    def locate(*names):
        asked.extend(names)
        found = [LocatedModel(Path(pair[1]), "Tiny/Model", "cache")]
        return [*found, LocatedModel(Path(pair[3]), "Tiny/Draft", "bundled")]

    monkeypatch.setattr(serve_start, "locate_models", locate)
    out = tmp_path / "run.json"
    spoken = write_prompts(tmp_path / "words.jsonl", 12)
    monkeypatch.setattr(serve_defaults, "PROMPTS", spoken)  # the tiny vocabulary knows no English
    result = CliRunner().invoke(app, ["--policy", "echo", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert asked == ["smollm2-135m", "smollm2-135m-eagle3"]
    said = result.output.splitlines()[0]
    draft = "--draft prompt-lookup+smollm2-135m-eagle3"
    assert said.startswith(f"defaults  --target smollm2-135m, {draft}, the bundled")
    assert "target Tiny/Model, draft prompt lookup + Tiny/Draft; float32" in result.output
    assert "of 4 prompts that are not evaluated" in result.output
    content = json.loads(out.read_text())
    assert content["num_requests"] == 8
    assert content["config"]["batch_sizes"] == [4]
    assert content["config"]["max_new_tokens"] == 64
    assert content["batches"][0]["rows"][1]["same_outputs"] == 8
    defaults = content["config"]["defaults"]
    assert "policies" not in defaults
    assert {"target", "batch_sizes", "prompts", "cap_all", "sampling.temperature"} < set(defaults)


def test_bundled_prompts_can_be_read():
    lines = [json.loads(line) for line in serve_defaults.PROMPTS.read_text().splitlines()]
    assert len({line["question_id"] for line in lines}) == len(lines) == 12
    assert all(len(line["turns"]) == 1 and line["turns"][0].strip() for line in lines)


def test_help_needs_no_models():
    code = (
        "import sys; from gpu_backend.cli import app; "
        "app(['--help'], standalone_mode=False); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert b"--k-max" in done.stdout
    assert b"record" in done.stdout
