"""A head's folder behind ``--draft``: served, compared with its replay, refused in one sentence."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from gpu_backend.cli import app
from gpu_backend.eagle3.writing import save_head
from gpu_backend.models import tokenizer_fingerprint
from tests.gpu_backend.eagle3.heads import LAYERS, head_config, tiny_head
from tests.gpu_backend.tiny import save_model, tiny_tokenizer, write_prompts
from traces.store import load

WIDE = "eagle3:levels=2,top_k=30,nodes=60"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    save_model(folder / "target", seed=1, num_hidden_layers=LAYERS)
    write_prompts(folder / "one.jsonl", 3)
    head = tiny_head(head_config(shares_target_head=True))
    fingerprint = {"tokenizer_sha256": tokenizer_fingerprint(tiny_tokenizer())}
    save_head(head, folder / "draft", target_num_layers=LAYERS, metadata=fingerprint)
    return folder


def run(folder, *arguments):
    names = {"--target": "target", "--draft": "draft", "--prompts": "one.jsonl"}
    paths = [part for name, file in names.items() for part in (name, str(folder / file))]
    small = ["--batch-size", "2", "--max-new-tokens", "6", "--k-max", "80"]
    command = [arguments[0]] if arguments and arguments[0] == "parity" else []
    return CliRunner().invoke(app, [*command, *small, *paths, *arguments[len(command) :]])


def test_a_run_says_how_the_head_was_understood(folder, tmp_path):
    out = tmp_path / "run.json"
    result = run(folder, "--policy", WIDE, "--json", str(out))
    assert result.exit_code == 0, result.output
    line = (
        "EAGLE-3, original layout; inputs of layers 2, 4, 5 of 8; rope theta 10000; no norm flags; "
        "78 of 97 tokens; the target's embedding and output layer"
    )
    assert f"head      {line}\n" in result.output
    assert "outputs   token for token those of plain decoding" in result.output
    content = json.loads(out.read_text())
    assert content["head"] == line
    assert content["draft"]["name"] == "draft"
    assert content["batches"][0]["rows"][1]["summary"]["mat"] > 1


def test_gates_are_fitted_with_a_head(folder):
    longer = ["--max-new-tokens", "30", "--calibration-requests", "2"]
    result = run(folder, "--policy", "echo:levels=2,top_k=40", *longer)
    assert result.exit_code == 0, result.output
    assert "fitted in the warm-up" in result.output


def test_parity_of_a_head(folder):
    result = run(folder, "parity", "--policy", WIDE)
    assert result.exit_code == 0, result.output
    assert "every decision the same way" in result.output


def test_a_head_of_another_target_is_refused(folder, tmp_path):
    other = tmp_path / "other"
    save_model(other / "target", seed=1, num_hidden_layers=LAYERS - 1)
    shutil.copytree(folder / "draft", other / "draft")
    shutil.copy(folder / "one.jsonl", other)
    result = run(other, "--policy", WIDE)
    assert result.exit_code == 2
    assert "target_num_hidden_layers is 8, the target's 7" in result.output
    shutil.rmtree(other / "target")
    save_model(
        other / "target", seed=1, num_hidden_layers=LAYERS, tokenizer=tiny_tokenizer(swap=True)
    )
    result = run(other, "--policy", WIDE)
    assert result.exit_code == 2
    assert "trained with the target's tokenizer" in result.output


def test_a_recording_of_a_head(folder, tmp_path):
    out = tmp_path / "head.safetensors"
    paths = {"target": folder / "target", "draft": folder / "draft", "out": out}
    sizes = {"max-new-tokens": 6, "levels": 3, "beam-width": 2, "top-k": 3, "chain-levels": 4}
    options = {**paths, "prompts": folder / "one.jsonl", "costed-as": "llama-3.1-8b", **sizes}
    command = ["record", *(part for k, v in options.items() for part in (f"--{k}", str(v)))]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    trace = load(out)
    assert trace.header.drafter == "eagle3"
    assert trace.num_positions == 15
    result = CliRunner().invoke(app, [*command, "--draft-vocab", "9"])
    assert result.exit_code == 2
    assert "vocabulary of an EAGLE-3 head is its own" in result.output
